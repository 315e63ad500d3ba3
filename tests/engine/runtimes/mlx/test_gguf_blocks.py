"""GGUF's blocks for mlx's kernels: every number as the gguf package unpacks it, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
from numpy.typing import NDArray

from benchmarks.packed_blocks import random_blocks
from benchmarks.packed_blocks import unpacked as true_values
from engine.models.formats.model_files import Change, StoredTensor
from engine.models.formats.number_formats import BLOCKS, MLX_BITS, in_mlx
from engine.runtimes.mlx.gguf_blocks import QuantisedArrays, laid_out, unpacked

ROWS, COLUMNS = 6, 512


def _numbers(found: QuantisedArrays) -> NDArray[np.float32]:
    groups = found.groups
    numbers = mx.dequantize(
        found.weight, found.scales, found.biases, group_size=groups.size, bits=groups.bits, mode=groups.mode
    )
    return np.array(numbers.astype(mx.float32))


def _true(tensor: StoredTensor) -> NDArray[np.float32]:
    return true_values(tensor.dtype, tensor.words)


def _stored(number_format: str, rows: int = ROWS) -> StoredTensor:
    return StoredTensor(number_format, random_blocks(number_format, rows, COLUMNS))


@pytest.mark.parametrize("number_format", MLX_BITS)
def test_a_laid_out_format_stands_for_the_same_numbers(number_format: str) -> None:
    tensor = _stored(number_format)
    found = laid_out(tensor, mx.float32)
    assert found is not None
    np.testing.assert_array_equal(_numbers(found), _true(tensor))
    assert len(np.unique(_true(tensor))) > 12, "numbers that are alike would prove nothing"
    assert _true(tensor).shape == (ROWS, COLUMNS)


@pytest.mark.parametrize("number_format", MLX_BITS)
def test_a_laid_out_format_multiplies_and_takes_the_memory_that_is_planned(number_format: str) -> None:
    tensor = _stored(number_format)
    found = laid_out(tensor, mx.float32)
    assert found is not None
    inputs = np.random.default_rng(1).standard_normal((3, COLUMNS)).astype(np.float32)
    groups = found.groups
    product = mx.quantized_matmul(
        mx.array(inputs),
        found.weight,
        found.scales,
        found.biases,
        group_size=groups.size,
        bits=groups.bits,
        mode=groups.mode,
    )
    exact = inputs.astype(np.float64) @ _true(tensor).T.astype(np.float64)
    assert np.abs(np.array(product) - exact).max() < 1e-4 * np.abs(exact).max()
    for dtype in (mx.float32, mx.bfloat16):
        arrays = laid_out(tensor, dtype)
        assert arrays is not None
        codes, numbers = in_mlx(number_format, ROWS * COLUMNS)
        assert sum(array.nbytes for array in arrays.named.values()) == codes + numbers * dtype.size


@pytest.mark.parametrize("number_format", MLX_BITS)
def test_in_bfloat16_only_scales_and_biases_are_rounded(number_format: str) -> None:
    tensor = _stored(number_format)
    exact, rounded = laid_out(tensor, mx.float32), laid_out(tensor, mx.bfloat16)
    assert exact is not None and rounded is not None
    np.testing.assert_array_equal(np.array(rounded.weight), np.array(exact.weight))
    most = np.abs(_true(tensor)).reshape(ROWS, -1, 32).max(axis=-1, keepdims=True)
    errors = np.abs(_numbers(rounded) - _true(tensor)).reshape(ROWS, -1, 32)
    # A scale, a bias and their sum are rounded to eight bits each; the bias is at most twice the largest number.
    assert (errors <= 4 * 2.0**-8 * most).all()


@pytest.mark.parametrize("number_format", ["Q4_0", "Q5_K", "Q6_K"])
def test_rows_and_whole_groups_of_columns_are_brought_into_order(number_format: str) -> None:
    tensor = _stored(number_format)
    rows = np.random.default_rng(2).permutation(ROWS)
    groups = np.random.default_rng(3).permutation(COLUMNS // 32)
    change = Change(rows=rows, columns=(groups[:, None] * 32 + np.arange(32)).reshape(-1))
    expected = _true(tensor)[rows][:, change.columns]
    np.testing.assert_array_equal(np.array(unpacked(tensor, mx.float32, change)), expected)
    found = laid_out(tensor, mx.float32, change)
    if number_format in MLX_BITS:
        assert found is not None
        np.testing.assert_array_equal(_numbers(found), expected)
    else:
        assert found is None


@pytest.mark.parametrize(
    "change",
    [
        Change(columns=np.roll(np.arange(COLUMNS), 16)),
        Change(columns=np.arange(COLUMNS)[::-1].copy()),
        Change(subtracted=1.0),
        Change(log_of=-1),
    ],
)
def test_what_would_need_another_rounding_is_not_laid_out(change: Change) -> None:
    assert laid_out(_stored("Q8_0"), mx.float32, change) is None


@pytest.mark.parametrize("number_format", BLOCKS)
def test_every_format_is_unpacked_in_pieces(number_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtimes.mlx.gguf_blocks._UNPACKED_AT_ONCE", 4 * COLUMNS)
    tensor = _stored(number_format)
    np.testing.assert_array_equal(np.array(unpacked(tensor, mx.float32)), _true(tensor))
