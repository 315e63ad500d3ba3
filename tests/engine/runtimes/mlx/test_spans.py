"""Times per layer on mlx: nothing of a measurement stays in the model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

from engine.errors import ModelError
from engine.runtimes.mlx.model import MlxModel
from tests.engine.runtimes.mlx_oracle import load, write_model


def test_hooks_are_there_only_while_measured(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, "mixtral"))
    before = types_of(model)
    rows = model.start()
    for enabled in (True, False, True, True, False):
        model.recorder.enabled = enabled
        rows.step([4])
        assert (types_of(model) == before) != enabled
    model.recorder.reset()
    rows.step([4])
    assert model.recorder.frame(1).decode.steps == 0
    assert sum(map(sum, model.recorder.frame(1).expert_use)) == 0


def types_of(model: MlxModel) -> list[tuple[str, str]]:
    return [(type(layer).__name__, type(layer.self_attn).__name__) for layer in model._model.model.layers]


def test_a_failed_measured_step_leaves_no_open_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_model(tmp_path, "mixtral"))
    rows = model.start()
    rows.extend([3, 4, 5])
    model.recorder.enabled = True
    executor = model._model.model.layers[1].block_sparse_moe._executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(ModelError):
            rows.step([5])
    rows.step([5])
    assert model.recorder.frame(1).decode.steps == 2
    assert rows.length == 4
