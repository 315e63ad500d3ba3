"""A machine that comes and goes without being of use changes nothing: neither the ring nor what it has read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.faults.ring_faults import EXACT, PROMPT, Oracle, Ring
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    with Ring(2) as made:
        yield made


def test_nothing_is_run_again_for_it(ring: Ring, model: Path, alone: Oracle) -> None:
    used, unused = ring.followers
    loaded = ring.load(model, replace(EXACT, shares={unused.identity.node_id: 0}))
    assert loaded.facts.ring is not None
    assert [shard.node_id for shard in loaded.facts.ring.nodes[1:]] == [used.identity.node_id]
    since = ring.mark()
    first = ring.answer(40)
    assert first.token_ids == alone(40).token_ids
    prompt = [*PROMPT, *first.token_ids, 7]
    for there in (False, True):
        if there:
            unused.returns()
        else:
            unused.kill()
        eventually(lambda there=there: (ring.state_of(unused) == "ready") == there)  # type: ignore[misc]
        found = ring.answer(8, prompt)
        assert found.token_ids == alone(8, prompt).token_ids
        assert found.prefilled_tokens <= 2, "the question, and the last token of the answer before it"
        prompt = [*prompt, *found.token_ids, 8]
    assert not [text for text in ring.notices(since) if "oing on with" in text]
