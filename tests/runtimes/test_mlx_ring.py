"""An mlx ring is one mlx node, to the bit: every family, float32 and 4-bit, unequal and overlapping placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from memory_exchange import MemoryRing, must_succeed, note_order, on_all_ranks  # noqa: E402
from mlx_oracle import MOE_FAMILIES, prompt_of, write_model, write_quantised  # noqa: E402
from ring_conversation import all_conversations, assert_same, conversation  # noqa: E402
from ring_places import placed, places  # noqa: E402

from engine.cluster.all_gather import RingLayers  # noqa: E402
from engine.errors import ModelError  # noqa: E402
from engine.ipc.messages import Load  # noqa: E402
from engine.moe.rank_context import Loading, Mode  # noqa: E402
from engine.planning.placement import Placement  # noqa: E402
from engine.runtimes.mlx import backend as backend_module  # noqa: E402
from engine.runtimes.mlx.model import MlxModel  # noqa: E402
from engine.runtimes.mlx.runtime import MlxRuntime  # noqa: E402
from engine.runtimes.protocol import Interrupted, RingPlace  # noqa: E402


def load(folder: Path, place: RingPlace | None = None) -> MlxModel:
    found = MlxRuntime().load(folder, Load(id=1, model=str(folder)), lambda *_: None, place)
    assert isinstance(found, MlxModel)
    return found


def placement_for(model: MlxModel, nodes: int, how: str) -> Placement:
    return placed(tuple(model.facts.moe_layers), model.facts.experts, nodes, how)


@pytest.mark.parametrize("stored", ["float32", "4-bit"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_ring_is_one_node_to_the_bit(family: str, stored: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, family) if stored == "float32" else write_quantised(tmp_path, family)
    single = load(folder)
    alone = conversation(single)
    for nodes, how in ((2, "unequal"), (3, "overlapping"), (4, "even")):
        models = [load(folder, place) for place in places(placement_for(single, nodes, how))]
        assert_same(all_conversations(models), alone)
        assert sum(model.facts.expert_bytes for model in models) >= single.facts.expert_bytes
        if how != "overlapping":
            assert sum(model.facts.expert_bytes for model in models) == single.facts.expert_bytes


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_nodes_whose_logits_nobody_reads_leave_them_out(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, family)
    single = load(folder)
    alone = conversation(single)
    made = places(placement_for(single, 3, "overlapping"))
    models = [load(folder, replace(place, logits=place.context.rank == 0)) for place in made]
    for model in models[1:]:
        del model._model["lm_head"]  # whoever asks for it fails
        model._model["model"].embed_tokens.as_linear = None
    head, *others = all_conversations(models)
    assert_same([head], alone)
    for found in others:
        assert [each.shape for each in found] == [(*each.shape[:-1], 0) for each in alone]


def test_mxfp4_too(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, "gpt_oss", mode="mxfp4")
    single = load(folder)
    models = [load(folder, place) for place in places(placement_for(single, 2, "overlapping"))]
    assert_same(all_conversations(models), conversation(single))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_fast_mode_is_close_and_the_same_on_all_nodes(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, family)
    single = load(folder)
    alone = conversation(single)
    models = [load(folder, place) for place in places(placement_for(single, 3, "overlapping"), "fast")]
    found = all_conversations(models)
    assert_same(found[1:], found[0])
    for ours, expected in zip(found[0], alone, strict=True):
        assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.parametrize("loading", ["router-aided", "busy-full"])
def test_experts_beyond_the_routes_change_nothing(loading: Loading, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen3_moe")
    single = load(folder)
    models = [load(folder, place) for place in places(placement_for(single, 2, "even"), loading=loading)]
    assert_same(all_conversations(models), conversation(single))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_are_computed_between_sending_and_receiving(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, family)
    single = load(folder)
    memory = MemoryRing(1)
    model = load(folder, places(placement_for(single, 1, "even"), exchanges=list(memory.ends))[0])
    happened: list[str] = []
    note_order(memory.ends[0], happened)
    compute = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *given: (happened.append("shared"), compute(*given))[1])
    found, expected = model.start().extend([3, 4, 5]), single.start().extend([3, 4, 5])
    assert found is not None and expected is not None and np.array_equal(found, expected)
    assert happened == ["send", "shared", "receive"] * len(single.facts.moe_layers)


class Waits:
    """Counts how often the GPU is waited for: by ``mx.eval``, and where numpy asks for what was not evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._there: list[Any] = []
        evaluate = mx.eval
        waits = self

        def counted(*arrays: Any) -> None:
            waits.count += 1
            waits._there += arrays
            evaluate(*arrays)

        class Numpy:
            def __getattr__(self, name: str) -> Any:
                return getattr(np, name)

            def array(self, value: Any, *given: Any, **options: Any) -> Any:
                if isinstance(value, mx.array) and not any(value is one for one in waits._there):
                    waits.count += 1
                return np.array(value, *given, **options)

        monkeypatch.setattr(mx, "eval", counted)
        monkeypatch.setattr(backend_module, "np", Numpy())


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("loading", ["selected", "busy-full"])
def test_the_gpu_is_waited_for_twice_per_layer(
    mode: Mode, loading: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "mixtral", dtype="bfloat16")
    memory = MemoryRing(1)
    placement = placement_for(load(folder), 1, "even")
    model = load(folder, places(placement, mode, loading=loading, exchanges=list(memory.ends))[0])
    rows = model.start()
    rows.extend([3, 4, 5])
    waits = Waits(monkeypatch)
    rows.step([6])
    layers = len(model.facts.moe_layers)
    assert waits.count == 2 * layers + 1, "and once for the caches"


