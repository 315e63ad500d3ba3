"""Tables of n-grams of the native runtime: few of their rows are read, and rows of text know their last tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.formats import lookup_table
from tests.engine.runtimes.native_oracle import load_native, needs_kernels
from tests.engine.runtimes.subjects import fresh, prompt_of
from tests.engine.runtimes.torch_oracle import library_model, worst
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels

TABLE = "model.layers.0.ple.ple_embedding."
END = 2
TWO = {"ple_layer_ids": [1, 3]}
"""Layers with tables, counted from 1."""


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_text_that_ends_within_is_read_as_by_the_library(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen4_exp_text", **TWO)
    tokens = prompt_of(30)
    for place in (4, 11, 12, 29):
        tokens[place] = END
    with torch.inference_mode():
        wanted = library_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    rows = load_native(folder).start()
    found = [rows.extend(tokens[:5]), *(rows.step([token])[0] for token in tokens[5:12]), rows.extend(tokens[12:])]
    places = [4, *range(5, 12), 29]
    assert worst([logits for logits in found if logits is not None], [wanted[place] for place in places]) < 1e-5


def test_only_rows_of_the_tokens_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rows_of = lookup_table.LookupTable.rows_of

    def counted(self: lookup_table.LookupTable, ids: Any) -> Any:
        read.append(len(ids))
        return rows_of(self, ids)

    monkeypatch.setattr(lookup_table.LookupTable, "rows_of", counted)
    model = load_native(write_tiny_model(tmp_path / "model", "qwen4_exp_text", **TWO))
    assert read == []
    rows = model.start()
    rows.extend(prompt_of(7))
    rows.step([5])
    assert read == [7 * 4, 7 * 4, 4, 4]


def test_branches_of_a_text_have_their_own_last_tokens(tmp_path: Path) -> None:
    model = load_native(write_tiny_model(tmp_path / "model", "qwen4_exp_text", **TWO))
    tokens = prompt_of(9)
    rows = model.start()
    rows.extend(tokens)
    branches = rows.fan_out(3)
    branches.step([4, END, 6])
    branches.reorder([1, 1, 0])
    last = branches.step([7, 8, 7])
    for logits, text in zip(last, ([END, 7], [END, 8], [4, 7]), strict=True):
        assert worst([logits], [fresh(model, [*tokens, *text])]) < 1e-5


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def gone(weights: dict[str, Any]) -> None:
        for part in range(5):
            del weights[f"{TABLE}ngram_embedding.shard_{part}.weight"]

    def short(weights: dict[str, Any]) -> None:
        gone(weights)
        weights[f"{TABLE}ngram_embedding.weight"] = torch.zeros(100, 6)

    def moved(weights: dict[str, Any]) -> None:
        weights["model.layers.1.ple.ple_embedding.ngram_embedding.weight"] = torch.zeros(4, 6)

    def other(weights: dict[str, Any]) -> None:
        weights[TABLE + "layer_multipliers"] += 2

    for name, change, said in (
        ("gone", gone, "ngram_embedding.weight is missing"),
        ("short", short, r"has shape \[100, 6\], but config.json asks for \[240, 6\]"),
        ("moved", moved, "layers.1.ple.ple_embedding.ngram_embedding has no place"),
        ("other", other, "layer_multipliers has other numbers"),
    ):
        folder = changed(write_tiny_model(tmp_path / name, "qwen4_exp_text", **TWO), change)
        with pytest.raises(ModelError, match=said):
            load_native(folder)


def test_a_checkpoint_may_leave_out_the_numbers_of_the_hash(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen4_exp_text", **TWO)
    tokens = prompt_of(12)
    wanted = fresh(load_native(folder), tokens)

    def fewer(weights: dict[str, Any]) -> None:
        for layer in (0, 2):
            for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
                del weights[f"model.layers.{layer}.ple.ple_embedding.{name}"]

    assert np.array_equal(fresh(load_native(changed(folder, fewer)), tokens), wanted)
