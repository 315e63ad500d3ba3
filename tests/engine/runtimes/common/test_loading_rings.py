"""A ring is one machine, to the bit, on every runtime: families, number formats, placements, and what happens to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from engine.cluster.all_gather import RingLayers
from engine.cluster.transport.exchange import PeerLost
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.expert_parallel import Loading
from engine.planning.placement import Placement
from engine.runtimes import runtime_named
from engine.runtimes.common.loading import load_model
from engine.runtimes.native.bindings import native
from engine.runtimes.protocol import Interrupted, LoadedModel, Logits
from tests.engine.cluster.linked_nodes import LinkedNodes
from tests.engine.cluster.memory_exchange import MemoryRing, must_succeed, note_order, on_all_ranks
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation
from tests.engine.cluster.ring_places import PLACEMENTS, placed, placement_for, places
from tests.engine.runtimes.common.test_node_experts import share_of
from tests.engine.runtimes.subjects import (
    FP8,
    MLX,
    NATIVE,
    PACKED_FAMILIES,
    PACKED_MODELS,
    PUBLISHED,
    TORCH,
    StoredModel,
    Subject,
    case,
    each_runtime,
    needs_mlx,
    prompt_of,
)
from tests.support.pairwise import in_turn, pairwise
from tests.support.progress import quiet
from tests.support.random_examples import examples

pytestmark = pytest.mark.usefixtures("one_kernel")


Loaded = Callable[..., LoadedModel]
Alone = Callable[..., list[Logits]]


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> Alone:
    """The conversation with a model on one machine, held once a file."""
    held: dict[tuple[str, ...], list[Logits]] = {}

    def of(subject: Subject, *model: str) -> list[Logits]:
        key = (subject.name, *model)
        if key not in held:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.backends.mkldnn, "enabled", False)
                held[key] = conversation(loaded(subject, *model))
        return held[key]

    return of


def ring_of(subject: Subject, folder: Path, nodes: int, how: str = "even", **context: Any) -> list[LoadedModel]:
    return [subject.load(folder, place) for place in places(placement_for(folder, nodes, how), **context)]


def close(models: list[LoadedModel]) -> None:
    for model in models:
        model.close()


TWO = ((2, "unequal"), (2, "overlapping"))
MORE = ((2, "unequal"), (3, "overlapping"), (4, "even"))
PACKED = (("qwen2_moe", "Q4_K_M"), ("mixtral", "MXFP4"), ("granitemoe", "Q8_0"))
GROUPED = (
    ("qwen3_moe", "mlx-4-bit"), ("mixtral", "mlx-8-bit"), ("gpt_oss", "mlx-mixed"), ("gpt_oss", PUBLISHED),
    ("qwen3_moe", FP8), ("qwen2_moe", "mlx-6-bit"), ("granitemoe", "mlx-few-bits"),
    ("qwen3_moe", "FP8-channel"), ("mixtral", "FP8-tensor"),
)  # fmt: skip
BY_MLX_LM = (("lfm2_moe", "4-bit"), ("glm4_moe_lite", "4-bit"), ("qwen3_next", "4-bit"), ("gemma4_text", "4-bit"))
"""Of whose trunk mlx-lm stores some tensors in its own way."""
RINGS = (
    (2, "unequal"), (3, "even"), (4, "overlapping"), (3, "overlapping"), (3, "unequal"), (2, "even"), (4, "unequal"),
    (2, "overlapping"), (3, "unequal"),
)  # fmt: skip
SAMPLED = [
    *(
        case(NATIVE, *model, *ring)
        for model, *ring in in_turn(tuple(product(NATIVE.moe_families, NATIVE.stored)), (1, 2, 3, 4), PLACEMENTS)
    ),
    *(
        case(subject, family, subject.stored[number % 2], *TWO[number // 2 % 2])
        for subject in (TORCH, MLX)
        for number, family in enumerate(subject.moe_families)
    ),
    *(case(NATIVE, *row) for row in in_turn(PACKED_FAMILIES, tuple(PACKED_MODELS), (2, 3, 4), PLACEMENTS)),
    *(case(TORCH, *model, *ring) for model, ring in zip(PACKED, MORE, strict=True)),
    *(case(NATIVE, *model, *ring) for model, ring in zip(GROUPED, RINGS, strict=True)),
    *(case(TORCH, *model, *ring) for model, ring in zip(GROUPED, reversed(RINGS), strict=True)),
    *(
        pytest.param(*row.values, marks=(*row.marks, needs_mlx), id=row.id)
        for subject in (NATIVE, TORCH)
        for row in (case(subject, *model, *ring) for model, ring in zip(BY_MLX_LM, RINGS, strict=False))
    ),
]
"""Families, number formats, nodes and placements: of native each family in each plain format, and once packed; of torch
and mlx, which take ten times as long, each family once on two nodes. Packed formats run in all rings."""
ALL = [
    *(case(NATIVE, *row, soak=True) for row in product(NATIVE.moe_families, NATIVE.stored, (1, 2, 3, 4), PLACEMENTS)),
    *(
        case(NATIVE, *row, soak=True)
        for row in pairwise(PACKED_FAMILIES, tuple(PACKED_MODELS), (2, 3, 4), PLACEMENTS)[::2]
    ),
    *(
        case(subject, family, stored, nodes, how, soak=True)
        for subject in (TORCH, MLX)
        for family, stored, (nodes, how) in product(subject.moe_families, subject.stored, MORE)
    ),
]
KNOWN = {row.id for row in SAMPLED}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("subject", "family", "stored", "nodes", "how"), [*SAMPLED, *(row for row in ALL if row.id not in KNOWN)]
)
def test_a_ring_is_one_machine_to_the_bit(
    subject: Subject,
    family: str,
    stored: str,
    nodes: int,
    how: str,
    stored_model: StoredModel,
    loaded: Loaded,
    alone: Alone,
) -> None:
    models = ring_of(subject, stored_model(subject, family, stored), nodes, how)
    single = loaded(subject, family, stored).facts
    assert all(model.facts.dtype == single.dtype for model in models)
    assert_same(all_conversations(models), alone(subject, family, stored))
    held = sum(model.facts.expert_bytes for model in models)
    assert held > single.expert_bytes if how == "overlapping" and nodes > 1 else held == single.expert_bytes
    close(models)


@pytest.mark.soak
@each_runtime
@settings(max_examples=examples(3))
@given(data=st.data())
def test_any_placement_equals_one_machine(
    subject: Subject, stored_model: StoredModel, loaded: Loaded, data: st.DataObject
) -> None:
    """Also nodes that hold nothing of a layer, or nothing at all, and prompts at the border of few and many routes."""
    folder, single = (
        stored_model(subject, "qwen3_moe", subject.stored[1]),
        loaded(subject, "qwen3_moe", subject.stored[1]),
    )
    nodes, layers = data.draw(st.integers(2, 4)), tuple(single.facts.moe_layers)
    ranks = st.sets(st.integers(0, nodes - 1), min_size=1, max_size=nodes).map(lambda held: tuple(sorted(held)))
    rows = tuple(tuple(data.draw(ranks) for _ in range(single.facts.experts)) for _ in layers)
    models = [subject.load(folder, place) for place in places(Placement(layers, nodes, rows))]
    length = data.draw(st.sampled_from([6, 15, 21, 22, 40, 70]))
    found = must_succeed(on_all_ranks(lambda rank: conversation(models[rank], length), nodes))
    assert_same(found, conversation(single, length))
    close(models)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("subject", "family", "nodes", "loading"),
    [
        *(
            case(NATIVE, family, 2 + number % 2, ("selected", "router-aided", "busy-full")[number % 3])
            for number, family in enumerate(NATIVE.moe_families)
        ),
        case(TORCH, "mixtral", 3, "selected"),
        case(TORCH, "llama4_text", 3, "busy-full"),
        case(TORCH, "deepseek_v3", 2, "router-aided"),
        case(MLX, "mixtral", 3, "router-aided"),
        case(MLX, "qwen2_moe", 3, "selected"),
    ],
)
def test_fast_mode_is_near_one_machine_and_the_same_on_all_nodes(
    subject: Subject, family: str, nodes: int, loading: Loading, stored_model: StoredModel, alone: Alone
) -> None:
    models = ring_of(subject, stored_model(subject, family), nodes, "overlapping", mode="fast", loading=loading)
    found = all_conversations(models)
    assert_same(found[1:], found[0])
    for ours, expected in zip(found[0], alone(subject, family), strict=True):
        assert np.abs(ours - expected).max() / np.abs(expected).max() < (1e-5 if subject is NATIVE else 1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("loading", ["router-aided", "busy-full"])
@each_runtime
def test_experts_that_are_run_to_keep_them_warm_change_nothing(
    subject: Subject, loading: Loading, stored_model: StoredModel, alone: Alone
) -> None:
    models = ring_of(subject, stored_model(subject, "olmoe"), 4, "even", loading=loading)
    assert_same(all_conversations(models), alone(subject, "olmoe"))


def without_head(model: LoadedModel) -> None:
    """Whoever asks for the logits of ``model`` fails; those of native are computed in C."""
    inner: Any = model
    if model.facts.runtime == "torch":

        def fail(*_: Any) -> None:
            raise AssertionError("nobody reads these logits")

        inner._module.get_output_embeddings().register_forward_pre_hook(fail)
    if model.facts.runtime == "mlx":
        del inner._model["lm_head"]
        inner._model["model"].embed_tokens.as_linear = None


@pytest.mark.parametrize(
    ("subject", "family"),
    [case(NATIVE, "mixtral"), case(TORCH, "qwen2_moe"), case(TORCH, "llama4_text"), case(MLX, "deepseek_v3")],
)
def test_nodes_whose_logits_nobody_reads_leave_them_out(
    subject: Subject, family: str, stored_model: StoredModel, alone: Alone
) -> None:
    """The head's answers are the same, all nodes take part in the same exchanges, and keys and values stay equal."""
    folder = stored_model(subject, family)
    made = places(placement_for(folder, 3, "overlapping"))
    models = [subject.load(folder, replace(place, logits=place.context.rank == 0)) for place in made]
    for model in models[1:]:
        without_head(model)
    head, *others = all_conversations(models)
    expected = alone(subject, family)
    assert_same([head], expected)
    for found in others:
        assert [each.shape for each in found] == [(*each.shape[:-1], 0) for each in expected]


