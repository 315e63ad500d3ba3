"""A ring over a network that loses packets: everything arrives, later, and nobody is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lossy_wire import LossyWire, NetemWire, TunWire
from ring_faults import ENTER, OTHER_PROMPT, PROMPT, Oracle, Ring, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOST = 0.02
DELAY_S = 0.005


@pytest.fixture(params=[TunWire, NetemWire])
def wire(request: pytest.FixtureRequest) -> Iterator[LossyWire]:
    made: LossyWire = request.param(os.getpid())
    try:
        made.make()
        made.lose(LOST, DELAY_S)
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"no such network can be made here: {getattr(error, 'stderr', '') or error}")
    yield made
    made.remove()


def test_a_network_that_loses_packets_changes_nothing_but_the_time(wire: LossyWire, model: Path, alone: Oracle) -> None:
    """Finding each other, sending the weights, measuring, loading and answering, with one packet in fifty lost."""
    with Ring(1, codes={1: ENTER.format(space=wire.space)}, hosts=(wire.here, wire.there)) as ring:
        since = ring.mark()
        ring.load(model)
        for prompt in (PROMPT, OTHER_PROMPT):
            assert ring.answer(80, prompt).token_ids == alone(80, prompt).token_ids
        assert not [text for text in ring.notices(since) if "Lost" in text or "left out" in text]
        eventually(lambda: set(ring.states().values()) == {"ring"}, why=str(ring.states()))
        assert wire.lost() > 10
