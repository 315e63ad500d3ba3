"""What a machine of a real ring is sent and keeps, to the byte: the trunk and its own experts, once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ipc.messages.ring import NodeShard, RingMode
from tests.engine.cluster import machine_hooks
from tests.engine.cluster.real_rings import ANSWER, Machine, RealRing
from tests.support.hooked_engine import hooked
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

SMALL = 128 * 1024
"""Configuration, tokenizer, manifest and the outlines of files; blocks of a disk that are begun."""


class Counted:
    """A ring of three, and the bytes of weights that came to each follower."""

    def __init__(self, folder: Path) -> None:
        self._files = [folder / f"received-{rank}" for rank in range(3)]
        followers = [Machine(arguments=hooked(machine_hooks.counting, path=str(path))) for path in self._files[1:]]
        self.ring = RealRing(folder / "ring", [Machine(), *followers])
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """What was received and kept until now does not count."""
        self._before = {}
        self._before = {node_id: self.kept(node_id) for node_id in self.ring.ids}
        for node_id in self.ring.ids:
            self.take_received(node_id)

    def take_received(self, node_id: str) -> int:
        """Since this was last asked."""
        path = self._files[self.ring.ids.index(node_id)]
        numbers = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return sum(map(int, numbers))

    def kept(self, node_id: str) -> int:
        """Bytes on its disk, holes in files not counted."""
        folder = self.ring.engines[self.ring.ids.index(node_id)].home / "models"
        now = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        return now - self._before.get(node_id, 0)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    made = Counted(tmp_path_factory.mktemp("counted"))
    yield made
    made.ring.close()


@pytest.fixture
def counted(machines: Counted) -> Counted:
    machines.begin()
    return machines


seeds = itertools.count()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One that no machine has."""
    sizes = {"hidden_size": 160, "moe_intermediate_size": 160, "intermediate_size": 160, "num_experts": 16}
    return write_tiny_model(tmp_path / "tiny", "qwen3_moe", seed=next(seeds), **sizes)


@pytest.mark.parametrize("mode", ["exact", "central"])
def test_a_machine_is_sent_its_share_once_and_nothing_else(counted: Counted, model: Path, mode: RingMode) -> None:
    ring = counted.ring
    followers = [share for share in ring.form(model, "native", 2, mode=mode).nodes if share.rank]
    first = ring.answer()
    assert len(first) == ANSWER
    for share in followers:
        assert (share.trunk_bytes == 0) == (mode == "central")
        check_sent(share, counted.take_received(share.node_id), counted.kept(share.node_id))
    # Again, and the machines have all of it.
    for share in ring.form(model, "native", 2, mode=mode).nodes:
        if share.rank:
            assert counted.take_received(share.node_id) == 0
            assert share.has_bytes >= share.trunk_bytes + share.expert_bytes
            check_sent(share, counted.kept(share.node_id), counted.kept(share.node_id))
    assert ring.answer() == first


def test_another_division_moves_only_what_is_new(counted: Counted, model: Path) -> None:
    """Two followers become one: it is sent the experts that it lacks, not the trunk, nor its own again."""
    ring = counted.ring
    before = {share.node_id: share for share in ring.form(model, "native", 2, mode="exact").nodes}
    mine = ring.ids[1]
    assert counted.take_received(mine) > 0
    after = {share.node_id: share for share in ring.form(model, "native", 1, mode="exact").nodes}
    grown = after[mine].expert_bytes - before[mine].expert_bytes
    assert grown > 0
    assert grown <= counted.take_received(mine) <= grown + SMALL
    assert counted.kept(mine) <= after[mine].trunk_bytes + after[mine].expert_bytes + SMALL


def check_sent(share: NodeShard, received: int, kept: int) -> None:
    expected = share.trunk_bytes + share.expert_bytes
    assert share.expert_bytes > 2_000_000  # what is added for small files is next to nothing
    assert expected <= received <= expected + SMALL
    assert expected <= kept <= expected + SMALL
