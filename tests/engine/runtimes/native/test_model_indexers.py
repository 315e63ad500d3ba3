"""Attention over latents to the positions that indexers choose: prompts, steps, beams, rows that are cut back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.moe.kernels.bindings import available
from engine.runtimes.protocol import Logits
from tests.engine.runtimes.native.test_model_replay import two_ways
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import assert_close, logits_along, prompt_of
from tests.engine.runtimes.torch_oracle import library_run, our_run, typical, worst
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels

TinyModel = Callable[..., Path]
INDEXED = ("deepseek_v32", "glm_moe_dsa")
LIMIT = 1e-5
CHOSEN = 13
"""Positions that a query of the tiny models sees, at most."""


def last_logits(folder: Path, tokens: list[int]) -> Logits:
    """The library's after all ``tokens``."""
    return library_run(folder, tokens, chunks=1)[1][0]


@pytest.mark.parametrize("shared", [["full", "full", "shared"], ["full", "shared", "shared"]], ids=str)
@pytest.mark.parametrize("chosen", [16, 40, 290])
def test_layers_see_what_an_earlier_one_has_chosen(shared: list[str], chosen: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "glm_moe_dsa", indexer_types=shared, index_topk=chosen)
    model = load_native(folder)
    for length in (12, 60, 300):
        tokens = prompt_of(length)
        answer, theirs = library_run(folder, tokens, chunks=1)
        for chunks in (1, 3):
            assert worst(our_run(model, tokens, chunks, answer), theirs) < LIMIT


@pytest.mark.parametrize("length", [5, CHOSEN - 1, 40, 300])
@pytest.mark.parametrize("family", INDEXED)
def test_rows_that_share_a_beginning_choose_each_for_itself(family: str, length: int, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    model, choose, tokens = load_native(folder), random.Random(length), prompt_of(length)
    single = model.start()
    single.extend(tokens)
    beams = single.fan_out(3)
    histories: list[list[int]] = [[], [], []]
    for _ in range(4):
        chosen = [choose.randrange(3, 160) for _ in range(3)]
        logits = beams.step(chosen)
        histories = [[*history, token] for history, token in zip(histories, chosen, strict=True)]
        parents = [choose.randrange(3) for _ in range(3)]
        beams.reorder(parents)
        for row in (0, 2):
            assert_close(logits[row], last_logits(folder, tokens + histories[row]), LIMIT)
        histories = [histories[parent] for parent in parents]


@pytest.mark.parametrize("cut", [4, CHOSEN, 33])
@pytest.mark.parametrize("family", INDEXED)
def test_a_row_that_is_cut_back_goes_on_as_one_that_never_was_longer(
    family: str, cut: int, tiny_model: TinyModel
) -> None:
    folder = tiny_model(family)
    tokens, other = prompt_of(40), prompt_of(50, seed=2)
    rows = load_native(folder).start()
    rows.extend(tokens)
    rows.step([7])
    rows.truncate(cut)
    assert_close(rows.extend(other), last_logits(folder, tokens[:cut] + other), LIMIT)
    assert_close(rows.step([9])[0], last_logits(folder, [*tokens[:cut], *other, 9]), LIMIT)


@pytest.mark.parametrize("key_values", ["auto", "q8_0", "q4_0"])
@pytest.mark.parametrize(("family", "prompt"), [("deepseek_v32", 5), ("glm_moe_dsa", 30), ("deepseek_v32", 700)])
def test_passes_of_several_tokens_leave_the_bits_of_single_steps(
    family: str, prompt: int, key_values: str, tiny_model: TinyModel
) -> None:
    folder = tiny_model(family, kv_lora_rank=32, qk_rope_head_dim=32, dtype="bfloat16")
    again, single = two_ways(load_native(folder, key_values=key_values), prompt, [8, 3, 1, 5])
    assert again == single


@pytest.mark.parametrize("family", INDEXED)
def test_the_number_of_threads_changes_no_bit(family: str, tiny_model: TinyModel) -> None:
    folder, tokens = tiny_model(family), prompt_of(90)
    first, *others = (logits_along(load_native(folder, cpu_threads=threads), tokens, 80) for threads in (1, 3, 5))
    assert all(np.array_equal(other, first) for other in others)


@pytest.mark.parametrize(("key_values", "limit"), [("q8_0", 0.1), ("q4_0", 0.6)])
def test_packed_keys_choose_nearly_the_same(key_values: str, limit: float, tmp_path: Path) -> None:
    """The same weights with other positions chosen are more than 1 away."""
    options = {"kv_lora_rank": 32, "qk_rope_head_dim": 32}
    folder, tokens = write_tiny_model(tmp_path / "model", "deepseek_v32", index_topk=150, **options), prompt_of(290)
    answer, theirs = library_run(folder, tokens, chunks=1)
    assert typical(our_run(load_native(folder, key_values=key_values), tokens, 2, answer), theirs) < limit
    others = write_tiny_model(tmp_path / "others", "deepseek_v32", index_topk=400, **options)
    assert typical(library_run(others, tokens, chunks=1)[1][:1], theirs[:1]) > 1


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_indexers_on_every_instruction_set(
    instructions: str, dtype: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("glm_moe_dsa", dtype=dtype, index_topk=200)
    monkeypatch.setenv("PRIVATELLM_KERNELS", instructions)
    tokens = prompt_of(290)
    answer, theirs = library_run(folder, tokens, chunks=1, dtype="float32")
    ours = our_run(load_native(folder), tokens, 2, answer)
    if dtype == "float32":
        assert worst(ours, theirs) < LIMIT
    assert typical(ours, theirs) < 3e-2
