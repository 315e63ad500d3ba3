"""Values after SiLU of a model's experts, counted by layer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.nn import functional

from benchmarks.papers import sparsity_rows
from benchmarks.papers.sparsity_rows import THRESHOLDS, counted_in_the_paper, means_of, shares_of, without_kernels
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.moe.kernels.bindings import VARIABLE
from engine.runtimes import runtime_named
from tests.support.tiny_models import write_tiny_model


def test_every_layers_values_are_counted_and_nothing_stays_patched(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mixtral", "mixtral")
    silu = functional.silu
    with without_kernels():
        assert os.environ[VARIABLE] == "off"
        load = Load(id=0, model="tiny", runtime="torch", dtype="float32", keep_resident=False)
        model = runtime_named("torch").load(folder, load, lambda *_: None)
    try:
        shares = shares_of(model, [[5, 6, 7, 8]])
    finally:
        model.close()
    assert functional.silu is silu
    assert not model.recorder.enabled
    assert len(shares) == model.facts.layers
    for below in shares.values():
        assert len(below) == len(THRESHOLDS)
        assert 0.0 <= below[0] <= below[1] <= below[2] <= below[3] <= 100.0
        assert below[3] > 0.0
    rows = means_of(shares)
    assert all(row.tag == "executed" and row.printed is None for row in rows)


def test_the_papers_counts_of_its_own_table() -> None:
    assert [row.equal for row in counted_in_the_paper()] == [True, False, True]


def test_without_the_starter_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModelError("There is no starter: privatellm models pull starter", kind="bad-input")

    monkeypatch.setattr(sparsity_rows, "find_folder", missing)
    last = sparsity_rows.sparsity_rows().rows[-1]
    assert (last.tag, last.where) == ("not possible here", "table 2")
