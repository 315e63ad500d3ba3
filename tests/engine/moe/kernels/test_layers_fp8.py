"""The kernels on FP8 weights with a scale for each block of 128 by 128, compared with torch's numbers, on every
instruction set of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import scales_shape
from engine.moe.kernels import bindings
from engine.moe.kernels.bindings import KernelChoice
from engine.moe.kernels.layers import Gate, LayerExperts, kernel_kind, matrix, unsupported_reason
from engine.moe.kernels.pool import Pool
from engine.runtimes.torch.offload.torch_tensors import unpacked
from tests.engine.moe.kernels.kernel_oracle import error, opened, product
from tests.support.pairwise import pairwise

AVAILABLE = bindings.available()
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the native kernels were not built")


def error_of(instructions: str) -> float:
    """Largest root mean square of the error, as a share of the result's: inputs are rounded to bfloat16 or not."""
    return 0.003 if instructions == "avx512_bf16" else 1e-6


def stored(codes: NDArray[np.uint8], scales: torch.Tensor) -> StoredTensor:
    name = next(name for name, dtype in SCALES.items() if dtype == scales.dtype)
    words = scales.view(torch.int32 if name == "F32" else torch.int16).numpy()
    return StoredTensor("BLOCK_FP8", codes, StoredTensor(name, words.view(np.uint32 if name == "F32" else np.uint16)))


def wide(weight: StoredTensor, scales: torch.Tensor) -> Floats:
    """What ``weight`` stands for: its numbers, as torch reads them, times the scale of their block."""
    rows, columns = weight.shape
    numbers = torch.from_numpy(weight.words).view(torch.float8_e4m3fn).float()
    spread = scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (numbers * spread).numpy()


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("whole", [False, True])
def test_scales_may_belong_to_rows_or_to_the_whole(pool: Pool, instructions: str, scales: str, whole: bool) -> None:
    for rows, columns in ((203, 904), (300, 2432), (31, 77)):
        codes = weights(rows, columns)[0].words
        generator = torch.Generator().manual_seed(1)
        size = (torch.rand(1 if whole else rows, 1, generator=generator) * 0.02 + 0.001).to(SCALES[scales])
        weight = stored(codes, size)
        values = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * size.float()).numpy()
        assert (unpacked(weight, torch.float32).numpy() == values).all()
        assert (np.stack([opened(matrix(weight), row) for row in range(rows)]) == values).all()
        for tokens in (1, 3, 9, 16, 17, 40):
            x = np.random.default_rng(tokens).standard_normal((tokens, columns)).astype(np.float32)
            found = product(pool, instructions, matrix(weight), x)
            limit = max(error_of(instructions), 3e-6 if tokens > 16 else 0)
            assert error(found, x @ values.astype(np.float64).T) < limit


def weights(rows: int, columns: int, scales: str = "F32", seed: int = 0) -> tuple[StoredTensor, Floats]:
    """Random weights, and what they stand for."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator) * 40
    numbers[::7] *= 2.0**-10  # subnormal ones, too
    codes = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    size = (torch.rand(scales_shape((rows, columns)), generator=generator) * 0.02 + 0.001).to(SCALES[scales])
    return (weight := stored(codes, size)), wide(weight, size)


def test_every_number_with_any_scale_is_torchs_to_the_bit() -> None:
    """Zero, subnormal and infinite scales and such as are no numbers, too."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (5 * 128 + 3, 1))
    scales = torch.tensor([0.0, 1.0, 2.0**-140, float("inf"), float("nan"), -3.7e37]).repeat(2, 1).T.contiguous()
    weight = stored(codes, scales)
    wanted = wide(weight, scales)
    found = np.stack([opened(matrix(weight), row) for row in range(0, len(codes), 64)])
    assert np.array_equal(found, wanted[::64], equal_nan=True)
    assert (np.signbit(found) == np.signbit(wanted[::64]))[~np.isnan(found)].all()
    assert np.array_equal(unpacked(weight, torch.float32).numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("instructions", AVAILABLE)
def test_every_number_is_multiplied_as_it_is(pool: Pool, instructions: str) -> None:
    """Each by one, alone in its row: few rows, and the panels of many."""
    codes = np.zeros((256, 256), np.uint8)
    codes[np.arange(256), np.arange(256)[::-1]] = np.arange(256)
    scales = torch.tensor([[0.5, 2.0], [4.0, 1.0]])
    weight = stored(codes, scales)
    wanted = np.nansum(wide(weight, scales), axis=1)
    none = [0x7F, 0xFF]
    for rows in (1, 3, 40):
        found = product(pool, instructions, matrix(weight), np.ones((rows, 256), np.float32))
        assert np.isnan(found[:, none]).all()
        assert (np.delete(found, none, axis=1) == np.delete(wanted, none)).all()


@pytest.mark.parametrize(("instructions", "tokens"), pairwise(AVAILABLE, (1, 5, 50)))
def test_experts_are_the_sum_of_their_products(pool: Pool, instructions: str, tokens: int) -> None:
    hidden, ffn, count, k = 320, 200, 3, 2
    generator = np.random.default_rng(5)
    each = [[weights(*size, seed=10 * e + i) for i, size in enumerate(((ffn, hidden), (ffn, hidden), (hidden, ffn)))]
            for e in range(count)]  # fmt: skip
    found = {number: ExpertWeights(*(weight for weight, _ in parts)) for number, parts in enumerate(each)}
    layer = LayerExperts(found, count, Gate("silu"), KernelChoice(instructions, "as the test says"))
    x = generator.standard_normal((tokens, hidden)).astype(np.float32) / 8
    routes = np.array([generator.permutation(count)[:k] for _ in range(tokens)], np.int32)
    shares = generator.random((tokens, k)).astype(np.float32)
    summed = np.full((tokens, hidden), np.nan, np.float32)
    layer.run(pool, x.ctypes.data, routes.ctypes.data, shares.ctypes.data, tokens, k, summed.ctypes.data)
    results = []
    for (_, gate), (_, up), (_, down) in each:
        g, u = x @ gate.astype(np.float64).T, x @ up.astype(np.float64).T
        results.append((g / (1 + np.exp(-g)) * u) @ down.astype(np.float64).T)
    wanted = sum(shares[:, i, None] * np.stack(results)[routes[:, i], range(tokens)] for i in range(k))
    assert error(summed, np.asarray(wanted)) < 3 * max(error_of(instructions), 1e-6)


def test_matrices_of_an_expert_lie_in_one_piece() -> None:
    weight, _ = weights(256, 256)
    assert unsupported_reason(ExpertWeights(weight, weight, weight)) is None
    torn = StoredTensor(weight.dtype, weight.words[::2], weight.scales)
    assert "do not lie like their blocks" in (unsupported_reason(ExpertWeights(torn, torn, torn)) or "")
    assert kernel_kind("BLOCK_FP8") not in (kernel_kind("AFFINE8"), kernel_kind("BF16"), kernel_kind("Q8_0"))
