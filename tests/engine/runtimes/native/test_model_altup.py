"""Alternating updates of residual streams, and networks of which few gates count: prompts, steps, instruction sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.moe.kernels.bindings import available
from tests.engine.runtimes.native.test_model_replay import two_ways
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import logits_along, prompt_of
from tests.engine.runtimes.torch_oracle import library_run, our_run, typical, worst

pytestmark = needs_kernels

TinyModel = Callable[..., Path]
LIMIT = 3e-5
"""Gates that hardly exceed where they begin to count make more of rounding."""


@pytest.mark.parametrize("length", [1, 9, 90])
@pytest.mark.parametrize("instructions", available())
def test_streams_on_every_instruction_set(
    instructions: str, length: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokens = tiny_model("gemma3n_text"), prompt_of(length)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    answer, theirs = library_run(folder, tokens, chunks=1)
    assert worst(our_run(load_native(folder), tokens, 1, answer), theirs) < LIMIT


def test_bfloat16_is_near(tiny_model: TinyModel) -> None:
    folder, tokens = tiny_model("gemma3n_text", dtype="bfloat16"), prompt_of(40)
    answer, theirs = library_run(folder, tokens, chunks=1, dtype="float32")
    assert typical(our_run(load_native(folder), tokens, 2, answer), theirs) < 0.03


@pytest.mark.parametrize("key_values", ["auto", "q8_0"])
def test_passes_of_several_tokens_leave_the_bits_of_single_steps(key_values: str, tiny_model: TinyModel) -> None:
    folder = tiny_model("gemma3n_text", head_dim=32, dtype="bfloat16")
    again, single = two_ways(load_native(folder, key_values=key_values), 30, [8, 3, 1, 5])
    assert again == single


def test_the_number_of_threads_changes_no_bit(tiny_model: TinyModel) -> None:
    folder, tokens = tiny_model("gemma3n_text"), prompt_of(90)
    first, *others = (logits_along(load_native(folder, cpu_threads=threads), tokens, 80) for threads in (1, 3, 5))
    assert all(np.array_equal(other, first) for other in others)