@pytest.mark.sampled(least=3)
@pytest.mark.parametrize(
    ("subject", "family", "stored", "nodes"),
    [
        case(NATIVE, "mixtral", "bfloat16", 3),
        case(NATIVE, "qwen3_moe", "prepared", 3),
        case(TORCH, "mixtral", "prepared", 3),
        case(TORCH, "gpt_oss", "bfloat16", 3),
        case(TORCH, "dbrx", "bfloat16", 3),
        case(MLX, "mixtral", "4-bit", 2),
        case(MLX, "qwen3_moe", "4-bit", 2),
        case(MLX, "deepseek_v3", "4-bit", 2),
        case(MLX, "mixtral", "float32", 2),
    ],
)
def test_nodes_load_the_shards_that_the_head_sent_them(
    subject: Subject,
    family: str,
    stored: str,
    nodes: int,
    stored_model: StoredModel,
    prepared: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    folder = stored_model(subject, family, "bfloat16" if stored == "prepared" else stored)
    if stored == "prepared":
        folder = prepared(folder)
    placement = placement_for(folder, nodes, "overlapping")
    models = [
        subject.load(share_of(folder, placement, rank, tmp_path) if rank else folder, place)
        for rank, place in enumerate(places(placement))
    ]
    assert_same(all_conversations(models), conversation(subject.load(folder)))
    close(models)


def test_a_shard_is_not_run_alone(stored_model: StoredModel, tmp_path: Path) -> None:
    folder = stored_model(TORCH, "mixtral")
    shard = share_of(folder, placement_for(folder, 2), 1, tmp_path)
    with pytest.raises(ModelError, match="share of a model"):
        load_model(runtime_named("torch"), "a share", shard, Load(id=1, model="a share"), quiet)


def note_shared_experts(model: LoadedModel, happened: list[str], patch: pytest.MonkeyPatch) -> int:
    """From now on ``happened`` gets "shared" when a shared expert is computed. Returns how many layers have one."""

    def noted(compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (happened.append("shared"), compute(*given))[1]

    inner: Any = model
    if model.facts.runtime == "torch":
        names = ("shared_expert", "shared_experts")
        shared = [module for name, module in inner._module.named_modules() if name.endswith(names)]
        for module in shared:
            module.down_proj.register_forward_pre_hook(lambda *_: happened.append("shared"))
        return len(shared)
    if model.facts.runtime == "native":
        library = native()
        patch.setattr(library, "pllm_trunk_shared", noted(library.pllm_trunk_shared))
    else:
        import mlx.core as mx

        patch.setattr(mx, "async_eval", noted(mx.async_eval))
    return len(model.facts.moe_layers)


@pytest.mark.parametrize(
    ("subject", "family"),
    [
        case(NATIVE, "qwen2_moe"),
        *(case(TORCH, family) for family in ("deepseek_v3", "glm4_moe", "llama4_text", "qwen2_moe")),
        *(case(MLX, family) for family in ("qwen2_moe", "deepseek_v3")),
    ],
)
def test_shared_experts_are_computed_between_sending_and_receiving(
    subject: Subject, family: str, stored_model: StoredModel, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryRing(1)
    folder = stored_model(subject, family)
    model = subject.load(folder, places(placement_for(folder, 1), exchanges=list(memory.ends))[0])
    happened: list[str] = []
    note_order(memory.ends[0], happened)
    rows, alone = model.start(), loaded(subject, family).start()
    with monkeypatch.context() as patch:
        layers = note_shared_experts(model, happened, patch)
        found = [rows.extend([3, 4, 5]), rows.step([6])]
    assert layers > 0 and happened == ["send", "shared", "receive"] * layers * 2
    for ours, expected in zip(found, (alone.extend([3, 4, 5]), alone.step([6])), strict=True):
        assert ours is not None and expected is not None and np.array_equal(ours, expected)


@each_runtime
def test_a_router_that_differs_is_mended(
    subject: Subject, stored_model: StoredModel, alone: Alone, tmp_path: Path
) -> None:
    """One node has the rows of a layer's router the other way round: all nodes take the routes of the head."""
    folder = stored_model(subject, "mixtral")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    (router,) = (name for name in tensors if ".1." in name and name.endswith("gate.weight"))
    tensors[router] = tensors[router][::-1].copy()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    made = places(placement_for(folder, 3, "overlapping"))
    models = [subject.load(other if place.context.rank == 2 else folder, place) for place in made]
    assert_same(all_conversations(models), alone(subject, "mixtral"))
    layers = [place.exchange for place in made]
    assert all(isinstance(each, RingLayers) for each in layers)
    assert len({each.disagreements for each in layers}) == 1 and layers[0].disagreements > 4
    notices = models[0].recorder.take_notices()
    assert "layer 1" in notices[0] and "central" in notices[1]


@pytest.mark.sampled
@pytest.mark.parametrize("at", [0, 1, 2])
@each_runtime
def test_a_prefill_that_the_head_gives_up_leaves_all_rows_as_they_were(
    subject: Subject, at: int, stored_model: StoredModel, loaded: Loaded
) -> None:
    folder, single, tokens = stored_model(subject, "granitemoe"), loaded(subject, "granitemoe"), prompt_of(30)
    rows = single.start()
    rows.extend(tokens[:10])
    expected = [rows.extend(tokens[20:]), rows.step([7])]
    made = places(placement_for(folder, 2, "overlapping"))
    models = [subject.load(folder, place) for place in made]

    def work(rank: int) -> list[Logits | None]:
        model, layers = models[rank], made[rank].exchange
        assert isinstance(layers, RingLayers)
        rows = model.start()
        layers.begin_pass()
        rows.extend(tokens[:10])
        asked = 0

        def check() -> None:
            nonlocal asked
            if asked == at:
                raise Interrupted
            asked += 1

        if rank == 0:
            model.between_layers = check
        layers.begin_pass()
        with pytest.raises(Interrupted):
            try:
                rows.extend(tokens[10:20])
            finally:
                if rank == 0:
                    assert layers.give_up()
                    model.between_layers = None
        assert rows.length == 10
        layers.begin_pass()
        return [rows.extend(tokens[20:]), rows.step([7])]

    for found in must_succeed(on_all_ranks(work, 2)):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is not None and theirs is not None and np.array_equal(ours, theirs)


@each_runtime
def test_a_lost_peer_ends_the_pass_and_the_model_can_be_closed(subject: Subject, stored_model: StoredModel) -> None:
    folder = stored_model(subject, "mixtral")
    memory = MemoryRing(2)
    made = places(placement_for(folder, 2), exchanges=list(memory.ends))
    models = [subject.load(folder, place) for place in made]
    assert memory.ends[0].sent == [], "loading exchanges nothing"
    rows = [model.start() for model in models]
    must_succeed(on_all_ranks(lambda rank: rows[rank].extend([3, 4, 5]), 2))
    memory.ends[1].close()
    for _ in range(2):
        with pytest.raises(PeerLost):
            rows[0].step([6])
        assert rows[0].length == 3
    close(models)
    with pytest.raises(ModelError, match="is closed"):
        rows[0].step([6])


@pytest.mark.parametrize(
    ("subject", "family"),
    [case(NATIVE, "qwen2_moe"), case(NATIVE, "qwen3_moe"), case(TORCH, "deepseek_v3"), case(MLX, "qwen2_moe")],
)
def test_every_node_counts_all_routes_and_measures_its_layers(
    subject: Subject, family: str, stored_model: StoredModel
) -> None:
    folder = stored_model(subject, family)
    single, models = subject.load(folder), ring_of(subject, folder, 2)
    for model in (single, *models):
        model.recorder.enabled = True
    conversation(single)
    all_conversations(models)
    expected = single.recorder.frame(0).expert_use
    assert all(sum(counts) > 0 for counts in expected)
    for model in models:
        assert model.popularity is not None
        assert [list(model.popularity.counts(layer)) for layer in single.facts.moe_layers] == expected
        frame = model.recorder.frame(0)
        assert frame.expert_use == expected
        for index, times in enumerate(frame.decode.layers):
            assert times.attention > 0 and times.other > 0
            moe = index in single.facts.moe_layers
            assert (times.router > 0) == (times.experts > 0) == (times.exchange > 0) == moe


@each_runtime
def test_facts_of_a_node(subject: Subject, stored_model: StoredModel, loaded: Loaded) -> None:
    single = loaded(subject, "mixtral").facts
    found = [model.facts for model in ring_of(subject, stored_model(subject, "mixtral"), 3, "unequal")]
    assert [facts.expert_bytes * 8 // single.expert_bytes for facts in found] == [6, 1, 1]
    assert all(facts.executor.startswith(f"ring (node {rank} of 3, exact") for rank, facts in enumerate(found, 1))
    for facts in found:
        assert (facts.experts, facts.moe_layers) == (single.experts, single.moe_layers)
        assert facts.key_value_bytes_per_token == single.key_value_bytes_per_token > 0


@each_runtime
def test_a_place_that_does_not_fit_the_model_is_refused(subject: Subject, stored_model: StoredModel) -> None:
    for layers, experts in (((0, 1, 2), 7), ((0, 1), 8)):
        with pytest.raises(ModelError, match="8"):
            subject.load(stored_model(subject, "mixtral"), places(placed(layers, experts, 2))[0])


@pytest.mark.parametrize(("subject", "transport"), [case(NATIVE, "tls"), case(TORCH, "gloo"), case(MLX, "socket")])
def test_over_real_links(subject: Subject, transport: Any, stored_model: StoredModel, alone: Alone) -> None:
    stored = subject.stored[1]
    folder = stored_model(subject, "qwen2_moe", stored)
    nodes = LinkedNodes(3)
    try:
        ends = nodes.everywhere(lambda node: open_exchange(transport, node.links, node.epoch))
        made = places(placement_for(folder, 3, "overlapping"), exchanges=ends)
        models = [subject.load(folder, place) for place in made]
        assert_same(all_conversations(models), alone(subject, "qwen2_moe", stored))
        ends[2].close()
        for rank in (0, 1):
            with pytest.raises(PeerLost):
                models[rank].start().extend([3, 4, 5])
        for end in ends:
            end.close()
    finally:
        nodes.close()
