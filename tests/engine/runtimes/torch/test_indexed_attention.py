"""While a text is short, all of it is attended to without a choice; then transformers chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

from engine.runtimes.torch.model import TorchModel
from tests.engine.runtimes.subjects import TORCH, prompt_of
from tests.engine.runtimes.torch_oracle import library_model

BUDGET, RATIO = 12, 4
"""Those of the tiny model."""


@pytest.fixture
def chosen_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the text for which transformers chose blocks."""
    lengths: list[int] = []
    choose = Qwen4ExpTextQSAIndexer.forward

    def counted(self: Any, hidden: Any, positions: Any, mask: Any, cache: Any) -> Any:
        lengths.append(mask.shape[-1])
        return choose(self, hidden, positions, mask, cache)

    monkeypatch.setattr(Qwen4ExpTextQSAIndexer, "forward", counted)
    return lengths


def test_blocks_are_chosen_from_the_first_text_on_that_is_over_the_budget(
    tiny_model: Callable[..., Path], chosen_for: list[int]
) -> None:
    folder = tiny_model("qwen4_exp_text")
    tokens = prompt_of(22)
    with torch.inference_mode():
        wanted = library_model(folder)(torch.tensor([tokens])).logits[0].numpy()
    chosen_for.clear()
    model = TORCH.load(folder)
    assert isinstance(model, TorchModel)
    rows = model.start()
    found = [rows.extend(tokens[:9]), *(rows.step([token])[0] for token in tokens[9:])]
    for logits, theirs in zip(found, wanted[8:], strict=True):
        assert logits is not None and abs(logits - theirs).max() < 1e-5 * abs(wanted).max()
    assert chosen_for == list(range(BUDGET + RATIO, 23))
