"""Figure 7's CPU side: both ways run the same expert, and the row compares many tokens with one."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.papers.expert_rows import LibraryExpert, expert_rows, findings
from engine.bench.synthetic_moe import MoeShape, write_moe
from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide
from tests.support.opened_experts import experts_of

SMALL = MoeShape(layers=1, hidden=64, ffn=96, experts=2, experts_per_token=1, heads=2, key_value_heads=2, vocabulary=8)


def test_both_ways_run_the_same_expert(tmp_path: Path) -> None:
    experts = experts_of(write_moe(tmp_path / "model", SMALL, lambda *_: None))
    library = LibraryExpert(experts)
    library.prepare(3)
    side = LocalCpuSide(experts, "bfloat16", 1, 1)
    ours = side.cpu.outputs(0, library._inputs[3], torch.zeros(3, 1, dtype=torch.int32))
    # The library rounds each product to bfloat16 (2^-9), ours does not. What cancels leaves no relative error to bound.
    assert (library.run(3).float() - ours).abs().max() <= ours.abs().max() / 32


def test_the_row_and_its_table() -> None:
    found = expert_rows(SMALL, (1, 4))
    assert [line[0] for line in found.tables[0].lines] == ["1", "4"]
    known = findings({1: [2.0], 32: [3.0]}, {1: [2.0], 32: [40.0]}, SMALL, "kernels").rows[0]
    assert (known.ours, known.tag) == (20.0, "executed")
    assert known.deviation is None
    assert "our kernels: 1.5" in known.note
