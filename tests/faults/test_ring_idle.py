"""Paired machines that nobody needs at the moment: the screen shows in time that they are gone all the same."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from ring_faults import EXACT, NOISE_S, Ring, eventually, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOST = [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 3.0)]
NAMES = ["killed", "stopped"]
GONE = ("lost", "paired")


@pytest.mark.parametrize(("number", "allowed"), LOST, ids=NAMES)
@pytest.mark.parametrize("in_ring", [True, False], ids=["in the ring", "paired only"])
def test_lost_while_nothing_goes_on(tmp_path: Path, number: signal.Signals, allowed: float, in_ring: bool) -> None:
    with Ring(1) as ring:
        if in_ring:
            loaded = ring.load(write_model(tmp_path), EXACT)
            assert loaded.facts.ring is not None
            assert len(loaded.facts.ring.nodes) == 2
        gone = ring.followers[0]
        eventually(lambda: ring.state_of(gone) == ("ring" if in_ring else "ready"))
        began = time.monotonic()
        gone.signal(number)
        eventually(lambda: ring.state_of(gone) in GONE)
        took = time.monotonic() - began
        assert ring.state_of(gone) == ("lost" if in_ring else "paired")
        assert took < allowed + NOISE_S


@pytest.mark.parametrize(("number", "allowed"), LOST, ids=NAMES)
def test_a_lent_machine_notices_that_an_idle_head_is_gone(
    tmp_path: Path, number: signal.Signals, allowed: float
) -> None:
    with Ring(1) as ring:
        ring.load(write_model(tmp_path), EXACT)
        follower = ring.followers[0]
        eventually(lambda: follower.lending() is not None)
        began = time.monotonic()
        ring.head.signal(number)
        eventually(lambda: follower.lending() is None)
        assert time.monotonic() - began < allowed + NOISE_S
