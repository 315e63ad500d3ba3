"""Texts with given tokens, with and without guesses: what repeats takes fewer passes, what is new none fewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import drafts
from engine.generation.drafts import PassCosts
from tests.engine.runtimes.native_oracle import needs_kernels


@needs_kernels
def test_texts_that_repeat_take_fewer_passes(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "PROMPT", 100)
    monkeypatch.setattr(PassCosts, "worth", lambda self, chance, most: most if chance > 0.5 else 0)
    folder = tiny_model("qwen3_moe", max_position_embeddings=1000)
    results = drafts.measure(folder, threads=1, rounds=1, length=80)
    assert list(results) == ["edited", "lines in another order", "new"]
    edited, other_order, new = results.values()
    assert 40 < edited.accepted <= edited.drafted and other_order.accepted > 20
    assert new.accepted <= 3
    lines = drafts.report(results).splitlines()
    assert len(lines) == 5 and lines[2].split("|")[1:4:2] == [" edited ", f" {80 / (80 - edited.accepted):.1f} "]


def test_an_edited_text_differs_in_every_hundredth_token() -> None:
    prompt, kinds = drafts.texts(50_000, 400)
    changed = [index for index, (old, new) in enumerate(zip(prompt, kinds["edited"], strict=False)) if old != new]
    assert changed == [99, 199, 299, 399]
    assert sorted(drafts.texts(50_000, drafts.PROMPT)[1]["lines in another order"]) == sorted(prompt)
