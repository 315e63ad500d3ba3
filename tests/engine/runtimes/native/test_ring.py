"""The native trunk in a ring: threads and instruction sets, long passes that end early, what an exchange may answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cluster.all_gather import RingLayers
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.expert_parallel import Gathered, LayerExchange, RankContext, Routes
from engine.moe.kernels.bindings import available
from engine.moe.timing import Recorder
from engine.planning.placement import Placement
from engine.runtimes.choosing import native_unsupported_reason
from engine.runtimes.protocol import Interrupted, Logits, RingPlace
from tests.engine.cluster.memory_exchange import must_succeed, on_all_ranks
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation
from tests.engine.cluster.ring_places import placement_for, places
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import NATIVE, prompt_of

pytestmark = needs_kernels

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen4_exp_text"])
def test_nodes_with_other_numbers_of_threads_compute_the_same(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family, max_position_embeddings=4096)
    alone = conversation(load_native(folder, cpu_threads=5), 1100)
    contexts = places(placement_for(folder, 3, "overlapping"))
    models = [
        NATIVE.load(folder, context, cpu_threads=threads) for context, threads in zip(contexts, (1, 2, 3), strict=True)
    ]
    found = must_succeed(on_all_ranks(lambda rank: conversation(models[rank], 1100), 3))
    assert_same(found, alone)


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_instruction_set(
    instructions: str, dtype: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    folder = tiny_model("qwen2_moe", dtype=dtype)
    models = [NATIVE.load(folder, place) for place in places(placement_for(folder, 2, "overlapping"))]
    assert_same(all_conversations(models), conversation(load_native(folder, cpu_threads=1)))
    runs = "avx512f" if instructions == "avx512_bf16" and dtype == "float32" else instructions
    assert models[1].facts.executor == f"ring (node 2 of 2, exact, native {runs}, cpu)"


@pytest.mark.parametrize("nodes", [2, 3])
def test_keys_and_values_in_eight_bits(nodes: int, tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe", head_dim=64)
    models = [NATIVE.load(folder, place, key_values="q8_0") for place in places(placement_for(folder, nodes))]
    alone = load_native(folder, cpu_threads=1, key_values="q8_0")
    assert alone.facts.key_value_bytes_per_token == models[1].facts.key_value_bytes_per_token
    assert_same(all_conversations(models), conversation(alone))


# ---- What a node knows, and what it refuses -------------------------------------------------------------------------


def test_a_dense_model_has_nothing_to_share(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    place = places(Placement((0,), 1, (((0,),),)))[0]
    with pytest.raises(ModelError, match="no experts that machines could share"):
        NATIVE.load(folder, place)


def test_a_ring_is_refused_without_a_place_in_one(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral")
    reason = native_unsupported_reason(folder, Load(id=1, model="m", partitioning="ring"))
    assert reason == "it runs on one machine, and the partitioning is ring"


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


@pytest.mark.parametrize("turn", [4, 5, 6])
def test_a_pass_the_head_ends_after_some_pieces_leaves_all_rows_as_they_were(turn: int, tiny_model: TinyModel) -> None:
    length = 1100
    folder = tiny_model("qwen2_moe", max_position_embeddings=4096)
    contexts = places(placement_for(folder, 2))
    models = [NATIVE.load(folder, context) for context in contexts]
    check = StopsAt(turn, Interrupted())

    def work(rank: int) -> list[Logits]:
        model, layers = models[rank], contexts[rank].exchange
        assert isinstance(layers, RingLayers)
        tokens = prompt_of(length + 20)
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

    model = load_native(folder, cpu_threads=1)
    tokens = prompt_of(length + 20)
    rows = model.start()
    rows.extend(tokens[:20])
    alone = [rows.extend(tokens[20:]), rows.step([7])[0]]
    assert_same(must_succeed(on_all_ranks(work, 2)), alone)
    assert check.left == 0


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
    model = NATIVE.load(folder, RingPlace(RankContext("epoch", 0, placement_for(folder, 1)), exchange))
    rows = model.start()
    with pytest.raises(ModelError):
        rows.extend([3, 4, 5])
    assert rows.length == 0


def test_a_shared_expert_is_run_in_every_layer(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2_moe")
    model = NATIVE.load(
        folder, RingPlace(RankContext("epoch", 0, placement_for(folder, 1)), Answers(lambda found: found))
    )
    assert_same([conversation(model)], conversation(load_native(folder, cpu_threads=1)))
