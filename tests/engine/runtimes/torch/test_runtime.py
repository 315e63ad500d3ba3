"""A ring of torch nodes: experts that torch runs, memory that runs out, experts beyond the routes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cluster.all_gather import RingLayers
from engine.cluster.contributions import NodeFailed
from engine.moe.backend import ExpertBackend
from engine.moe.executor import RingExecutor
from engine.moe.expert_parallel import Loading
from engine.planning.placement import Placement
from engine.runtimes.torch.model import TorchModel
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation
from tests.engine.cluster.ring_places import PLACEMENTS, placement_for, places
from tests.engine.runtimes.subjects import TORCH
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("one_kernel")


def load_ring(folder: Path, placement: Placement, loading: Loading = "selected", **options: Any) -> list[TorchModel]:
    return [TORCH.load(folder, place, **options) for place in places(placement, loading=loading)]


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "how", "nodes"), pairwise(("float32", "bfloat16"), PLACEMENTS, (1, 2, 3)))
def test_torch_experts_too(
    dtype: str, how: str, nodes: int, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = tiny_model("qwen3_moe")
    alone = TORCH.load(folder, None, dtype=dtype)
    assert "torch, cpu" in alone.facts.executor
    models = load_ring(folder, placement_for(folder, nodes, how), dtype=dtype)
    assert_same(all_conversations(models), conversation(alone))


# --- what can happen in a ring --------------------------------------------------------------------------------------


def ring_of(folder: Path, nodes: int) -> tuple[list[TorchModel], list[RingLayers]]:
    placement = placement_for(folder, nodes, "overlapping")
    made = places(placement)
    layers = [place.exchange for place in made]
    assert all(isinstance(each, RingLayers) for each in layers)
    return [TORCH.load(folder, place, dtype="float32") for place in made], layers


def backend_of(model: TorchModel) -> ExpertBackend[torch.Tensor]:
    assert isinstance(model.executor, RingExecutor)
    return model.executor.backend


def test_out_of_memory_on_one_node_is_told_to_the_others(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, layers = ring_of(tiny_model("olmoe"), 3)

    def no_memory(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for the experts")

    monkeypatch.setattr(backend_of(models[1]), "outputs", no_memory)

    def work(rank: int) -> None:
        with pytest.raises(torch.OutOfMemoryError if rank == 1 else NodeFailed, match="no memory for the experts"):
            models[rank].start().extend([3, 4, 5])

    must_succeed(on_all_ranks(work, 3))
    assert [each.disagreements for each in layers] == [0, 0, 0]


@pytest.mark.parametrize("loading", ["selected", "busy-full"])
def test_experts_beyond_the_routes_are_run(
    loading: Loading, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("mixtral")
    placement = placement_for(folder, 2, "even")
    models = load_ring(folder, placement, loading=loading, dtype="float32")
    ran: list[list[set[int]]] = [[], []]
    for rank, model in enumerate(models):
        own = backend_of(model)

        def counted(layer: int, hidden: Any, indices: Any, *more: Any, own: Any = own, rank: int = rank) -> Any:
            ran[rank].append(set(indices.unique().tolist()) - {-1})
            return type(own).outputs(own, layer, hidden, indices, *more)

        monkeypatch.setattr(own, "outputs", counted)
    all_conversations(models)
    everything = [set(placement.held(rank, layer)) for rank in range(2) for layer in placement.layers]
    assert all(any(each <= held for held in everything) for calls in ran for each in calls)
    beyond = sum(len(calls) for calls in ran)
    if loading == "busy-full":
        assert beyond > 2 * 8 * len(placement.layers)
    assert beyond > 0
