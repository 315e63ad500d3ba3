"""A ring of mlx nodes: mxfp4, shared experts beside the exchange, and how often the GPU is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from engine.errors import ModelError  # noqa: E402
from engine.ipc.messages import Load  # noqa: E402
from engine.moe.expert_parallel import Loading, Mode  # noqa: E402
from engine.planning.placement import Placement  # noqa: E402
from engine.runtimes.mlx import backend as backend_module  # noqa: E402
from engine.runtimes.mlx.model import MlxModel  # noqa: E402
from engine.runtimes.mlx.runtime import MlxRuntime  # noqa: E402
from engine.runtimes.protocol import RingPlace  # noqa: E402
from tests.engine.cluster.memory_exchange import MemoryRing, note_order  # noqa: E402
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation  # noqa: E402
from tests.engine.cluster.ring_places import placed, places  # noqa: E402
from tests.engine.runtimes.mlx_oracle import write_model, write_quantised  # noqa: E402


def load(folder: Path, place: RingPlace | None = None) -> MlxModel:
    found = MlxRuntime().load(folder, Load(id=1, model=str(folder)), lambda *_: None, place)
    assert isinstance(found, MlxModel)
    return found


def placement_for(model: MlxModel, nodes: int, how: str) -> Placement:
    return placed(tuple(model.facts.moe_layers), model.facts.experts, nodes, how)


def test_mxfp4_too(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, "gpt_oss", mode="mxfp4")
    single = load(folder)
    models = [load(folder, place) for place in places(placement_for(single, 2, "overlapping"))]
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
def test_the_gpu_is_waited_for_once_per_layer_and_twice_for_a_long_prompt(
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
    assert waits.count == layers + 1, "and once for the caches"
    waits.count = 0
    rows.extend(list(range(3, 3 + backend_module.SORTED_FROM)))
    assert waits.count == 2 * layers + 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_that_are_begun_with_the_router_give_the_results_of_those_that_are_chosen(
    dtype: str, tmp_path: Path
) -> None:
    """Also where a machine holds no expert of a token, and where its part of the routes is the smaller one."""
    folder = write_model(tmp_path, "mixtral", dtype=dtype)
    model = load(folder, places(placement_for(load(folder), 3, "even"))[1])
    ring, generator = model._ring, np.random.default_rng(0)
    assert ring is not None
    backend, layer = ring.backend, 0
    held = {int(expert) for expert in np.flatnonzero(backend._slots[layer] >= 0)}
    assert 0 < len(held) < 8
    for tokens in (1, 1, 1, 4):
        hidden = mx.array(generator.normal(size=(tokens, 48)).astype(np.float32)).astype(getattr(mx, dtype))
        chosen = np.stack([generator.permutation(8)[:2] for _ in range(tokens)]).astype(np.int32)
        chosen[0] = [each for each in range(8) if each not in held][:2] if tokens == 4 else chosen[0]
        call = backend.begin(layer, hidden, mx.array(chosen), mx.array(generator.random(chosen.shape, np.float32)))
        mine = np.where(np.isin(chosen, list(held)), chosen, np.int32(-1))
        weights = call.routes.weights
        others = weights.copy()  # Routes that the head has mended are run by themselves.
        found = backend.results(call, mine, weights, (), call.word)
        expected = backend.results(call, mine, others, (), call.word)
        rows = np.flatnonzero(mine >= 0)
        assert found is call.ready and np.array_equal(found[rows], expected[rows])
        sums, expected = backend.sums(call, mine, weights, ()), backend.sums(call, mine, others, ())
        assert sums.dtype == np.float32 and np.allclose(sums, expected, rtol=1e-5, atol=1e-6)


def test_a_place_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    float_folder, folder = write_model(tmp_path / "float", "mixtral"), write_quantised(tmp_path, "mixtral")
    for each in (float_folder, folder):
        with pytest.raises(ModelError, match="the model here has 8"):
            load(each, places(placed((0, 1), 8, 2))[0])
