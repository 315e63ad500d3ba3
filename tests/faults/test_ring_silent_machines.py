"""A lent machine that answers every heartbeat and contributes nothing: esc ends the answer, and without esc the ring
goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from ring_faults import EXACT, OTHER_PROMPT, Oracle, Ring, eventually

from engine.ipc.messages import Cancel
from engine.ipc.messages.ring import RingMode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AFTER = 400
"""Exchanges in which it takes part, those included that are measured while the ring is formed."""
SILENT = f"""
# Its contributions from a certain one on are never sent; a new epoch begins anew.
import os, pathlib, time
from engine.cluster.transport import mesh
_send = mesh.Mesh.send
def send(self, parts, capacity):
    self.sent = getattr(self, "sent", 0) + 1
    while self.sent > {AFTER} and not self._closed:
        pathlib.Path(os.environ["PRIVATELLM_HOME"], "silent").touch()
        time.sleep(0.05)
    _send(self, parts, capacity)
mesh.Mesh.send = send
"""
IMPATIENT = """
from engine.cluster import waiting
waiting.LIMIT_S, waiting.FIRST = 2.0, 1
"""


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[str, Ring]]:
    """By whether the head soon loses its patience."""
    made: dict[str, Ring] = {}
    try:
        made["patient"] = Ring(2, {2: SILENT})
        made["impatient"] = Ring(2, {0: IMPATIENT, 2: SILENT})
        yield made
    finally:
        for ring in made.values():
            ring.close()


@pytest.mark.parametrize("mode", ["exact", "central"])
def test_esc_does_not_wait_for_it(rings: dict[str, Ring], model: Path, mode: RingMode) -> None:
    ring = rings["patient"]
    silent = ring.machines[2].home / "silent"
    silent.unlink(missing_ok=True)
    ring.load(model, replace(EXACT, mode=mode))
    asked = ring.ask(1500)
    ring.until_tokens(asked, 5)
    # Nothing comes any more, and the limit is far away.
    eventually(silent.exists)
    ring.engine.send(Cancel(id=ring.engine.new_id(), target=asked))
    found = ring.finished(asked)
    assert found.finish_reason == "cancelled"
    assert 5 <= len(found.token_ids) < 1500
    assert len(ring.answer(5, OTHER_PROMPT).token_ids) == 5


@pytest.mark.parametrize("mode", ["exact", "central"])
def test_the_others_go_on_without_it(rings: dict[str, Ring], model: Path, alone: Oracle, mode: RingMode) -> None:
    ring = rings["impatient"]
    ring.load(model, replace(EXACT, mode=mode))
    since = ring.mark()
    found = ring.answer(200)
    assert found.finish_reason == "length"
    if mode == "exact":
        assert found.token_ids == alone(200).token_ids
    said = " ".join(ring.notices(since))
    assert f"Lost {ring.machines[2].name}: contributed nothing for" in said
    assert "going on with 2 machines" in said.lower()
