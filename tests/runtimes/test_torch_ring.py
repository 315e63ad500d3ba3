"""A torch ring is one torch node, to the bit: every family, both dtypes, unequal and overlapping placements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linked_nodes import LinkedNodes
from memory_exchange import MemoryRing, must_succeed, note_order, on_all_ranks
from ring_conversation import all_conversations, assert_same, conversation
from ring_places import PLACEMENTS, placed, places
from tiny_models import TINY_MOE_FAMILIES
from torch_oracle import no_progress, prompt

from engine.cluster.all_gather import RingLayers
from engine.cluster.contributions import NodeFailed
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.opening import open_model
from engine.moe.backend import ExpertBackend
from engine.moe.executor import RingExecutor
from engine.moe.rank_context import Loading, Mode
from engine.planning.placement import Placement
from engine.runtimes.protocol import Interrupted, Logits, RingPlace
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.runtime import TorchRuntime


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of torch's kernels runs is a setting of the process, which ranks that are threads would take from each
    other."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def load(folder: Path, place: RingPlace | None, **options: Any) -> TorchModel:
    request = Load(id=1, model=folder.name, cpu_threads=1, **options)
    return TorchRuntime(find_gpu=lambda: None).load(folder, request, no_progress, place)


def load_ring(
    folder: Path, placement: Placement, mode: Mode = "exact", loading: Loading = "selected", **options: Any
) -> list[TorchModel]:
    return [load(folder, place, **options) for place in places(placement, mode, loading)]


def placement_for(folder: Path, nodes: int, how: str) -> Placement:
    experts = open_model(folder).experts
    assert experts is not None
    return placed(tuple(experts.layers), experts.count, nodes, how)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY_MOE_FAMILIES)
def test_a_ring_is_one_node_to_the_bit(family: str, dtype: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    alone = conversation(load(folder, None, dtype=dtype, partitioning="cpu"))
    for nodes, how in ((2, "unequal"), (3, "overlapping"), (4, "even")):
        models = load_ring(folder, placement_for(folder, nodes, how), dtype=dtype)
        assert_same(all_conversations(models), alone)
        for model in models:
            model.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", PLACEMENTS)
def test_torch_experts_too(
    how: str, dtype: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    folder = tiny_model("qwen3_moe")
    alone = load(folder, None, dtype=dtype)
    assert "torch, cpu" in alone.facts.executor
    expected = conversation(alone)
    for nodes in (1, 2, 3):
        models = load_ring(folder, placement_for(folder, nodes, how), dtype=dtype)
        assert_same(all_conversations(models), expected)


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "deepseek_v3"])
def test_fast_mode_is_close_and_the_same_on_all_nodes(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    alone = conversation(load(folder, None, dtype="float32"))
    models = load_ring(folder, placement_for(folder, 3, "overlapping"), "fast", dtype="float32")
    found = all_conversations(models)
    assert_same(found[1:], found[0])
    for ours, expected in zip(found[0], alone, strict=True):
        assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4_text"])
def test_nodes_whose_logits_nobody_reads_run_no_output_head(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    alone = conversation(load(folder, None, dtype="float32"))
    made = places(placement_for(folder, 3, "overlapping"))
    models = [load(folder, replace(place, logits=place.context.rank == 0), dtype="float32") for place in made]
    heads = [0, 0, 0]
    for rank, model in enumerate(models):

        def count(*_: Any, rank: int = rank) -> None:
            heads[rank] += 1

        model._module.get_output_embeddings().register_forward_pre_hook(count)
    head, *others = all_conversations(models)
    assert_same([head], alone)
    assert heads == [len(alone), 0, 0]
    for found in others:
        assert [each.shape for each in found] == [(*each.shape[:-1], 0) for each in alone]


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


def test_a_router_that_differs_is_mended_and_logits_stay_those_of_one_node(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    alone = conversation(load(folder, None, dtype="float32"))
    models, layers, _ = ring_of(folder, 3)
    for name, parameter in models[2]._module.named_parameters():
        if name.endswith("1.mlp.gate.weight"):
            with torch.no_grad():
                parameter.copy_(parameter.flip(0))
            break
    else:
        raise AssertionError("no router found")
    found = all_conversations(models)
    assert_same(found, alone)
    assert len({each.disagreements for each in layers}) == 1 and layers[0].disagreements > 4
    notices = models[0].recorder.take_notices()
    assert "layer 1" in notices[0] and "central" in notices[1]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_prefill_that_the_head_gives_up_leaves_all_rows_as_they_were(
    at: int, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("granitemoe")
    model = load(folder, None, dtype="float32")
    tokens = prompt(model, 30)
    rows = model.start()
    rows.extend(tokens[:10])
    expected = rows.extend(tokens[20:])
    models, layers, _ = ring_of(folder, 2)

    def work(rank: int) -> Logits | None:
        model, mine = models[rank], layers[rank]
        rows = model.start()
        mine.begin_pass()
        rows.extend(tokens[:10])
        asked = 0

        def check() -> None:
            nonlocal asked
            if asked == at:
                raise Interrupted
            asked += 1

        if rank == 0:
            model.between_layers = check
        mine.begin_pass()
        with pytest.raises(Interrupted):
            rows.extend(tokens[10:20])
        if rank == 0:
            assert mine.give_up()
            model.between_layers = None
        assert rows.length == 10
        mine.begin_pass()
        return rows.extend(tokens[20:])

    for found in must_succeed(on_all_ranks(work, 2)):
        assert np.array_equal(found, expected)


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


@pytest.mark.parametrize("loading", ["selected", "router-aided", "busy-full"])
def test_experts_beyond_the_routes_change_nothing_and_are_run(
    loading: Loading, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("mixtral")
    alone = conversation(load(folder, None, dtype="float32"))
    placement = placement_for(folder, 2, "even")
    models = load_ring(folder, placement, loading=loading, dtype="float32")
    ran: list[list[set[int]]] = [[], []]
    for rank, model in enumerate(models):
        own = backend_of(model)

        def counted(layer: int, hidden: Any, indices: Any, *more: Any, own: Any = own, rank: int = rank) -> Any:
            ran[rank].append(set(indices.unique().tolist()) - {-1})
            return type(own).outputs(own, layer, hidden, indices, *more)

        monkeypatch.setattr(own, "outputs", counted)
    assert_same(all_conversations(models), alone)
    everything = [set(placement.held(rank, layer)) for rank in range(2) for layer in placement.layers]
    assert all(any(each <= held for held in everything) for calls in ran for each in calls)
    beyond = sum(len(calls) for calls in ran)
    if loading == "busy-full":
        assert beyond > 2 * 8 * len(placement.layers)
    assert beyond > 0


def test_a_ring_counts_all_routes_and_times_the_exchange(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("deepseek_v3")
    alone = load(folder, None, dtype="float32")
    conversation(alone)
    models, _, _ = ring_of(folder, 2)

    def work(rank: int) -> None:
        models[rank].recorder.enabled = True
        conversation(models[rank])

    must_succeed(on_all_ranks(work, 2))
    assert alone.popularity is not None
    for model in models:
        assert model.popularity is not None
        frame = model.recorder.frame(1)
        for layer in alone.popularity.layers:
            assert model.popularity.counts(layer) == alone.popularity.counts(layer)
            times = frame.decode.layers[layer]
            assert times.exchange > 0 and times.wait > 0 and times.experts > 0 and times.attention > 0
        assert frame.expert_use == [list(alone.popularity.counts(layer)) for layer in alone.popularity.layers]


def test_facts_say_what_this_node_does(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    alone = load(folder, None, dtype="float32")
    models = load_ring(folder, placement_for(folder, 2, "unequal"), dtype="float32")
    assert [model.facts.executor.split(",")[0] for model in models] == ["ring (node 1 of 2", "ring (node 2 of 2"]
    shares = [model.facts.expert_bytes for model in models]
    assert sum(shares) == alone.facts.expert_bytes and shares[0] == 7 * shares[1]


def test_a_place_that_does_not_fit_the_model_is_refused(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral")
    wrong = placed((0, 1), 8, 2)
    with pytest.raises(ModelError, match="8 in layers"):
        load(folder, places(wrong)[0])
    with pytest.raises(ModelError, match="place in a ring"):
        load(folder, None, partitioning="ring")


@pytest.mark.parametrize("transport", ["tls", "socket", "gloo"])
def test_over_real_links(transport: Any, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2_moe")
    alone = conversation(load(folder, None, dtype="bfloat16"))
    nodes = LinkedNodes(3)
    try:
        ends = nodes.everywhere(lambda node: open_exchange(transport, node.links, node.epoch))
        made = places(placement_for(folder, 3, "overlapping"), exchanges=ends)
        models = [load(folder, place, dtype="bfloat16") for place in made]
        assert_same(all_conversations(models), alone)
        ends[2].close()
        for rank in (0, 1):
            with pytest.raises(PeerLost):
                models[rank].start().extend([3, 4, 5])
        for end in ends:
            end.close()
    finally:
        nodes.close()


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
