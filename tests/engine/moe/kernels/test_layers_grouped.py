"""The kernels on weights whose scales lie apart, compared with mlx's and transformers' own values, on every instruction
set of this CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import GROUPED, words_dtype
from engine.moe.kernels import bindings
from engine.moe.kernels.bindings import KernelChoice
from engine.moe.kernels.layers import Gate, LayerExperts, matrix, unsupported_reason
from engine.moe.kernels.pool import Pool
from engine.runtimes.torch.offload.torch_tensors import unpacked
from tests.engine.moe.kernels.kernel_oracle import GAUSSIAN, assert_read_alike, error, opened
from tests.support.pairwise import pairwise
from tests.support.tiny_grouped import HALVES_OF_FP4, pack

AVAILABLE = bindings.available()
Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the native kernels were not built")


FP4_KINDS = ("OCP_MXFP4", "GROUPED_NVFP4")


@dataclass(frozen=True)
class Kind:
    name: str
    group: int
    scales: str

    @property
    def bits(self) -> int:
        return 4 if self.name in FP4_KINDS else int(self.name[-1])

    def __str__(self) -> str:
        return f"{self.name}-{self.group}-{self.scales}"


KINDS = (
    Kind("AFFINE4", 32, "F16"), Kind("AFFINE4", 64, "BF16"), Kind("AFFINE4", 128, "F32"),
    Kind("AFFINE8", 32, "F32"), Kind("AFFINE8", 64, "BF16"), Kind("AFFINE8", 128, "F16"),
    Kind("OCP_MXFP4", 32, "U8"),
    Kind("AFFINE6", 64, "BF16"), Kind("AFFINE6", 32, "F16"), Kind("AFFINE6", 128, "F32"),
    Kind("AFFINE5", 64, "BF16"), Kind("AFFINE5", 128, "F16"), Kind("AFFINE5", 32, "F32"),
    Kind("AFFINE3", 64, "BF16"), Kind("AFFINE3", 32, "F16"), Kind("AFFINE3", 128, "F32"),
    Kind("AFFINE2", 128, "F16"), Kind("AFFINE2", 64, "BF16"), Kind("AFFINE2", 32, "F32"),
    Kind("GROUPED_NVFP4", 16, "U8"),
)  # fmt: skip
COLUMNS = 3 * 256 + 128
"""More than three units of 256 values, and a part of one."""


def floats(words: NDArray[np.generic], dtype: str) -> Floats:
    """Stored numbers in float32."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view({"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


