"""What the kernels offer to a node of a ring: sums of what others computed, experts that are run for nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.moe.kernels.bindings import WEIGHT_DTYPES, KernelChoice, available, choose, load
from engine.moe.kernels.layers import Gate, LayerExperts
from engine.moe.kernels.pool import Pool
from tests.engine.moe.kernels import kernel_oracle as oracle

pytestmark = pytest.mark.skipif(not choose("float32").native, reason=choose("float32").reason)

EXPERTS = 6


class Case:
    """Random experts, routes and what they give."""

    def __init__(self, tokens: int, k: int, hidden: int, ffn: int, dtype: str, name: str) -> None:
        generator = np.random.default_rng(tokens * 100 + k)
        self.hidden = generator.standard_normal((tokens, hidden)).astype(np.float32)
        self.scales = generator.random((tokens, k)).astype(np.float32)
        chosen = [generator.permutation(EXPERTS)[:k] for _ in range(tokens)]
        self.indices = np.array(chosen, np.int32).reshape(tokens, k)
        self.weights = {e: oracle.expert(generator, hidden, ffn, dtype, biases=False) for e in range(EXPERTS)}
        self.choice = KernelChoice(name, "")
        self.dtype = dtype

    def layer(self, held: range | list[int] = range(EXPERTS)) -> LayerExperts:
        return LayerExperts({e: self.weights[e] for e in held}, EXPERTS, Gate("silu"), self.choice)

    def run(
        self, pool: Pool, layer: LayerExperts, indices: NDArray[np.int32], extra: list[int] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Sum, un-weighted results and counts."""
        tokens, k = indices.shape
        total = np.full((tokens, self.hidden.shape[1]), np.nan, np.float32)
        outputs = np.full((tokens * k, self.hidden.shape[1]), np.nan, np.float32)
        counts = np.zeros(EXPERTS, np.int64)
        numbers = (ctypes.c_int32 * len(extra or []))(*(extra or []))
        layer.run(
            pool, self.hidden.ctypes.data, indices.ctypes.data, self.scales.ctypes.data, tokens, k,
            total.ctypes.data, outputs.ctypes.data, counts.ctypes.data,
            extra=ctypes.addressof(numbers), extra_count=len(numbers),
        )  # fmt: skip
        return total, outputs, counts

    def summed(self, pool: Pool, outputs: NDArray[Any]) -> NDArray[Any]:
        tokens, k = self.indices.shape
        total = np.full_like(self.hidden, np.nan)
        load().pllm_weighted_sum(
            pool.handle, self.choice.number, WEIGHT_DTYPES[self.dtype], outputs.ctypes.data, self.scales.ctypes.data,
            tokens, k, self.hidden.shape[1], total.ctypes.data,
        )  # fmt: skip
        return total


CASES = [(1, 2, 96, 64), (1, 6, 70, 51), (5, 3, 33, 40), (40, 2, 96, 64), (300, 4, 130, 70)]


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("name", available())
def test_results_of_several_nodes_add_up_to_the_same_bits(name: str, dtype: str, pool: Pool) -> None:
    """Each expert's routes are run in one call, by whoever has it; few of them beside many on another node."""
    for tokens, k, hidden, ffn in CASES:
        case = Case(tokens, k, hidden, ffn, dtype, name)
        total, outputs, _ = case.run(pool, case.layer(), case.indices)
        gathered = np.full_like(outputs, np.nan)
        for held in ([0, 4], [1], [2, 3, 5]):
            mine = np.where(np.isin(case.indices, held), case.indices, np.int32(-1)).astype(np.int32)
            _, part, counts = case.run(pool, case.layer(held), mine)
            rows = mine.reshape(-1) >= 0
            gathered[rows] = part[rows]
            assert (part[~rows] == 0).all()
            assert counts.sum() == rows.sum()
        assert (gathered == outputs).all()
        assert (case.summed(pool, gathered) == total).all()


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("name", available())
def test_experts_run_for_nothing_change_nothing(name: str, dtype: str, pool: Pool) -> None:
    for tokens, k, hidden, ffn in [*CASES, (16, 1, 64, 40)]:
        case = Case(tokens, k, hidden, ffn, dtype, name)
        layer = case.layer()
        # Sixteen routes are few: a seventeenth would make the expert's rows many, which are added up in another order.
        indices = np.where(case.indices % 2, np.int32(-1), case.indices).astype(np.int32)
        if k == 1:
            indices[:] = 2
        total, outputs, counts = case.run(pool, layer, indices)
        for extra in ([1, 3], [3, 0, 1, 2, 5, 4], [5, 5, 5], [2]):
            again = case.run(pool, layer, indices, extra)
            assert (again[0] == total).all() and (again[1] == outputs).all() and (again[2] == counts).all(), extra


def test_experts_run_for_nothing_need_a_token(pool: Pool) -> None:
    case = Case(1, 2, 32, 32, "F32", "scalar")
    _, outputs, counts = case.run(pool, case.layer(), case.indices[:0], [1, 2])
    assert outputs.shape[0] == 0 and not counts.any()


@pytest.mark.skipif(sys.platform != "linux", reason="maps a file that is then shortened")
def test_an_expert_that_is_run_for_nothing_is_read(pool: Pool, tmp_path: Path) -> None:
    """Its file is gone, so reading it is noticed; without that the process would end."""
    case = Case(1, 2, 64, 1024, "F32", available()[0])
    lost = tmp_path / "weights"
    lost.write_bytes(bytes(3 * 64 * 1024 * 4))
    with lost.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    words = np.frombuffer(mapped, np.uint32).reshape(3, -1)
    gate, up, down = (
        StoredTensor("F32", row.reshape(shape))
        for row, shape in zip(words, [(1024, 64)] * 2 + [(64, 1024)], strict=True)
    )
    case.weights[5] = ExpertWeights(gate, up, down)
    layer = case.layer()
    native = load()
    native.pllm_guard_faults.restype = ctypes.c_int64
    place = native.pllm_guard_add(ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(words.nbytes))
    assert place >= 0
    os.truncate(lost, 0)
    try:
        indices = np.array([[0, -1]], np.int32)
        before = case.run(pool, layer, indices)
        assert native.pllm_guard_faults(place) == 0
        after = case.run(pool, layer, indices, [5])
        assert native.pllm_guard_faults(place) > 0
        assert (before[0] == after[0]).all()
    finally:
        native.pllm_guard_remove(place)


@pytest.mark.parametrize("wrong", [EXPERTS, 10**6, 2])
def test_an_expert_that_is_not_here_is_refused(wrong: int, pool: Pool) -> None:
    case = Case(4, 2, 32, 32, "F32", "scalar")
    layer = case.layer([0, 1, 3])
    indices = np.zeros_like(case.indices)
    case.run(pool, layer, indices)
    indices[3, 1] = wrong
    with pytest.raises(ModelError, match="out of range"):
        case.run(pool, layer, indices)
    indices[3, 1] = 0
    for extra in ([1, wrong], [-1], [0] * (EXPERTS + 1)):
        with pytest.raises(ModelError, match="out of range"):
            case.run(pool, layer, indices, extra)


def test_routes_are_counted_or_refused_as_a_whole() -> None:
    native = load()
    counts = np.zeros(4, np.int64)
    for indices, code in (([0, 3, 3, 1], 0), ([2, 4], -3), ([2, -1], -3), ([], 0)):
        routes = np.array(indices, np.int32)
        assert native.pllm_count_routes(routes.ctypes.data, len(routes), 4, counts.ctypes.data) == code
    assert counts.tolist() == [1, 1, 0, 2]
