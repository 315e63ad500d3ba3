"""Native experts without a trunk: what central mode asks of the other nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cluster.central import CentralHead, CentralNode
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.expert_parallel import Loading, RankContext
from engine.planning.placement import Placement
from engine.runtimes.common.node_experts import NodeExperts
from engine.runtimes.native.runtime import NativeRuntime
from engine.runtimes.protocol import RingPlace
from tests.engine.cluster.memory_exchange import MemoryRing, on_all_ranks
from tests.engine.cluster.ring_conversation import assert_same, conversation
from tests.engine.cluster.ring_places import placed, placement_for
from tests.engine.runtimes.native_oracle import FAMILIES, load_native, needs_kernels
from tests.engine.runtimes.subjects import NATIVE, StoredModel
from tests.support.pairwise import pairwise
from tests.support.progress import quiet
from tests.support.tiny_families import TINY_MOE_FAMILIES

pytestmark = needs_kernels

TinyModel = Callable[..., Path]


def experts_of(folder: Path, context: RankContext, **options: Any) -> NodeExperts:
    return NativeRuntime().load_experts(folder, Load(id=1, model=folder.name, cpu_threads=1, **options), context, quiet)


def central(folder: Path, nodes: int, loading: Loading, one_by_one: bool = False) -> Any:
    """The head's logits; the other nodes have only experts."""
    placement = placement_for(folder, nodes, "overlapping")
    contexts = [RankContext("epoch", rank, placement, "central", loading) for rank in range(nodes)]
    memory = MemoryRing(nodes)

    def work(rank: int) -> Any:
        if rank:
            CentralNode(
                contexts[rank], memory.ends[rank], experts_of(folder, contexts[rank]), one_by_one=one_by_one
            ).serve()
        head = CentralHead(contexts[0], memory.ends[0], one_by_one=one_by_one)
        try:
            return conversation(NATIVE.load(folder, RingPlace(contexts[0], head)))
        finally:
            memory.ends[0].close()

    found = on_all_ranks(work, nodes)
    assert all(isinstance(result, PeerLost) for result in found[1:]), found[1:]
    return found[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "dtype", "nodes", "loading", "one_by_one"),
    [
        (family, dtype, *ring, one_by_one)
        for family, dtype, ring, one_by_one in pairwise(
            [family for family in FAMILIES if family in TINY_MOE_FAMILIES],
            ("float32", "bfloat16"),
            ((2, "selected"), (3, "busy-full"), (4, "router-aided")),
            (False, True),
        )
    ],
)
def test_central_mode_between_alike_nodes_equals_one_machine(
    family: str, dtype: str, nodes: int, loading: Loading, one_by_one: bool, stored_model: StoredModel
) -> None:
    folder = stored_model(NATIVE, family, dtype)
    alone = conversation(load_native(folder, cpu_threads=1))
    assert_same([central(folder, nodes, loading, one_by_one)], alone)


def test_a_node_runs_the_experts_of_its_rank_and_no_others(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral", dtype="bfloat16")
    placement = placed((0, 1, 2), 8, 2, "even")
    context = RankContext("epoch", 1, placement, "central")
    node = experts_of(folder, context)
    assert (node.width, node.count) == (48, placement.count_of(1))
    assert node.description.startswith("ring (node 2 of 2, central, native ")
    hidden = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    weights = np.full((3, 2), 0.5, np.float32)
    held = placement.held(1, 0)
    other = next(expert for expert in range(8) if expert not in held)
    indices = np.array([[held[0], -1], [held[1], held[0]], [-1, -1]], np.int32)
    results = node.run_experts(0, hidden, indices, weights)
    assert results.shape == (6, 48)
    assert (results[[1, 4, 5]] == 0).all() and (results[[0, 2, 3]] != 0).any(axis=1).all()
    assert (node.run_experts(0, hidden, indices, weights, extra=held) == results).all()
    doubled = node.run_experts(0, hidden * 2, indices, weights, scale=True)
    assert (doubled == results).all(), "twice the input times a half"
    for wrong in (other, 8, 2**31 - 1):
        indices[0, 0] = wrong
        with pytest.raises(ModelError, match="out of range"):
            node.run_experts(0, hidden, indices, weights)
        if wrong != other:
            with pytest.raises(ModelError, match="out of range"):
                node.run_experts(0, hidden, indices * 0 - 1, weights, extra=[wrong])
    indices[0, 0] = held[0]
    for shapes in ((hidden[:2], indices, weights), (hidden[:, :40], indices, weights), (hidden, indices, weights[:1])):
        with pytest.raises(ModelError, match="Hidden states"):
            node.run_experts(0, *shapes)
    assert node.run_experts(0, hidden[:0], indices[:0], weights[:0]).shape == (0, 48)
    node.close()
    with pytest.raises(ModelError, match="closed"):
        node.run_experts(0, hidden, indices, weights)


def test_a_layer_without_experts_of_this_node(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    everything_at_the_head = Placement((0, 1, 2), 2, tuple(tuple((0,) for _ in range(8)) for _ in range(3)))
    node = experts_of(folder, RankContext("epoch", 1, everything_at_the_head, "central"))
    hidden, weights = np.ones((1, 48), np.float32), np.ones((1, 2), np.float32)
    nobody = np.full((1, 2), -1, np.int32)
    assert (node.run_experts(1, hidden, nobody, weights) == 0).all()
    for ask in ({"indices": nobody * 0}, {"indices": nobody, "extra": [1]}):
        with pytest.raises(ModelError, match="no experts of layer 1"):
            node.run_experts(1, hidden, weights=weights, **ask)  # type: ignore[arg-type]


def test_what_cannot_be_loaded_says_why(tiny_model: TinyModel) -> None:
    place = Placement((0,), 1, (((0,),),))
    with pytest.raises(ModelError, match="no experts to share"):
        experts_of(tiny_model("llama"), RankContext("epoch", 0, place))
    with pytest.raises(ModelError, match="different models"):
        experts_of(tiny_model("mixtral"), RankContext("epoch", 0, place))
    gpt = tiny_model("gpt_oss")
    with pytest.raises(ModelError, match="choose the runtime torch"):
        experts_of(gpt, RankContext("epoch", 0, placement_for(gpt, 1, "overlapping")))


def test_a_changed_file_gives_no_results(tmp_path: Path, tiny_model: TinyModel) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in tiny_model("mixtral").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    node = experts_of(folder, RankContext("epoch", 0, placement_for(folder, 1, "overlapping")))
    hidden, weights = np.ones((1, 48), np.float32), np.ones((1, 2), np.float32)
    node.run_experts(0, hidden, np.zeros((1, 2), np.int32), weights)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="changed while the model was open"):
        node.run_experts(0, hidden, np.zeros((1, 2), np.int32), weights)
