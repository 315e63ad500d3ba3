"""Rows in the cache: cutting back, fanning out, reordering, taking one; each equals computing afresh."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TINY_FAMILIES, write_tiny_model
from torch_oracle import load, prompt

from engine.errors import ModelError
from engine.runtimes.protocol import Logits
from engine.runtimes.torch.cache import BLOCK
from engine.runtimes.torch.model import TorchModel

LIMIT = 1e-4


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchModel]:
    loaded = load(write_tiny_model(tmp_path_factory.mktemp(request.param), request.param))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    return load(write_tiny_model(tmp_path_factory.mktemp("mixtral"), "mixtral"))


def fresh(model: TorchModel, tokens: list[int]) -> Logits:
    return model.start().extend(tokens)


def assert_close(ours: Logits, expected: Logits) -> None:
    assert np.abs(ours - expected).max() / np.abs(expected).max() < LIMIT


def test_cut_back_and_extended_again_equals_fresh(model: TorchModel) -> None:
    tokens = prompt(model, 40)
    rows = model.start()
    rows.extend(tokens)
    for token in (5, 6, 7):
        rows.step([token])
    if not rows.can_truncate:
        assert model.facts.family == "minimax"
        with pytest.raises(ModelError, match="cannot be cut back"):
            rows.truncate(10)
        rows.truncate(43)
        assert rows.length == 43
        return
    for keep in (30, 9, 0):
        rows.truncate(keep)
        assert rows.length == keep
        other = [token + 1 for token in tokens[: 40 - keep]]
        assert_close(rows.extend(other), fresh(model, tokens[:keep] + other))
        assert_close(rows.step([8])[0], fresh(model, [*tokens[:keep], *other, 8]))
        rows.truncate(keep)
        rows.extend(tokens[keep:])


def test_beams_equal_rows_computed_apart(model: TorchModel) -> None:
    choose = random.Random(1)
    tokens = prompt(model, 21)
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(4)
    assert (beams.rows, beams.length) == (4, 21)
    histories: list[list[int]] = [[] for _ in range(4)]
    for _ in range(6):
        chosen = [choose.randrange(3, model.facts.vocabulary) for _ in range(4)]
        logits = beams.step(chosen)
        histories = [[*history, token] for history, token in zip(histories, chosen, strict=True)]
        for row, history in enumerate(histories):
            assert_close(logits[row], fresh(model, tokens + history))
        parents = [choose.randrange(4) for _ in range(4)]
        beams.reorder(parents)
        histories = [histories[parent] for parent in parents]
    # What the beams did never touches the row they came from, nor the reverse.
    assert_close(single.step([7])[0], fresh(model, [*tokens, 7]))
    assert_close(beams.step([9] * 4)[2], fresh(model, [*tokens, *histories[2], 9]))


def test_reordering_moves_changed_rows_after_the_prompt_only(mixtral: TorchModel) -> None:
    single = mixtral.start()
    single.extend(prompt(mixtral, 30))
    beams = single.fan_out(3)
    per_token = mixtral.facts.key_value_bytes_per_token
    assert beams.reorder([2, 1, 0]) == 0
    for step in range(1, 4):
        beams.step([4, 5, 6])
        assert beams.reorder([0, 1, 2]) == 0
        assert beams.reorder([0, 0, 2]) == step * per_token
        assert beams.reorder([1, 2, 0]) == 3 * step * per_token


def test_buffers_grow_past_a_block(mixtral: TorchModel) -> None:
    tokens = prompt(mixtral, 2 * BLOCK + 10)
    rows = mixtral.start()
    rows.extend(tokens[:3])
    for token in tokens[3:20]:
        rows.step([token])
    for start in range(20, len(tokens), 50):
        logits = rows.extend(tokens[start : start + 50])
    assert_close(logits, fresh(mixtral, tokens))
    buffer = rows._cache.layers[0].key_buffer
    assert buffer is not None and buffer.shape[2] % BLOCK == 0


def test_a_pass_that_fails_leaves_the_cache_as_it_was(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if model.facts.experts == 0:
        assert model.executor is None, "a dense model has no executor that could fail"
        return
    tokens = prompt(model, 12)
    rows = model.start()
    rows.extend(tokens)
    last = model.facts.moe_layers[-1]
    assert model.executor is not None
    backend = model.executor.backend
    run = backend.run

    def failing(layer: int, *rest: Any) -> torch.Tensor:
        if layer == last:
            raise MemoryError("no room")
        return run(layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "run", failing)
        with pytest.raises(MemoryError):
            rows.step([9])
        with pytest.raises(MemoryError):
            rows.extend([9, 10, 11])
    assert rows.length == 12
    assert_close(rows.step([8])[0], fresh(model, [*tokens, 8]))


def test_misuse_is_an_error(mixtral: TorchModel) -> None:
    single = mixtral.start()
    single.extend([3, 4, 5])
    beams = single.fan_out(2)
    for misuse in (
        lambda: beams.extend([3]),
        lambda: beams.truncate(1),
        lambda: beams.fan_out(2),
        lambda: beams.step([3]),
        lambda: beams.reorder([0]),
        lambda: beams.reorder([0, 2]),
        lambda: single.truncate(4),
        lambda: single.extend([]),
    ):
        with pytest.raises(ValueError):
            misuse()


@pytest.mark.parametrize("token", [-1, 160, 10**9])
def test_a_token_outside_the_vocabulary_is_named(mixtral: TorchModel, token: int) -> None:
    rows = mixtral.start()
    with pytest.raises(ModelError, match=rf"Token id {token} is outside the model's vocabulary of 160"):
        rows.extend([3, token])
    assert rows.length == 0


def test_logits_are_left_out_when_nobody_wants_them(mixtral: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []
    handle = mixtral._module.lm_head.register_forward_hook(lambda *_: heads.append(1))
    try:
        rows = mixtral.start()
        assert rows.extend([3, 4, 5], want_logits=False) is None
        assert not heads
        rows.extend([6])
        assert len(heads) == 1
    finally:
        handle.remove()
