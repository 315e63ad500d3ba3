"""A ring of mlx nodes: mxfp4, and how often the GPU is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from engine.errors import ModelError  # noqa: E402
from engine.moe.expert_parallel import Loading, Mode  # noqa: E402
from engine.runtimes.mlx import backend as backend_module  # noqa: E402
from tests.engine.cluster.memory_exchange import MemoryRing  # noqa: E402
from tests.engine.cluster.ring_conversation import all_conversations, assert_same, conversation  # noqa: E402
from tests.engine.cluster.ring_places import placed, placement_for, places  # noqa: E402
from tests.engine.runtimes.mlx_oracle import write_model, write_quantised  # noqa: E402
from tests.engine.runtimes.subjects import MLX  # noqa: E402


def test_mxfp4_too(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, "gpt_oss", mode="mxfp4")
    single = MLX.load(folder)
    models = [MLX.load(folder, place) for place in places(placement_for(folder, 2, "overlapping"))]
    assert_same(all_conversations(models), conversation(single))


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
    placement = placement_for(folder, 1)
    model = MLX.load(folder, places(placement, mode, loading=loading, exchanges=list(memory.ends))[0])
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
    model = MLX.load(folder, places(placement_for(folder, 3))[1])
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
            MLX.load(each, places(placed((0, 1), 8, 2))[0])
