"""Rows of several conversations are stepped in one pass, and each gets the bits that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.moe.kernels.bindings import available
from engine.runtimes.native.bindings import STEPS_TOGETHER
from engine.runtimes.protocol import LoadedModel, TokenRows
from tests.engine.runtimes.native.test_model_replay import content
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import (
    FP8,
    GROUPED_MODELS,
    NATIVE,
    PACKED_FAMILIES,
    PACKED_MODELS,
    PUBLISHED,
    StoredModel,
    prompt_of,
)

pytestmark = needs_kernels

TinyModel = Callable[..., Path]
LENGTHS = (3, 40, 17, 131, 8, 64)
STEPS = 7


def conversations(model: LoadedModel, lengths: Sequence[int]) -> list[TokenRows]:
    """Rows that have read prompts of ``lengths`` tokens, and two that are alike but for their last tokens."""
    found = []
    for length in lengths:
        rows = model.start()
        rows.extend(prompt_of(length, seed=length), want_logits=False)
        found.append(rows)
    return [*found, found[1].fan_out(1), found[0].fan_out(1)]


def both_ways(model: LoadedModel, lengths: Sequence[int] = LENGTHS) -> None:
    assert model.rows_together == STEPS_TOGETHER == len(lengths) + 2
    together, alone = conversations(model, lengths), conversations(model, lengths)
    for step in range(STEPS):
        tokens = [[5 + (13 * step + 7 * number) % 80] for number in range(len(together))]
        # Every other time one is left out.
        chosen = [number for number in range(len(together)) if step % 2 or number != step % len(together)]
        found = model.step_together([(together[number], tokens[number]) for number in chosen])
        for number, logits in zip(chosen, found, strict=True):
            expected = alone[number].step(tokens[number])
            assert np.isfinite(logits).all() and logits.tobytes() == expected.tobytes(), (step, number)
    assert [content(rows) for rows in together] == [content(rows) for rows in alone]


@pytest.mark.parametrize("stored", NATIVE.stored)
@pytest.mark.parametrize("family", NATIVE.families)
def test_every_family(family: str, stored: str, stored_model: StoredModel) -> None:
    both_ways(NATIVE.load(stored_model(NATIVE, family, stored)))


@pytest.mark.sampled
@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("stored", ["float16", *PACKED_MODELS, *GROUPED_MODELS, FP8, PUBLISHED])
def test_every_format_and_instruction_set(
    stored: str, instructions: str, stored_model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    both_ways(NATIVE.load(stored_model(NATIVE, "gpt_oss" if stored == PUBLISHED else "qwen2_moe", stored)))


@pytest.mark.soak
@pytest.mark.parametrize("stored", PACKED_MODELS)
@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_every_packed_family(family: str, stored: str, stored_model: StoredModel) -> None:
    both_ways(NATIVE.load(stored_model(NATIVE, family, stored)))


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
    both_ways(model, (4090, 5, 255, 1100, 256, 2))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next", "deepseek_v3", "gemma3_text", "qwen4_exp_text"])
@pytest.mark.parametrize("widths", [(2, 1, 3), (1, 4)])
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
