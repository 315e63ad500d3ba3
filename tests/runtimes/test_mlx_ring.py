"""A ring of mlx nodes: mxfp4, shared experts beside the exchange, and how often the GPU is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from memory_exchange import MemoryRing, note_order  # noqa: E402
from mlx_oracle import write_model, write_quantised  # noqa: E402
from ring_conversation import all_conversations, assert_same, conversation  # noqa: E402
from ring_places import placed, places  # noqa: E402

from engine.errors import ModelError  # noqa: E402
from engine.ipc.messages import Load  # noqa: E402
from engine.moe.rank_context import Loading, Mode  # noqa: E402
from engine.planning.placement import Placement  # noqa: E402
from engine.runtimes.mlx import backend as backend_module  # noqa: E402
from engine.runtimes.mlx.model import MlxModel  # noqa: E402
from engine.runtimes.mlx.runtime import MlxRuntime  # noqa: E402
from engine.runtimes.protocol import RingPlace  # noqa: E402


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


def test_a_place_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    float_folder, folder = write_model(tmp_path / "float", "mixtral"), write_quantised(tmp_path, "mixtral")
    for each in (float_folder, folder):
        with pytest.raises(ModelError, match="the model here has 8"):
            load(each, places(placed((0, 1), 8, 2))[0])
