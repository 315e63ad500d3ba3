"""Experts whose gate, up and down are read by different kernels, compared with what their weights stand for, on every
instruction set of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.packed_blocks import random_blocks
from engine.errors import ModelError
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import BLOCKS, is_packed
from engine.moe.kernels import bindings
from engine.moe.kernels.bindings import KernelChoice
from engine.moe.kernels.layers import Gate, LayerExperts, unsupported_reason
from engine.moe.kernels.pool import Pool
from engine.runtimes.torch.offload.torch_tensors import numbers
from tests.engine.moe.kernels.kernel_oracle import stored
from tests.support.pairwise import pairwise

AVAILABLE = bindings.available()
FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q6_K", "AFFINE4", "BLOCK_FP8")
HIDDEN, FFN, COUNT = 512, 256, 3
GAUSSIAN, HALF = 0.016, 0.006
"""Largest root mean square of the error, as a share of the result's, where inputs are rounded to eight bits twice, or
to bfloat16."""
Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the native kernels were not built")


def weight(name: str, rows: int, columns: int, seed: int) -> StoredTensor:
    """Random weights in the number format ``name``."""
    generator = np.random.default_rng(seed)
    if name in BLOCKS:
        return StoredTensor(name, random_blocks(name, rows, columns, seed=seed))
    if name == "AFFINE4":
        scales = generator.random((rows, columns // 64), np.float32) * 0.02 + 0.01
        codes = generator.integers(0, 256, (rows, columns // 2), np.uint8)
        return StoredTensor(name, codes, stored(scales, "F32"), stored(-8 * scales, "F32"))
    if name == "BLOCK_FP8":
        codes = generator.integers(0, 256, (rows, columns), np.uint8) & np.uint8(0xBF)
        return StoredTensor(name, codes, stored(np.full((rows // 128, columns // 128), 0.05), "F32"))
    return stored(generator.standard_normal((rows, columns)) / np.sqrt(columns), name)


def expert(formats: tuple[str, str, str], seed: int) -> ExpertWeights:
    shapes = ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    return ExpertWeights(
        *(weight(name, *shape, 10 * seed + i) for i, (name, shape) in enumerate(zip(formats, shapes, strict=True)))
    )


def run(
    pool: Pool, instructions: str, experts: list[ExpertWeights], x: Floats, shares: Floats, scale_input: bool = False
) -> Floats:
    """All ``experts`` on all rows of ``x`` [tokens, hidden], by the shares [tokens, experts]."""
    layer = LayerExperts(
        dict(enumerate(experts)), len(experts), Gate("silu"), KernelChoice(instructions, "as the test says")
    )
    routes = np.tile(np.arange(len(experts), dtype=np.int32), (len(x), 1))
    summed = np.full_like(x, np.nan)
    layer.run(
        pool, x.ctypes.data, routes.ctypes.data, shares.ctypes.data, len(x), len(experts), summed.ctypes.data,
        scale_input=scale_input,
    )  # fmt: skip
    return summed


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("instructions", "gate", "up", "down", "tokens", "scale_input"),
    pairwise(AVAILABLE, FORMATS, FORMATS, FORMATS, (1, 12, 40), (False, True)),
)
def test_a_format_belongs_to_a_matrix(
    pool: Pool, instructions: str, gate: str, up: str, down: str, tokens: int, scale_input: bool
) -> None:
    """An expert has one route, more few routes than registers hold at a time, or many."""
    experts = [expert((gate, up, down), seed) for seed in range(COUNT)]
    assert {unsupported_reason(each) for each in experts} == {None}
    generator = np.random.default_rng(5)
    x = generator.standard_normal((tokens, HIDDEN)).astype(np.float32) / 8
    shares = generator.random((tokens, COUNT)).astype(np.float32)
    found = run(pool, instructions, experts, x, shares, scale_input)
    wanted = np.zeros((tokens, HIDDEN))
    for number, each in enumerate(experts):
        wide = [numbers(part, torch.float32).numpy().astype(np.float64) for part in (each.gate, each.up, each.down)]
        share = shares[:, number, None].astype(np.float64)
        rows = x * share if scale_input else x
        g = rows @ wide[0].T
        out = (g / (1 + np.exp(-g)) * (rows @ wide[1].T)) @ wide[2].T
        wanted += out if scale_input else out * share
    rounded = any(is_packed(name) and name != "BLOCK_FP8" for name in (gate, up, down))
    limit = GAUSSIAN if rounded else HALF if instructions == "avx512_bf16" else 1e-5
    assert np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()) < limit


@pytest.mark.parametrize("formats", [("Q4_0", "F16", "F32"), ("BF16", "AFFINE4", "Q6_K"), ("BLOCK_FP8", "F16", "BF16")])
@pytest.mark.parametrize("instructions", AVAILABLE)
def test_rows_do_not_depend_on_threads_or_on_each_other(instructions: str, formats: tuple[str, str, str]) -> None:
    experts = [expert(formats, seed) for seed in range(COUNT)]
    generator = np.random.default_rng(7)
    x = generator.standard_normal((16, HIDDEN)).astype(np.float32)
    shares = generator.random((16, COUNT)).astype(np.float32)
    results = []
    for threads in (1, 3):
        pool = Pool(threads)
        results.append(run(pool, instructions, experts, x, shares))
        results.append(
            np.concatenate([run(pool, instructions, experts, x[i : i + 1], shares[i : i + 1]) for i in range(16)])
        )
        pool.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results)


def test_experts_of_a_layer_are_read_by_the_same_kernels() -> None:
    experts = {0: expert(("Q4_0", "F16", "F32"), 0), 1: expert(("Q6_K", "F16", "Q4_0"), 1)}
    with pytest.raises(ModelError, match="Expert 1"):
        LayerExperts(experts, 2, Gate("silu"), KernelChoice(AVAILABLE[0], "as the test says"))
    experts[1] = expert(("Q6_K", "F16", "F32"), 1)
    assert LayerExperts(experts, 2, Gate("silu"), KernelChoice(AVAILABLE[0], "as the test says")).held == 2