def test_a_router_that_differs_is_mended(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mixtral")
    single = load(folder)
    made = places(placement_for(single, 3, "overlapping"))
    models = [load(folder, place) for place in made]
    gate = models[1]._model.model.layers[1].block_sparse_moe.block.gate
    gate.weight = gate.weight[::-1]
    mx.eval(gate.weight)
    found = all_conversations(models)
    assert_same(found, conversation(single))
    assert made[0].exchange.disagreements > 4
    assert "layer 1" in models[0].recorder.take_notices()[0]


def test_a_prefill_that_the_head_gives_up_leaves_the_rows_as_they_were(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mixtral")
    single = load(folder)
    tokens = prompt_of(30)
    rows = single.start()
    rows.extend(tokens[:10])
    expected = rows.extend(tokens[20:])
    made = places(placement_for(single, 2, "even"))
    models = [load(folder, place) for place in made]

    def work(rank: int) -> Any:
        model, layers = models[rank], made[rank].exchange
        assert isinstance(layers, RingLayers)
        rows = model.start()
        layers.begin_pass()
        rows.extend(tokens[:10])
        asked = 0

        def check() -> None:
            nonlocal asked
            asked += 1
            if asked == 2:
                raise Interrupted

        if rank == 0:
            model.between_layers = check
        layers.begin_pass()
        with pytest.raises(Interrupted):
            rows.extend(tokens[10:20])
        if rank == 0:
            assert layers.give_up()
            model.between_layers = None
        assert rows.length == 10
        layers.begin_pass()
        return rows.extend(tokens[20:])

    for found in must_succeed(on_all_ranks(work, 2)):
        assert np.array_equal(found, expected)


def test_times_and_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen2_moe")
    single = load(folder)
    models = [load(folder, place) for place in places(placement_for(single, 2, "even"))]

    def work(rank: int) -> None:
        models[rank].recorder.enabled = True
        conversation(models[rank])

    must_succeed(on_all_ranks(work, 2))
    first, second = (model.recorder.frame(1) for model in models)
    assert first.expert_use == second.expert_use and sum(first.expert_use[0]) > 0
    assert models[0].popularity is not None
    assert list(models[0].popularity.counts(single.facts.moe_layers[0])) == first.expert_use[0]
    for times in (first.decode.layers[0], second.decode.layers[0]):
        assert times.exchange > 0 and times.wait > 0 and times.experts > 0 and times.attention > 0


def test_loading_into_a_ring_exchanges_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mixtral")
    memory = MemoryRing(2)
    made = places(placed((0, 1, 2), 8, 2), exchanges=list(memory.ends))
    model = load(folder, made[0])
    assert memory.ends[0].sent == [] and model.facts.key_value_bytes_per_token > 0
    assert model.facts.executor.startswith("ring (node 1 of 2, exact; local (mlx, ")


def test_a_place_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    float_folder, folder = write_model(tmp_path / "float", "mixtral"), write_quantised(tmp_path, "mixtral")
    for each in (float_folder, folder):
        with pytest.raises(ModelError, match="the model here has 8"):
            load(each, places(placed((0, 1), 8, 2))[0])
