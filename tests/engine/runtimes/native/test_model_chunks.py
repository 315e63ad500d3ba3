"""The bits of what is read do not depend on the chunks in which it is read, nor on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.moe.kernels.bindings import available
from engine.runtimes.native.model import NativeTokenRows
from engine.runtimes.protocol import LoadedModel, TokenRows
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import prompt_of

pytestmark = needs_kernels

TinyModel = Callable[..., Path]

LENGTH = 75
CHUNKS = (1, 2, 7, 16, 33)
UNEVEN = (9, 17, 1, 1, 40, 3, 2, 2)


def content(rows: TokenRows) -> list[bytes]:
    """Everything that the row holds."""
    assert isinstance(rows, NativeTokenRows)
    found = rows.contents()
    assert found is not None
    return [bytes(memoryview(array.read()).cast("B")) for array in found]


def sizes_of(length: int, chunk: int) -> list[int]:
    return [min(chunk, length - at) for at in range(0, length, chunk)]


def read_in(model: LoadedModel, tokens: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """What a row holds that has read ``tokens`` in chunks of ``sizes``, the logits after them, and those of two tokens
    written behind them."""
    assert sum(sizes) == len(tokens)
    rows, done = model.start(), 0
    logits = None
    for size in sizes:
        logits = rows.extend(tokens[done : done + size], want_logits=done + size == len(tokens))
        done += size
    assert logits is not None and np.isfinite(logits).all()
    return [*content(rows), logits.tobytes(), *(rows.step([token])[0].tobytes() for token in (5, 9))]


def check_chunks(model: LoadedModel, length: int = LENGTH, splits: Sequence[Sequence[int]] | None = None) -> None:
    tokens = prompt_of(length, seed=length)
    expected = read_in(model, tokens, [length])
    for sizes in splits or [UNEVEN, *(sizes_of(length, chunk) for chunk in CHUNKS)]:
        assert read_in(model, tokens, sizes) == expected, sizes


@pytest.mark.parametrize(
    "instructions", [*available()[:1], *(pytest.param(name, marks=pytest.mark.soak) for name in available()[1:])]
)
@pytest.mark.parametrize(("family", "window"), [("qwen3_moe", None), ("mistral", 700)])
@pytest.mark.parametrize("key_values", ["auto", "q8_0"])
def test_long_prompts(
    key_values: str,
    family: str,
    window: int | None,
    instructions: str,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many pages of keys, the last ones with several tiles of scores; and a window that begins within a tile."""
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    options = {"num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    if window is not None:
        options["sliding_window"] = window
    folder = tiny_model(family, max_position_embeddings=8192, **options)
    splits = [sizes_of(3100, 488), [1300, 1, 1, 1798], [3009, 91]]
    check_chunks(load_native(folder, key_values=key_values), 3100, splits)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "granitemoehybrid", "mistral"])
def test_threads(family: str, tiny_model: TinyModel) -> None:
    folder, tokens = tiny_model(family), prompt_of(LENGTH)
    one, three = (load_native(folder, cpu_threads=threads) for threads in (1, 3))
    assert read_in(three, tokens, UNEVEN) == read_in(one, tokens, [LENGTH])
