"""A lent machine that answers every heartbeat and contributes nothing: esc ends the answer, and without esc the ring
goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.ipc.messages import Cancel
from engine.ipc.messages.ring import RingMode
from tests.faults import hooks
from tests.faults.ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring
from tests.support.eventually import eventually
from tests.support.hooked_engine import hooked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[str, Ring]]:
    """By whether the head soon loses its patience."""
    made: dict[str, Ring] = {}
    try:
        made["patient"] = Ring(1, {1: hooked(hooks.falls_silent)})
        made["impatient"] = Ring(2, {0: hooked(hooks.impatient), 2: hooked(hooks.falls_silent)})
        yield made
    finally:
        for ring in made.values():
            ring.close()


@pytest.mark.parametrize("mode", ["exact", pytest.param("central", marks=pytest.mark.soak)])
def test_esc_does_not_wait_for_it(rings: dict[str, Ring], model: Path, mode: RingMode) -> None:
    ring = rings["patient"]
    silent = ring.machines[1].home / "silent"
    ring.load(model, replace(EXACT, mode=mode))
    silent.unlink(missing_ok=True)
    asked = ring.ask(1500)
    ring.until_tokens(asked, 1)
    # Nothing comes any more, and the limit is far away.
    eventually(silent.exists)
    ring.engine.send(Cancel(id=ring.engine.new_id(), target=asked))
    found = ring.finished(asked)
    assert found.finish_reason == "cancelled"
    assert 1 <= len(found.token_ids) < 1500
    assert len(ring.answer(5, OTHER_PROMPT).token_ids) == 5


@pytest.mark.parametrize("mode", [pytest.param("exact", marks=pytest.mark.soak), "central"])
def test_the_others_go_on_without_it(rings: dict[str, Ring], model: Path, alone: Oracle, mode: RingMode) -> None:
    ring = rings["impatient"]
    ring.load(model, replace(EXACT, mode=mode))
    since = ring.mark()
    found = ring.answer(30)
    assert found.finish_reason == "length"
    if mode == "exact":
        assert found.token_ids == alone(30).token_ids
    said = " ".join(ring.notices(since))
    assert f"Lost {ring.machines[2].name}: contributed nothing for" in said
    assert "going on with 2 machines" in said.lower()
