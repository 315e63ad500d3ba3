"""A ring over a network that loses packets: everything arrives, later, and nobody is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import hooks
from tests.faults.lossy_wire import LossyWire, NetemWire, TunWire
from tests.faults.ring_faults import OTHER_PROMPT, PROMPT, Oracle, Ring
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.slow

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
    there = hooked(hooks.in_namespace, name=wire.space)
    with Ring(1, arguments={1: there}, hosts=(wire.here, wire.there)) as ring:
        since = ring.mark()
        ring.load(model)
        for prompt in (PROMPT, OTHER_PROMPT):
            assert ring.answered_by_all(30, prompt) == alone(30, prompt).token_ids
        assert not [text for text in ring.notices(since) if "Lost" in text or "left out" in text]
        assert wire.lost() > 10
