"""A follower whose person lends less memory than is free holds what fits there, and the answer is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.models.folders.shard_files import read_shard
from tests.faults.ring_faults import EXACT, Ring, write_large_model

pytestmark = pytest.mark.slow

LENT = 7_000_000


def test_less_memory_is_lent_than_is_free(tmp_path: Path) -> None:
    """Of 32 experts of 0.55 MB the follower would hold half."""
    folder = write_large_model(tmp_path / "large", hidden_size=96, intermediate_size=480)
    choice = replace(EXACT, overlap=False)
    with Ring(1) as ring:
        freely = ring.load(folder, choice).facts.ring
        assert freely is not None
        assert freely.nodes[1].experts == 16
        answer = ring.answer(8).token_ids
    with Ring(1, terms={1: {"lend_memory": LENT, "keep_resident": False, "lock_memory": True}}) as ring:
        bound = ring.load(folder, choice).facts.ring
        assert bound is not None
        head, node = bound.nodes
        assert node.memory_free == LENT
        assert 0 < node.experts < 16 and head.experts + node.experts == 32
        assert node.expert_bytes + node.trunk_bytes < LENT
        (share,) = [path for path in (ring.followers[0].home / "models").iterdir() if path.name.endswith("share")]
        assert sum(map(len, read_shard(share).experts.values())) == node.experts
        assert ring.answer(8).token_ids == answer
        state = ring.engine.state()
        assert state is not None
        assert [peer.memory_free for peer in state.peers] == [LENT]
