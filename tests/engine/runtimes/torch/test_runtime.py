"""A ring of torch nodes: experts that torch runs, memory that runs out, shared experts beside the exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cluster.all_gather import RingLayers
from engine.cluster.contributions import NodeFailed
from engine.ipc.messages import Load
from engine.moe.backend import ExpertBackend
from engine.moe.executor import RingExecutor
from engine.moe.expert_parallel import Loading
from engine.planning.placement import Placement
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.runtime import TorchRuntime
from tests.engine.cluster.memory_exchange import MemoryRing, must_succeed, note_order, on_all_ranks
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation
from tests.engine.cluster.ring_places import PLACEMENTS, placement_for, places
from tests.support.pairwise import pairwise
from tests.support.progress import quiet

pytestmark = pytest.mark.usefixtures("one_kernel")


def load(folder: Path, place: RingPlace | None, **options: Any) -> TorchModel:
    request = Load(id=1, model=folder.name, cpu_threads=1, **options)
    return TorchRuntime(find_gpu=lambda: None).load(folder, request, quiet, place)


def load_ring(folder: Path, placement: Placement, loading: Loading = "selected", **options: Any) -> list[TorchModel]:
    return [load(folder, place, **options) for place in places(placement, loading=loading)]


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "how", "nodes"), pairwise(("float32", "bfloat16"), PLACEMENTS, (1, 2, 3)))
def test_torch_experts_too(
    dtype: str, how: str, nodes: int, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = tiny_model("qwen3_moe")
    alone = load(folder, None, dtype=dtype)
    assert "torch, cpu" in alone.facts.executor
    models = load_ring(folder, placement_for(folder, nodes, how), dtype=dtype)
    assert_same(all_conversations(models), conversation(alone))


# --- what can happen in a ring --------------------------------------------------------------------------------------


def ring_of(folder: Path, nodes: int, **options: Any) -> tuple[list[TorchModel], list[RingLayers], MemoryRing]:
    placement = placement_for(folder, nodes, "overlapping")
    memory = MemoryRing(nodes)
    made = places(placement, exchanges=list(memory.ends), **options)
    layers = [place.exchange for place in made]
    assert all(isinstance(each, RingLayers) for each in layers)
    return [load(folder, place, dtype="float32") for place in made], layers, memory


def backend_of(model: TorchModel) -> ExpertBackend[torch.Tensor]:
    assert isinstance(model.executor, RingExecutor)
    return model.executor.backend


def test_out_of_memory_on_one_node_is_told_to_the_others(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, layers, _ = ring_of(tiny_model("olmoe"), 3)

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


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "llama4_text", "qwen2_moe"])
def test_shared_experts_are_computed_between_sending_and_receiving(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(family)
    alone = load(folder, None, dtype="float32")
    models, _, memory = ring_of(folder, 1)
    happened: list[str] = []
    note_order(memory.ends[0], happened)
    handles = [
        module.down_proj.register_forward_pre_hook(lambda *_: happened.append("shared"))
        for name, module in models[0]._module.named_modules()
        if name.endswith(("shared_expert", "shared_experts"))
    ]
    assert handles
    found, expected = models[0].start().extend([3, 4, 5]), alone.start().extend([3, 4, 5])
    assert found is not None and expected is not None and np.array_equal(found, expected)
    assert happened == ["send", "shared", "receive"] * len(handles)
