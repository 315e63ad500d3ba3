"""Rows of the mlx runtime: what is said of a pass that fails, that they stay as they were, and what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx

from engine.errors import ModelError
from engine.runtimes.mlx import eligible
from engine.runtimes.mlx.model import MlxModel
from engine.runtimes.protocol import LoadedModel
from tests.engine.runtimes.subjects import MLX, assert_close, fresh, prompt_of

PROMPT = prompt_of(30)


def test_a_failed_pass_leaves_the_rows_as_they_were(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral = loaded(MLX, "mixtral")
    assert isinstance(mixtral, MlxModel)
    rows = mixtral.start()
    rows.extend(PROMPT)
    executor = mixtral._model.model.layers[2].block_sparse_moe._executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(ModelError, match=r"not enough memory for this step \(no room\)") as caught:
            rows.extend([5, 6, 7])
        assert caught.value.kind == "memory"
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("[malloc] Unable to allocate 9")))
        with pytest.raises(ModelError, match="Unable to allocate 9"):
            rows.step([5])
        patch.setattr(executor, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("another fault")))
        with pytest.raises(RuntimeError, match="another fault"):
            rows.step([5])
    assert rows.length == 30
    assert_close(rows.extend([8, 9]), fresh(mixtral, [*PROMPT, 8, 9]))


def test_a_state_keeps_no_memory_of_the_chunk_that_it_comes_from(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded(MLX, "lfm2_moe")
    model.start().extend(PROMPT)
    before = mx.get_active_memory()
    rows = model.start()
    rows.extend(prompt_of(500))
    checkpoint = rows.checkpoint()
    rows.step([5])
    assert checkpoint is not None and checkpoint.length == 500
    keys = 2 * 512 * model.facts.key_value_bytes_per_token
    assert mx.get_active_memory() - before < keys + 6 * model.facts.state_bytes + 40_000


def test_beams_whose_copies_do_not_fit_are_refused_before_they_are_made(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral = loaded(MLX, "mixtral")
    rows = mixtral.start()
    rows.extend(PROMPT)
    used = mx.get_active_memory()
    one = 30 * rows.bytes_per_position()
    monkeypatch.setattr(mx, "get_active_memory", lambda: used)
    monkeypatch.setattr(eligible, "working_set_bytes", lambda: used + 3 * one)
    assert rows.fan_out(3).rows == 3
    with pytest.raises(ModelError, match=r"4 beams need .* for copies of the conversation's 30 tokens") as caught:
        rows.fan_out(4)
    assert caught.value.kind == "memory" and rows.length == 30
    monkeypatch.setattr(eligible, "working_set_bytes", lambda: used)
    assert rows.fan_out(1).rows == 1
