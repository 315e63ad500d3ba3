"""The cache keeps what layers need of earlier tokens, whatever kinds of states they have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runtimes.torch.model import TorchModel, decoder_layers
from engine.runtimes.torch.unrecorded import difference
from tests.engine.runtimes.subjects import TORCH, prompt_of
from tests.engine.runtimes.torch_oracle import library_model

TinyModel = Callable[..., Path]


def loaded(folder: Path) -> TorchModel:
    model = TORCH.load(folder)
    assert isinstance(model, TorchModel)
    return model


@pytest.mark.parametrize(
    "family", ["qwen4_exp_text", "qwen3_next", "granitemoehybrid", "glm5_next_text", "deepseek_v4"]
)
def test_parts_steps_copies_and_kept_rows_are_those_of_the_library(family: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(family)
    assert difference(library_model(folder), loaded(folder)) == ""


@pytest.mark.parametrize("parts", [[1] * 40, [40], [3, 4, 8, 1, 1, 17, 6], [16, 8, 16]])
def test_compressed_keys_are_those_of_the_library_however_a_text_is_read(
    parts: list[int], tiny_model: TinyModel
) -> None:
    folder = tiny_model("deepseek_v4")
    rows, tokens, end = loaded(folder).start(), prompt_of(sum(parts)), 0
    with torch.inference_mode():
        wanted = library_model(folder)(torch.tensor([tokens])).logits[0].numpy()
    for count in parts:
        found = rows.extend(tokens[end : end + count])
        end += count
        assert found is not None and abs(found - wanted[end - 1]).max() < 1e-5 * abs(wanted).max()
    assert not rows.can_truncate


def test_a_token_adds_to_compressed_keys_what_is_planned_for_it(tiny_model: TinyModel) -> None:
    model = loaded(tiny_model("deepseek_v4"))
    rows = model.start()
    rows.extend(prompt_of(64), want_logits=False)
    parts = [array.part for array in rows.contents() or ()]
    keys = [math.prod(part.shape) for part in parts if part.name.endswith(("compressor keys", "indexer keys"))]
    assert len(keys) == 5 and 4 * sum(keys) == 64 * model.facts.key_value_bytes_per_token
    others = sum(math.prod(part.shape) for part in parts) - sum(keys)
    assert 0.9 < 4 * others / model.facts.state_bytes <= 1


def test_a_pass_that_is_stopped_leaves_no_compressed_keys(tiny_model: TinyModel) -> None:
    folder = tiny_model("deepseek_v4")
    model, tokens = loaded(folder), prompt_of(24)
    rows, undisturbed = model.start(), model.start()
    for each in (rows, undisturbed):
        each.extend(tokens[:6], want_logits=False)
    layers = decoder_layers(model._module)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = layers[3].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        rows.extend(tokens[6:], want_logits=False)
    handle.remove()
    for token in tokens[:3]:
        found, wanted = (each.step([token])[0] for each in (rows, undisturbed))
        assert (found == wanted).all()


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
