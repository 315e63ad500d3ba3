"""Pages of experts that are asked for ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.calibration import reading_rates
from engine.models.folders.prepare import prepare
from engine.moe.kernels import bindings
from engine.runtimes.torch.offload import local
from engine.runtimes.torch.offload.tensor_backend import ReadAhead
from tests.engine.runtimes.torch_oracle import load, prompt
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model


@pytest.mark.parametrize("kernels", ["", "off"])
def test_the_answer_is_the_same_and_the_experts_are_asked_for_ahead(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bindings.VARIABLE, kernels)
    prepare(write_tiny_model(tmp_path / "plain", "mixtral"), tmp_path / "prepared", lambda *_: None)
    roomy = load(tmp_path / "prepared")
    tokens = prompt(roomy, 20)
    expected = roomy.start().extend(tokens)
    assert not any("do not fit" in notice for notice in roomy.facts.notices)
    asked: list[tuple[int, set[int]]] = []
    will_need = ReadAhead.will_need

    def watched(self: ReadAhead, layer: int, indices: torch.Tensor) -> None:
        asked.append((layer, set(indices.flatten().tolist())))
        will_need(self, layer, indices)

    monkeypatch.setattr(ReadAhead, "will_need", watched)
    monkeypatch.setattr(reading_rates, "read_rate", lambda path: 1.234e9)  # of a file in memory there is none
    monkeypatch.setattr(local, "available_bytes", lambda: roomy.facts.trunk_bytes + roomy.facts.expert_bytes - 1)
    tight = load(tmp_path / "prepared")
    line = next(notice for notice in tight.facts.notices if "do not fit" in notice)
    assert line.endswith("at 1.23 GB/s, as measured just now.")
    assert (tight.start().extend(tokens) == expected).all()
    assert tight.executor is not None
    for layer in tight.facts.moe_layers:
        counts = tight.executor.popularity.counts(layer)
        assert (layer, {expert for expert, count in enumerate(counts) if count}) in asked


def test_pages_asked_for_cover_the_expert_and_little_else(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "mixtral", hidden_size=128, intermediate_size=200)
    prepare(plain, tmp_path / "prepared", lambda *_: None)
    for folder in (plain, tmp_path / "prepared"):
        experts = experts_of(folder)
        for expert in range(experts.count):
            weights = experts.expert(1, expert)
            ranges = experts.place(1, expert).page_ranges()
            assert len(ranges) <= (2 if folder.name == "prepared" else 3)
            for start, nbytes in ranges:
                assert start % reading_rates._PAGE == nbytes % reading_rates._PAGE == 0
            for matrix in (weights.gate, weights.up, weights.down):
                first = matrix.words.ctypes.data
                assert any(start <= first and first + matrix.nbytes <= start + size for start, size in ranges)
            total = sum(matrix.nbytes for matrix in (weights.gate, weights.up, weights.down))
            assert sum(size for _, size in ranges) <= total + 6 * reading_rates._PAGE
