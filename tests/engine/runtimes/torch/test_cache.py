"""The cache keeps what layers need of earlier tokens, whatever kinds of states they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.unrecorded import difference
from tests.engine.runtimes.subjects import TORCH, prompt_of
from tests.engine.runtimes.torch_oracle import library_model

TinyModel = Callable[..., Path]


def loaded(folder: Path) -> TorchModel:
    model = TORCH.load(folder)
    assert isinstance(model, TorchModel)
    return model


@pytest.mark.parametrize("family", ["qwen4_exp_text", "qwen3_next", "granitemoehybrid"])
def test_parts_steps_copies_and_kept_rows_are_those_of_the_library(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    assert difference(library_model(folder), loaded(folder)) == ""


def test_a_text_that_ends_within_it_has_no_part_in_later_n_grams(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen4_exp_text")
    model, end = loaded(folder), 2
    rows = model.start()
    tokens = prompt_of(9)
    tokens[4] = end
    for token in tokens[:-1]:
        rows.extend([token], want_logits=False)
    found = rows.extend(tokens[-1:])
    with torch.inference_mode():
        wanted = library_model(folder)(torch.tensor([tokens])).logits[0, -1].numpy()
    assert found is not None and abs(found - wanted).max() < 1e-4 * abs(wanted).max()


def test_a_row_keeps_the_last_tokens_and_the_keys_that_choose_blocks(tiny_model: TinyModel) -> None:
    model = loaded(tiny_model("qwen4_exp_text"))
    rows = model.start()
    rows.extend(prompt_of(20), want_logits=False)
    shapes = {array.part.name: array.part.shape for array in rows.contents() or ()}
    assert shapes["3 index"] == (1, 1, 20, 16)
    assert shapes["1 tokens"] == (1, 2)
    assert shapes["1 lexical"] == (1, 3 * 48, 6)
    tokens = next(array for array in rows.contents() or () if array.part.name == "1 tokens")
    assert torch.frombuffer(bytearray(bytes(tokens.read())), dtype=torch.int64).tolist() == prompt_of(20)[-2:]
