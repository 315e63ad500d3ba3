"""Paired machines that nobody needs at the moment: the screen shows that they are gone all the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ring_faults import EXACT, Ring, eventually, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOST = [signal.SIGKILL, signal.SIGSTOP]
NAMES = ["killed", "stopped"]
GONE = ("lost", "paired")


@pytest.mark.parametrize("number", LOST, ids=NAMES)
@pytest.mark.parametrize("in_ring", [True, False], ids=["in the ring", "paired only"])
def test_lost_while_nothing_goes_on(tmp_path: Path, number: signal.Signals, in_ring: bool) -> None:
    with Ring(1) as ring:
        if in_ring:
            loaded = ring.load(write_model(tmp_path), EXACT)
            assert loaded.facts.ring is not None
            assert len(loaded.facts.ring.nodes) == 2
        gone = ring.followers[0]
        eventually(lambda: ring.state_of(gone) == ("ring" if in_ring else "ready"))
        gone.signal(number)
        eventually(lambda: ring.state_of(gone) in GONE)
        assert ring.state_of(gone) == ("lost" if in_ring else "paired")


@pytest.mark.parametrize("number", LOST, ids=NAMES)
def test_a_lent_machine_notices_that_an_idle_head_is_gone(tmp_path: Path, number: signal.Signals) -> None:
    with Ring(1) as ring:
        ring.load(write_model(tmp_path), EXACT)
        follower = ring.followers[0]
        eventually(lambda: follower.lending() is not None)
        ring.head.signal(number)
        eventually(lambda: follower.lending() is None)
