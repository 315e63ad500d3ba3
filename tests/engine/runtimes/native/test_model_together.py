"""Rows of several conversations are stepped in one pass, and each gets the bits that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.engine.runtimes.native.test_model_replay import LENGTHS, STEPS, assert_alone, content, conversations
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import NATIVE, StoredModel

pytestmark = needs_kernels

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("key_values", ["auto", "q8_0"])
def test_where_attention_is_cut_into_parts(key_values: str, tiny_model: TinyModel) -> None:
    """Rows whose keys lie in different numbers of pages and parts; one head of keys."""
    options = {
        "num_hidden_layers": 1,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
    }
    model = load_native(tiny_model("qwen3_moe", **options), key_values=key_values)
    assert_alone(model, (4090, 5, 255, 1100, 256, 2, 1, 31, 300, 16, 17, 90, 4, 64))


@pytest.mark.parametrize("stored", ["bfloat16", "Q4_K_M", "MXFP4", "mlx-4-bit"])
def test_any_number_of_threads(stored: str, stored_model: StoredModel) -> None:
    """All rows of a pass are of different texts, and some experts are chosen by more of them than registers hold."""
    folder, found = stored_model(NATIVE, "qwen2_moe", stored), []
    for threads in (1, 3):
        model = NATIVE.load(folder, cpu_threads=threads)
        assert_alone(model)
        rows = conversations(model, LENGTHS)
        logits = model.step_together([(each, [5 + 7 * number % 80]) for number, each in enumerate(rows)])
        found.append([each.tobytes() for each in logits])
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next", "deepseek_v3", "gemma3_text", "qwen4_exp_text"])
@pytest.mark.parametrize("widths", [(2, 1, 3), (1, 4), (9, 2, 5)])
def test_searches_beside_answers(family: str, widths: Sequence[int], tiny_model: TinyModel) -> None:
    """Rows that share a prompt are one part of the pass, and move as before."""
    model = load_native(tiny_model(family))
    together, alone = (
        [rows.fan_out(width) for rows, width in zip(conversations(model, LENGTHS), widths, strict=False)]
        for _ in range(2)
    )
    for step in range(STEPS):
        tokens = [
            [5 + (11 * step + 7 * row + 3 * number) % 80 for row in range(width)] for number, width in enumerate(widths)
        ]
        found = model.step_together(list(zip(together, tokens, strict=True)))
        for number, (logits, rows) in enumerate(zip(found, alone, strict=True)):
            assert logits.tobytes() == rows.step(tokens[number]).tobytes(), (step, number)
        for mine, theirs in zip(together, alone, strict=True):
            parents = [(row * 2 + step) % mine.rows for row in range(mine.rows)]
            assert mine.reorder(parents) == theirs.reorder(parents)


def test_a_token_that_is_unknown_fails_before_anything_is_written(tiny_model: TinyModel) -> None:
    model = load_native(tiny_model("qwen3_next"))
    rows = conversations(model, (9, 20))
    before = [content(each) for each in rows]
    with pytest.raises(Exception, match="outside the model's vocabulary"):
        model.step_together([(rows[0], [5]), (rows[1], [10**6])])
    assert [content(each) for each in rows] == before
