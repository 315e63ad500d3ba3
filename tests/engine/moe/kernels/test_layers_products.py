"""What the kernels promise for every format of packed or grouped numbers, on every instruction set of this CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.packed_blocks import random_blocks, unpacked
from engine.models.formats.model_files import StoredTensor
from engine.models.formats.number_formats import BLOCKS
from engine.moe.kernels import bindings
from engine.moe.kernels.layers import matrix
from engine.moe.kernels.pool import Pool
from tests.engine.moe.kernels import test_layers_fp8 as fp8
from tests.engine.moe.kernels import test_layers_grouped as grouped
from tests.engine.moe.kernels.kernel_oracle import GAUSSIAN, OUTLIERS, before_a_hole, error, opened, product
from tests.engine.moe.kernels.test_layers_packed import columns_of

AVAILABLE = bindings.available()
FEW, MANY = (16, (1, 3, 5, 7, 9, 14)), (33, (17, 30))
"""Rows of input, and fewer of them that are multiplied by the same routine."""

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the native kernels were not built")


@dataclass(frozen=True)
class Format:
    name: str
    columns: int
    weights: Callable[[int, int], tuple[StoredTensor, NDArray[np.float32]]]
    """Random weights of so many rows and columns, and what they stand for."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the products."""
    in_float: bool = False
    """Whether inputs stay floating-point numbers; else few rows of them are rounded to eight bits."""

    def __str__(self) -> str:
        return self.name

    def limit(self, instructions: str, tokens: int) -> float:
        """Largest root mean square of the error, as a share of the result's."""
        if not self.in_float:
            return GAUSSIAN
        return fp8.error_of(instructions) if tokens < 17 else max(fp8.error_of(instructions), 3e-6)


def packed(name: str) -> Format:
    def weights(rows: int, columns: int) -> tuple[StoredTensor, NDArray[np.float32]]:
        words = random_blocks(name, rows, columns)
        return StoredTensor(name, words), unpacked(name, words)

    return Format(name, columns_of(name), weights, ((203, columns_of(name)),))


PACKED = [packed(name) for name in BLOCKS]
GROUPED = [
    Format(str(kind), grouped.COLUMNS, lambda *size, kind=kind: grouped.weights(kind, *size), ((203, grouped.COLUMNS),))
    for kind in grouped.KINDS
]  # fmt: skip
SIZES_OF_FP8 = ((203, 904), (140, 130), (31, 77), (300, 2048 + 384))
"""Rows and columns that are no whole blocks."""
FP8 = [
    Format(f"FP8-{scales}", 904, lambda *size, scales=scales: fp8.weights(*size, scales), SIZES_OF_FP8, in_float=True)
    for scales in fp8.SCALES
]
BY_NAME = {known.name: known for known in (*PACKED, *GROUPED, *FP8)}
of_all_formats = pytest.mark.parametrize("form", BY_NAME.values(), ids=str)
of_every_set = pytest.mark.parametrize("instructions", AVAILABLE)


@of_all_formats
@of_every_set
def test_products_are_those_of_the_unpacked_weights(pool: Pool, instructions: str, form: Format) -> None:
    """With few rows of input and with many."""
    generator = np.random.default_rng(1)
    for rows, columns in form.sizes:
        weight, values = form.weights(rows, columns)
        wide = values.astype(np.float64).T
        for tokens in (1, 2, 3, 4, 7, 9, 16, 17, 40):
            x = generator.standard_normal((tokens, columns)).astype(np.float32)
            assert error(product(pool, instructions, matrix(weight), x), x @ wide) < form.limit(instructions, tokens)
        if not form.in_float:
            x = generator.standard_normal((16, columns)).astype(np.float32)
            x[generator.random(x.shape) < 0.005] *= 30
            assert error(product(pool, instructions, matrix(weight), x), x @ wide) < OUTLIERS


@pytest.mark.parametrize("form", [*PACKED, *GROUPED], ids=str)
def test_all_sets_add_up_the_same_whole_numbers(pool: Pool, form: Format) -> None:
    weight, _ = form.weights(37, form.columns)
    x = np.random.default_rng(2).standard_normal((5, form.columns)).astype(np.float32)
    plain = product(pool, "scalar", matrix(weight), x)
    limit = (2e-6 if form in PACKED else 3e-6) * float(np.abs(plain).max())
    for instructions in AVAILABLE:
        np.testing.assert_allclose(product(pool, instructions, matrix(weight), x), plain, rtol=0, atol=limit)


@of_all_formats
@of_every_set
def test_a_row_depends_neither_on_its_neighbours_nor_on_the_threads(
    pool: Pool, instructions: str, form: Format
) -> None:
    rows = 323 if form in FP8 else 67
    weight, _ = form.weights(rows, form.columns)
    alone = Pool(1)
    try:
        for most, fewer in (FEW, MANY):
            x = np.random.default_rng(3).standard_normal((most, form.columns)).astype(np.float32)
            whole = product(pool, instructions, matrix(weight), x)
            for count in fewer:
                given = np.ascontiguousarray(x[most - count :])
                assert (product(alone, instructions, matrix(weight), given) == whole[most - count :]).all()
    finally:
        alone.close()


@of_all_formats
@of_every_set
def test_nothing_is_read_past_the_words_scales_and_biases(pool: Pool, instructions: str, form: Format) -> None:
    """Each ends where the memory does: the page after it cannot be read."""
    rows, columns = (133, 461) if form in FP8 else (5, form.columns)
    weight, _ = form.weights(rows, columns)
    parts = (StoredTensor(part.dtype, before_a_hole(part.words)) for part in (weight.scales, weight.biases) if part)
    at_the_end = StoredTensor(weight.dtype, before_a_hole(weight.words), *parts)
    for tokens in (1, 4, 13, 20):
        x = np.random.default_rng(4).standard_normal((tokens, columns)).astype(np.float32)
        found = product(pool, instructions, matrix(at_the_end), x)
        assert (found == product(pool, instructions, matrix(weight), x)).all()
    assert (opened(matrix(at_the_end), rows - 1) == opened(matrix(weight), rows - 1)).all()


@pytest.mark.parametrize("name", ["Q4_K", "AFFINE4-64-BF16"])
@of_every_set
def test_an_input_that_is_no_number_gives_none(pool: Pool, instructions: str, name: str) -> None:
    weight, _ = BY_NAME[name].weights(8, 512)
    x = np.ones((3, 512), np.float32)
    x[0, 300], x[1, 7] = np.nan, np.inf
    found = product(pool, instructions, matrix(weight), x)
    assert np.isnan(found[:2]).all() and np.isfinite(found[2]).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("AFFINE4-32-F16", {field: value}) for field, value in (
            ("group", 0), ("group", 48), ("scales", None), ("biases", None), ("scale_dtype", 0), ("columns", 100),
        )),
        *(("FP8-F32", {field: value}) for field, value in (
            ("group", 64), ("scales", None), ("scale_dtype", 0), ("row_stride", 512), ("skipped_rows", 3),
        )),
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be_are_refused(pool: Pool, name: str, change: dict[str, int | None]) -> None:
    stored, _ = BY_NAME[name].weights(8, 256)
    weight = matrix(stored)
    for field, value in change.items():
        setattr(weight, field, value)
    x, out = np.zeros((1, 256), np.float32), np.zeros((1, 8), np.float32)
    code = bindings.load().pllm_linear(
        pool.handle, 0, ctypes.addressof(weight), None, x.ctypes.data, 256, 1, out.ctypes.data, 8
    )
    assert code == -3
