"""The native trunk in a ring equals one machine, to the bit, in exact mode; and leaves a pass as it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_exchange import MemoryRing, must_succeed, note_order, on_all_ranks
from native_oracle import FAMILIES, load_native, needs_kernels
from ring_places import PLACEMENTS, placed, places
from tiny_models import TINY_MOE_FAMILIES
from torch_oracle import no_progress, prompt

from engine.cluster.all_gather import RingLayers
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.opening import open_model
from engine.moe.expert_parallel import Gathered, LayerExchange, Routes
from engine.moe.kernels.bindings import available
from engine.moe.rank_context import RankContext
from engine.moe.timing import Recorder
from engine.planning.placement import Placement
from engine.runtimes import runtime_named
from engine.runtimes.choosing import why_not_native
from engine.runtimes.native.bindings import native
from engine.runtimes.native.model import NativeModel
from engine.runtimes.protocol import Interrupted, Logits, RingPlace

pytestmark = needs_kernels

MOE = tuple(family for family in FAMILIES if family in TINY_MOE_FAMILIES)
DENSE = tuple(family for family in FAMILIES if family not in TINY_MOE_FAMILIES)

TinyModel = Callable[..., Path]


def in_ring(folder: Path, place: RingPlace, **options: Any) -> NativeModel:
    request = Load(id=1, model=folder.name, partitioning="ring", **({"cpu_threads": 2} | options))
    loaded = runtime_named("native").load(folder, request, no_progress, place)
    assert isinstance(loaded, NativeModel)
    return loaded


def placement_of(folder: Path, nodes: int, how: str = "even") -> Placement:
    experts = open_model(folder).experts
    assert experts is not None
    return placed(tuple(experts.layers), experts.count, nodes, how)


def ring_of(folder: Path, nodes: int, how: str = "even", **options: Any) -> list[NativeModel]:
    contexts = {key: options.pop(key) for key in ("mode", "loading") if key in options}
    return [in_ring(folder, place, **options) for place in places(placement_of(folder, nodes, how), **contexts)]


def conversation(model: NativeModel, length: int = 37) -> list[Logits]:
    """Prefill in two chunks, decoding, a cut, and beams that are reordered; all logits on the way."""
    tokens = prompt(model, length)
    rows = model.start()
    assert rows.extend(tokens[:5], want_logits=False) is None
    found = [rows.extend(tokens[5:])]
    found += [rows.step([token])[0] for token in (5, 9, 17)]
    rows.truncate(length + 1)
    found.append(rows.extend([21, 22]))
    beams = rows.fan_out(3)
    for chosen, parents in (([5, 6, 7], [0, 0, 2]), ([8, 9, 10], [2, 1, 1])):
        found += list(beams.step(chosen))
        beams.reorder(parents)
    found.append(rows.step([11])[0])
    return found


def same(ours: list[Logits], theirs: list[Logits]) -> bool:
    return len(ours) == len(theirs) and all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def together(models: list[NativeModel], work: Callable[[NativeModel], Any] = conversation) -> list[Any]:
    return must_succeed(on_all_ranks(lambda rank: work(models[rank]), len(models)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("family", MOE)
def test_exact_mode_equals_one_machine_to_the_bit(family: str, nodes: int, dtype: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family, dtype=dtype)
    alone = conversation(load_native(folder))
    for how in PLACEMENTS if nodes > 1 else PLACEMENTS[:1]:
        models = ring_of(folder, nodes, how)
        assert models[0].facts.dtype == dtype
        for found in together(models):
            assert same(found, alone), how


@pytest.fixture(scope="module")
def one_machine(tiny_model: TinyModel) -> tuple[Path, NativeModel]:
    folder = tiny_model("qwen3_moe", dtype="bfloat16")
    return folder, load_native(folder)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_placement_equals_one_machine(data: st.DataObject, one_machine: tuple[Path, NativeModel]) -> None:
    """Also nodes that hold nothing of a layer, or nothing at all, and prompts at the border of few and many routes."""
    folder, alone = one_machine
    nodes, layers = data.draw(st.integers(2, 4)), tuple(alone.facts.moe_layers)
    ranks = st.sets(st.integers(0, nodes - 1), min_size=1, max_size=nodes).map(lambda held: tuple(sorted(held)))
    rows = tuple(tuple(data.draw(ranks) for _ in range(alone.facts.experts)) for _ in layers)
    models = [in_ring(folder, place) for place in places(Placement(layers, nodes, rows))]
    length = data.draw(st.sampled_from([6, 15, 21, 22, 40, 70]))
    expected = conversation(alone, length)
    for found in together(models, lambda model: conversation(model, length)):
        assert same(found, expected)


def test_nodes_with_other_numbers_of_threads_compute_the_same(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2_moe", max_position_embeddings=4096)
    alone = conversation(load_native(folder, cpu_threads=5), 1500)
    contexts = places(placement_of(folder, 3, "overlapping"))
    models = [
        in_ring(folder, context, cpu_threads=threads) for context, threads in zip(contexts, (1, 2, 3), strict=True)
    ]
    for found in together(models, lambda model: conversation(model, 1500)):
        assert same(found, alone)


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("family", MOE)
def test_fast_mode_is_near_one_machine_and_the_same_on_all_nodes(
    family: str, nodes: int, tiny_model: TinyModel
) -> None:
    folder = tiny_model(family)
    alone = conversation(load_native(folder))
    found = together(ring_of(folder, nodes, "overlapping", mode="fast"))
    assert all(same(other, found[0]) for other in found[1:])
    for ours, theirs in zip(found[0], alone, strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 1e-5


@pytest.mark.parametrize("loading", ["router-aided", "busy-full"])
def test_what_is_run_to_keep_it_warm_changes_nothing(loading: str, tiny_model: TinyModel) -> None:
    folder = tiny_model("olmoe", dtype="bfloat16")
    alone = conversation(load_native(folder))
    for mode in ("exact", "fast"):
        for found in together(ring_of(folder, 3, "overlapping", mode=mode, loading=loading)):
            assert same(found, alone) or mode == "fast"
            assert np.isfinite(found).all()


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_instruction_set(
    instructions: str, dtype: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    folder = tiny_model("qwen2_moe", dtype=dtype)
    alone = conversation(load_native(folder))
    models = ring_of(folder, 2, "overlapping")
    for found in together(models):
        assert same(found, alone)
    runs = "avx512f" if instructions == "avx512_bf16" and dtype == "float32" else instructions
    assert models[1].facts.executor == f"ring (node 2 of 2, exact, native {runs}, cpu)"


# ---- What a node knows, and what it refuses -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_every_node_counts_all_routes_and_measures_its_layers(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    one = load_native(folder)
    models = ring_of(folder, 2)
    for model in (one, *models):
        model.recorder.enabled = True
    conversation(one)
    together(models)
    assert one.popularity is not None
    for model in models:
        assert model.popularity is not None
        assert [model.popularity.counts(layer) for layer in one.facts.moe_layers] == [
            one.popularity.counts(layer) for layer in one.facts.moe_layers
        ]
        frame = model.recorder.frame(0)
        assert frame.expert_use == one.recorder.frame(0).expert_use
        for index, layer in enumerate(frame.decode.layers):
            moe = index in model.facts.moe_layers
            assert layer.attention > 0 and layer.other > 0
            assert (layer.router > 0) == (layer.experts > 0) == (layer.exchange > 0) == moe


def test_facts_of_a_node(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    alone, models = load_native(folder).facts, [model.facts for model in ring_of(folder, 3, "unequal")]
    assert [facts.expert_bytes * 8 // alone.expert_bytes for facts in models] == [6, 1, 1]
    model = models[1]
    assert model.executor.startswith("ring (node 2 of 3, exact, native ")
    assert (model.parameters, model.experts, model.moe_layers) == (alone.parameters, alone.experts, alone.moe_layers)


@pytest.mark.parametrize("family", DENSE)
def test_a_dense_model_has_nothing_to_share(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    place = places(Placement((0,), 1, (((0,),),)))[0]
    with pytest.raises(ModelError, match="no experts that machines could share"):
        in_ring(folder, place)


def test_a_ring_is_refused_without_a_place_in_one(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    reason = why_not_native(folder, Load(id=1, model="m", partitioning="ring"))
    assert reason == "it runs on one machine, and the partitioning is ring"


def test_a_plan_for_another_model_is_refused(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    for layers, experts in (((0, 1, 2), 7), ((0, 1), 8)):
        with pytest.raises(ModelError, match="different models"):
            in_ring(folder, places(placed(layers, experts, 1))[0])


# ---- Passes that end early ------------------------------------------------------------------------------------------


class StopsAt:
    """Raises at the ``turn``-th time it is asked."""

    def __init__(self, turn: int, error: Exception) -> None:
        self.left = turn
        self._error = error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self._error


@pytest.mark.parametrize("length", [12, 1100])
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_pass_the_head_ends_leaves_all_rows_as_they_were(turn: int, length: int, tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2_moe", max_position_embeddings=4096)
    contexts = places(placement_of(folder, 2))
    models = [in_ring(folder, context) for context in contexts]
    check = StopsAt(turn if length < 512 else turn + 3, Interrupted())

    def work(rank: int) -> list[Logits]:
        model, layers = models[rank], contexts[rank].exchange
        assert isinstance(layers, RingLayers)
        tokens = prompt(model, length + 20)
        rows = model.start()
        rows.extend(tokens[:20])
        layers.begin_pass()
        model.between_layers = check if rank == 0 else None
        with pytest.raises(Interrupted):
            try:
                rows.extend(tokens[20:])
            except Interrupted:
                if rank == 0:
                    assert layers.give_up()
                raise
        model.between_layers = None
        assert rows.length == 20
        layers.begin_pass()
        return [rows.extend(tokens[20:]), rows.step([7])[0]]

    model = load_native(folder)
    tokens = prompt(model, length + 20)
    rows = model.start()
    rows.extend(tokens[:20])
    alone = [rows.extend(tokens[20:]), rows.step([7])[0]]
    for found in must_succeed(on_all_ranks(work, 2)):
        assert same(found, alone)
    assert check.left == 0


def test_a_lost_peer_ends_the_pass_and_the_model_can_be_closed(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    placement = placement_of(folder, 2)
    memory = MemoryRing(2)
    contexts = places(placement, exchanges=list(memory.ends))
    models = [in_ring(folder, context) for context in contexts]
    rows = [model.start() for model in models]
    must_succeed(on_all_ranks(lambda rank: rows[rank].extend([3, 4, 5]), 2))
    memory.ends[1].close()
    for _ in range(2):
        with pytest.raises(PeerLost):
            rows[0].step([6])
        assert rows[0].length == 3
    for model in models:
        model.close()
    with pytest.raises(ModelError, match="is closed"):
        rows[0].step([6])


class Answers:
    """A layer exchange of one node that hands out what a test wants."""

    recorder: Recorder | None = None
    needs_hidden = False

    def __init__(self, change: Callable[[Gathered], Gathered]) -> None:
        self._change = change

    def assign(self, layer: int, routes: Routes, hidden: Any = None, mended: bool = False) -> list[Any]:
        self._routes = routes
        return [(routes.indices, ())] if len(routes.indices) else []

    def send(self, mine: Any, width: int, word: Any) -> None:
        self._mine = np.empty((0, width), np.float32) if mine is None else mine

    def receive(self) -> Gathered:
        return self._change(Gathered(self._routes.indices, self._routes.weights, outputs=self._mine))

    def leave(self, error: BaseException) -> None:
        """Nobody else is there."""


@pytest.mark.parametrize(
    "change",
    [
        lambda found: Gathered(found.indices + 100, found.weights, outputs=found.outputs),
        lambda found: Gathered(found.indices, found.weights, outputs=found.outputs[:1]),
        lambda found: Gathered(found.indices, found.weights[:, :1], outputs=found.outputs),
    ],
)
def test_what_no_exchange_may_answer_is_refused(change: Callable[[Gathered], Gathered], tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    exchange: LayerExchange = Answers(change)
    model = in_ring(folder, RingPlace(RankContext("epoch", 0, placement_of(folder, 1)), exchange))
    rows = model.start()
    with pytest.raises(ModelError):
        rows.extend([3, 4, 5])
    assert rows.length == 0


def test_a_shared_expert_is_run_in_every_layer(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2_moe")
    model = in_ring(folder, RingPlace(RankContext("epoch", 0, placement_of(folder, 1)), Answers(lambda found: found)))
    assert same(conversation(model), conversation(load_native(folder)))


def test_the_shared_expert_is_computed_between_sending_and_receiving(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("qwen2_moe")
    memory = MemoryRing(1)
    placement = placement_of(folder, 1)
    model = in_ring(folder, places(placement, exchanges=list(memory.ends))[0])
    happened: list[str] = []
    note_order(memory.ends[0], happened)
    library = native()
    compute = library.pllm_trunk_shared
    monkeypatch.setattr(library, "pllm_trunk_shared", lambda *given: (happened.append("shared"), compute(*given))[1])
    rows = model.start()
    rows.extend([3, 4, 5], want_logits=True)
    rows.step([6])
    assert happened == ["send", "shared", "receive"] * len(placement.layers) * 2


def test_nodes_whose_logits_nobody_reads_leave_them_out(tiny_model: TinyModel) -> None:
    """The head's answers are the same, all nodes take part in the same exchanges, and keys and values stay equal."""
    folder = tiny_model("mixtral", dtype="float32")
    alone = conversation(load_native(folder))
    contexts = places(placement_of(folder, 3))
    models = [in_ring(folder, replace(place, logits=place.context.rank == 0)) for place in contexts]
    head, *others = together(models)
    assert same(head, alone)
    for found in others:
        assert [len(logits) for logits in found] == [0] * len(alone)
