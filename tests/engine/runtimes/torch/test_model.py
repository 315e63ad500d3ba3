"""Rows of the torch runtime: growing buffers, a pass that fails, and the output head that nobody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.runtimes.protocol import LoadedModel
from engine.runtimes.torch.cache import BLOCK
from engine.runtimes.torch.model import TorchModel
from tests.engine.runtimes.subjects import TORCH, assert_close, fresh, prompt_of


@pytest.fixture
def mixtral(loaded: Callable[..., LoadedModel]) -> TorchModel:
    model = loaded(TORCH, "mixtral")
    assert isinstance(model, TorchModel)
    return model


def test_buffers_grow_in_blocks(mixtral: TorchModel) -> None:
    tokens = prompt_of(2 * BLOCK + 10)
    rows = mixtral.start()
    for start in range(0, len(tokens), 50):
        logits = rows.extend(tokens[start : start + 50])
    assert_close(logits, fresh(mixtral, tokens))
    buffer = rows._cache.layers[0].key_buffer
    assert buffer is not None and buffer.shape[2] % BLOCK == 0


def test_a_pass_that_fails_leaves_the_rows_as_they_were(mixtral: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt_of(12)
    rows = mixtral.start()
    rows.extend(tokens)
    assert mixtral.executor is not None
    backend = mixtral.executor.backend
    run = backend.run

    def failing(layer: int, *rest: Any) -> torch.Tensor:
        if layer == mixtral.facts.moe_layers[-1]:
            raise MemoryError("no room")
        return run(layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "run", failing)
        with pytest.raises(MemoryError):
            rows.step([9])
        with pytest.raises(MemoryError):
            rows.extend([9, 10, 11])
    assert rows.length == 12
    assert_close(rows.step([8])[0], fresh(mixtral, [*tokens, 8]))


def test_the_head_runs_where_logits_are_asked_for(mixtral: TorchModel) -> None:
    seen: list[tuple[int, ...]] = []
    head = mixtral._module.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].stride()))
    try:
        rows = mixtral.start()
        assert rows.extend(prompt_of(20), want_logits=False) is None
        assert not seen
        rows.extend(prompt_of(20))
    finally:
        handle.remove()
    hidden = mixtral.facts.hidden
    assert seen == [(hidden, hidden, 1)], "the last position, without the strides of the prompt"