def stored_as(values: Floats, dtype: str) -> StoredTensor:
    if dtype == "BF16":
        return StoredTensor(dtype, (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    return StoredTensor(dtype, values.astype({"F16": np.float16, "F32": np.float32}[dtype]).view(words_dtype(dtype)))


def weights(kind: Kind, rows: int, columns: int, seed: int = 0) -> tuple[StoredTensor, Floats]:
    """Random weights of ``kind`` [rows, columns], and what they stand for."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 1 << kind.bits, (rows, columns), np.uint8)
    words = pack(codes, kind.bits).view(np.uint8)
    groups = (rows, columns // kind.group)
    grouped = codes.reshape(*groups, kind.group)
    if kind.name == "OCP_MXFP4":
        exponents = generator.integers(118, 124, groups, np.uint8)
        scale = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127)[:, :, None].astype(np.float32)
        wide = scale * HALVES_OF_FP4[grouped]
        return StoredTensor(kind.name, words, StoredTensor("U8", exponents)), wide.reshape(rows, columns)
    if kind.name == "GROUPED_NVFP4":
        scales_of_e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num().numpy()
        table = (scales_of_e4m3 / np.float32(700) * np.float32(0.5)).reshape(1, 256)
        stored = generator.integers(0x30, 0x50, groups, np.uint8)
        wide = table[0, stored][:, :, None] * HALVES_OF_FP4[grouped].astype(np.float32)
        return StoredTensor(kind.name, words, StoredTensor("U8", stored), stored_as(table, "F32")), wide.reshape(
            rows, columns
        )
    size = generator.random(groups, np.float32) * 0.02 + 0.01
    scales = stored_as(size, kind.scales)
    middle = 2.0 ** (kind.bits - 1) + generator.standard_normal(groups, np.float32)
    biases = stored_as((-size * middle).astype(np.float32), kind.scales)
    wide = floats(scales.words, kind.scales)[:, :, None] * grouped + floats(biases.words, kind.scales)[:, :, None]
    return StoredTensor(kind.name, words, scales, biases), wide.reshape(rows, columns).astype(np.float32)


def assert_same_bits(found: Floats, wanted: Floats) -> None:
    both = np.isnan(found) & np.isnan(wanted)
    assert ((found.view(np.uint32) == wanted.view(np.uint32)) | both).all()


@pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="mlx is not installed")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name not in FP4_KINDS], ids=str)
def test_values_are_mlxs_to_the_bit(kind: Kind) -> None:
    """Any scales and biases: zero, subnormal, infinite and no numbers included. mlx computes in the scales' type, so it
    is given them in float32."""
    import mlx.core as mx

    stored, _ = weights(kind, 24, 4 * kind.group)
    assert stored.scales is not None and stored.biases is not None
    generator = np.random.default_rng(1)
    for part in (stored.scales.words, stored.biases.words):
        part[:16] = generator.integers(0, 1 << 8 * part.itemsize, part[:16].shape, part.dtype)
        part[16] = 0
        part[17] = 1
    scales, biases = (mx.array(floats(part.words, kind.scales)) for part in (stored.scales, stored.biases))
    words = mx.array(stored.words.view(np.uint32))
    wanted = np.array(mx.dequantize(words, scales, biases, group_size=kind.group, bits=kind.bits))
    assert wanted.dtype == np.float32
    with np.errstate(all="ignore"):
        for row in range(24):
            assert_same_bits(opened(matrix(stored), row), wanted[row])
    assert_same_bits(unpacked(stored, torch.float32).numpy(), wanted)


def test_values_of_mxfp4_are_transformers_to_the_bit() -> None:
    """Every code with every exponent. Zero has no sign here, as in ggml."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    exponents = np.arange(256, dtype=np.uint8).reshape(256, 1)
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    stored = StoredTensor("OCP_MXFP4", pack(codes, 4).view(np.uint8), StoredTensor("U8", exponents))
    blocks = torch.from_numpy(stored.words.copy()).reshape(1, 256, 1, 16)
    wanted = convert_moe_packed_tensors(blocks, torch.from_numpy(exponents).reshape(1, 256, 1), dtype=torch.float32)
    wide = wanted.reshape(32, 256).T.contiguous().numpy() + np.float32(0)
    for row in range(256):
        assert_same_bits(opened(matrix(stored), row), wide[row])
    assert_same_bits(unpacked(stored, torch.float32).numpy(), wide)


def test_values_of_nvfp4_are_scales_times_codes_to_the_bit() -> None:
    """Every code with every scale, in plain C and in torch."""
    scales = np.arange(256, dtype=np.uint8).reshape(128, 2)
    codes = np.tile(np.arange(16, dtype=np.uint8), (128, 2))
    table = np.random.default_rng(1).standard_normal((1, 256)).astype(np.float32)
    parts = StoredTensor("U8", scales), stored_as(table, "F32")
    stored = StoredTensor("GROUPED_NVFP4", pack(codes, 4).view(np.uint8), *parts)
    wide = (table[0, scales][:, :, None] * HALVES_OF_FP4.astype(np.float32)).reshape(128, 32)
    for row in range(128):
        assert (opened(matrix(stored), row) == wide[row]).all()
    assert (unpacked(stored, torch.float32).numpy() == wide).all()
    torn = StoredTensor(stored.dtype, stored.words, stored.scales, StoredTensor("F32", parts[1].words[:, :255]))
    assert "have no meaning" in (unsupported_reason(ExpertWeights(torn, torn, torn)) or "")


def every_second(stored: StoredTensor, first: int) -> StoredTensor:
    parts = [None if part is None else every_second(part, first) for part in (stored.scales, stored.biases)]
    if stored.dtype == "GROUPED_NVFP4":
        parts[1] = stored.biases
    return StoredTensor(stored.dtype, stored.words[first::2], *parts)


FORMATS = (
    (KINDS[1], KINDS[4]),
    (KINDS[3], KINDS[0]),
    (KINDS[6], KINDS[6]),
    (KINDS[7], KINDS[10]),
    (KINDS[13], KINDS[16]),
    (KINDS[19], KINDS[19]),
    (KINDS[19], KINDS[0]),
)


@pytest.mark.parametrize(("instructions", "kinds", "tokens"), pairwise(AVAILABLE, FORMATS, (1, 5, 50)))
def test_experts_with_alternating_rows_and_formats_of_their_own(
    pool: Pool, instructions: str, kinds: tuple[Kind, Kind], tokens: int
) -> None:
    """The rows of gate and up alternate, and so do their biases, as in gpt-oss."""
    hidden, ffn, count, k = 512, 384, 3, 2
    generator = np.random.default_rng(5)
    found: dict[int, ExpertWeights] = {}
    wide: list[tuple[Floats, Floats, Floats, Floats, Floats]] = []
    for expert in range(count):
        both, both_wide = weights(kinds[0], 2 * ffn, hidden, seed=10 * expert)
        down, down_wide = weights(kinds[1], hidden, ffn, seed=10 * expert + 1)
        bias = stored_as(generator.standard_normal(2 * ffn).astype(np.float32), "BF16")
        down_bias = stored_as(generator.standard_normal(hidden).astype(np.float32), "BF16")
        found[expert] = ExpertWeights(
            every_second(both, 0),
            every_second(both, 1),
            down,
            gate_bias=StoredTensor("BF16", bias.words[0::2]),
            up_bias=StoredTensor("BF16", bias.words[1::2]),
            down_bias=down_bias,
        )
        assert unsupported_reason(found[expert]) is None
        wide.append((both_wide, down_wide, floats(bias.words, "BF16"), floats(down_bias.words, "BF16"), down_wide))
    layer = LayerExperts(found, count, Gate("silu"), KernelChoice(instructions, "as the test says"))
    x = generator.standard_normal((tokens, hidden)).astype(np.float32) / 8
    routes = np.array([generator.permutation(count)[:k] for _ in range(tokens)], np.int32)
    shares = generator.random((tokens, k)).astype(np.float32)
    summed = np.full((tokens, hidden), np.nan, np.float32)
    layer.run(pool, x.ctypes.data, routes.ctypes.data, shares.ctypes.data, tokens, k, summed.ctypes.data)
    results = []
    for both_wide, down_wide, bias_wide, down_bias_wide, _ in wide:
        both = x @ both_wide.astype(np.float64).T + bias_wide
        g, u = both[:, 0::2], both[:, 1::2]
        results.append((g / (1 + np.exp(-g)) * u) @ down_wide.astype(np.float64).T + down_bias_wide)
    wanted = sum(shares[:, i, None] * np.stack(results)[routes[:, i], range(tokens)] for i in range(k))
    assert error(summed, np.asarray(wanted)) < 2 * GAUSSIAN  # inputs are rounded twice


@pytest.mark.parametrize(("instructions", "kind", "rows"), pairwise(AVAILABLE, KINDS, (5, 75)))
def test_tokens_that_are_read_give_the_same_beside_any_others(instructions: str, kind: Kind, rows: int) -> None:
    stored, wide = weights(kind, rows, COLUMNS + 1024)
    assert_read_alike(instructions, matrix(stored), wide)


def test_scales_lie_like_their_rows() -> None:
    grouped, _ = weights(KINDS[0], 64, 64)
    torn = StoredTensor(grouped.dtype, grouped.words[::2], grouped.scales, grouped.biases)
    assert "do not lie like their rows" in (unsupported_reason(ExpertWeights(torn, torn, torn)) or "")


def test_every_grouped_format_is_tested() -> None:
    assert {kind.name for kind in KINDS} | {"BLOCK_FP8"} == set(GROUPED)  # test_layers_fp8.py
