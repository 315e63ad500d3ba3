"""Texts of different lengths are stepped in one pass, and each gets the logits that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.runtimes.protocol import TokenRows
from engine.runtimes.torch.cache import KeyValueCache, empty_cache
from engine.runtimes.torch.model import ROWS_TOGETHER, TorchModel
from engine.runtimes.torch.steps_together import ATTENTION, can_step_together
from tests.engine.runtimes.subjects import TORCH, prompt_of
from tests.engine.runtimes.torch_oracle import EXACT
from tests.support.tiny_models import write_tiny_model

TinyModel = Callable[..., Path]
LENGTHS = (3, 40, 17, 25)
STEPS = 4
BY_TURNS = {
    *("minimax", "lfm2_moe", "granitemoehybrid", "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "kimi_linear"),
    *("qwen4_exp_text", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "llama4_text"),
}
"""Some of the families whose texts take turns: those with states, indexers, latents or chunks."""


def begun(model: TorchModel, lengths: Sequence[int]) -> list[TokenRows]:
    """Rows with prompts of ``lengths`` tokens; the last ones are three beams."""
    rows: list[TokenRows] = []
    for length in lengths:
        rows.append(model.start())
        rows[-1].extend(prompt_of(length, seed=length), want_logits=False)
    return [*rows[:-1], rows[-1].fan_out(3)]


def assert_alone(model: TorchModel) -> None:
    together, alone = begun(model, LENGTHS), begun(model, LENGTHS)
    for step in range(STEPS):
        tokens = [
            [5 + (13 * step + 7 * number + row) % 80 for row in range(rows.rows)] for number, rows in enumerate(alone)
        ]
        found = model.step_together(list(zip(together, tokens, strict=True)))
        for number, (logits, rows) in enumerate(zip(found, alone, strict=True)):
            expected = rows.step(tokens[number])
            assert np.abs(logits - expected).max() <= 10 * EXACT * max(1.0, float(np.abs(expected).max())), (
                step,
                number,
            )
        for mine, theirs in zip(together, alone, strict=True):
            parents = [(row * 2 + step) % mine.rows for row in range(mine.rows)]
            mine.reorder(parents)
            theirs.reorder(parents)
            assert mine.length == theirs.length


def config_of(model: TorchModel) -> Any:
    return model._config


@pytest.mark.parametrize("family", TORCH.families)
def test_every_family(family: str, tiny_model: TinyModel) -> None:
    model = TORCH.load(tiny_model(family), dtype="float32")
    assert isinstance(model, TorchModel)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    assert_alone(model)
    assert config_of(model)._attn_implementation != ATTENTION
    together = begun(model, LENGTHS)
    model._module.get_output_embeddings().register_forward_pre_hook(count)
    model.step_together([(rows, [5] * rows.rows) for rows in together])
    shared = model.rows_together > 1
    assert model.rows_together == (ROWS_TOGETHER if shared else 1)
    assert passes == (1 if shared else len(LENGTHS))
    assert not shared or family not in BY_TURNS
    if family in ("mixtral", "qwen3_moe", "gpt_oss", "gemma3_text"):
        assert shared


def test_rotations_by_the_length_of_a_text_take_turns(tmp_path: Path) -> None:
    """The longest text is behind the point from which on other factors count, the shortest before it."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    longest = {"original_max_position_embeddings": 16, "max_position_embeddings": 128}
    model = TORCH.load(write_tiny_model(tmp_path, "phi3", rope_parameters=rope | longest, **longest), dtype="float32")
    assert isinstance(model, TorchModel)
    assert_alone(model)
    assert model.rows_together == 1


def test_what_a_pass_that_fails_leaves(tiny_model: TinyModel) -> None:
    model = TORCH.load(tiny_model("qwen3_moe"), dtype="float32")
    assert isinstance(model, TorchModel)
    rows = begun(model, LENGTHS)
    with pytest.raises(Exception, match="outside the model's vocabulary"):
        model.step_together([(rows[0], [5]), (rows[1], [10**6])])
    with pytest.raises(ValueError, match="2 tokens for 1 rows"):
        model.step_together([(rows[0], [5]), (rows[1], [5, 6])])
    assert [each.length for each in rows] == list(LENGTHS)
    assert config_of(model)._attn_implementation != ATTENTION
    assert_alone(model)


def test_experts_run_once_over_the_rows_of_all(tiny_model: TinyModel) -> None:
    """A policy decides over the union of the experts."""
    model = TORCH.load(tiny_model("mixtral"), dtype="float32")
    assert isinstance(model, TorchModel) and model.executor is not None
    rows = begun(model, LENGTHS)
    seen: list[int] = []
    run = model.executor.run

    def noted(layer: int, hidden: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return run(layer, hidden, *more, **options)

    model.executor.run = noted  # type: ignore[method-assign]
    model.step_together([(each, [5] * each.rows) for each in rows])
    assert seen == [len(LENGTHS) + 2] * len(model.facts.moe_layers)


def test_chunks_and_unknown_families_take_turns(tiny_model: TinyModel) -> None:
    config = config_of(TORCH.load(tiny_model("mixtral")))  # type: ignore[arg-type]
    cache = empty_cache(config)
    assert isinstance(cache, KeyValueCache) and can_step_together(config, cache)
    config.layer_types = ["chunked_attention", "full_attention"]
    assert not can_step_together(config, cache)
    config.layer_types, config.model_type = None, "unheard_of"
    assert not can_step_together(config, cache)
