"""The kernels on packed weights, compared with gguf's own values, on every instruction set of this CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.packed_blocks import block_of, random_blocks, unpacked
from engine.models.formats.number_formats import BLOCKS
from engine.moe.kernels import bindings
from engine.moe.kernels.bindings import FORMATS, SETS, CActivation, Expert, Layer, Matrix
from engine.moe.kernels.pool import Pool
from tests.engine.moe.kernels.kernel_oracle import GAUSSIAN, assert_read_alike, error, product
from tests.support.pairwise import pairwise


def multiplies_panels_of_bytes(instructions: str) -> bool:
    """Sets that do round many rows to eight bits; others do not round them."""
    words, x = random_blocks("Q4_0", 32, 256), np.random.default_rng(0).standard_normal((17, 256)).astype(np.float32)
    pool, weight = Pool(1), Matrix(words.ctypes.data, 32, 256, 256, FORMATS["Q4_0"], 0)
    try:
        return error(product(pool, instructions, weight, x), x @ unpacked("Q4_0", words).astype(np.float64).T) > 1e-4
    finally:
        pool.close()


AVAILABLE = bindings.available()
BYTE_PANELS = tuple(filter(multiplies_panels_of_bytes, AVAILABLE))
"""Sets that multiply many rows as bytes, in panels, on this CPU."""

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the native kernels were not built")


def matrix(name: str, words: NDArray[np.uint8]) -> Matrix:
    values, nbytes = block_of(name)
    rows, columns = words.shape[0], words.shape[1] // nbytes * values
    stride = words.strides[0] // nbytes * values
    return Matrix(words.ctypes.data, rows, columns, stride, FORMATS[name], 0)


def columns_of(name: str) -> int:
    """More than a unit of 256 values, and where the format has small blocks a part of one."""
    return {256: 768, 128: 640, 64: 704}.get(block_of(name)[0], 704 + 32)


@pytest.mark.parametrize("name", BLOCKS)
@given(data=st.data())
def test_every_block_is_unpacked_to_the_bit(name: str, data: st.DataObject) -> None:
    """Any bytes are a block: scales that are zero, subnormal, infinite or no number included."""
    values, nbytes = block_of(name)
    words = np.frombuffer(data.draw(st.binary(min_size=3 * nbytes, max_size=3 * nbytes)), np.uint8)
    out = np.empty(3 * values, np.float32)
    bindings.load().pllm_unpack_row(FORMATS[name], words.ctypes.data, out.ctypes.data, out.size)
    wanted = unpacked(name, words.reshape(1, -1))[0]
    same = out.view(np.uint32) == wanted.view(np.uint32)
    assert (same | (np.isnan(out) & np.isnan(wanted))).all()


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254, 255])
def test_exponents_at_the_ends_of_mxfp4(exponent: int) -> None:
    words = np.full((1, 17), 0x9A, np.uint8)
    words[0, 0] = exponent
    out = np.empty(32, np.float32)
    bindings.load().pllm_unpack_row(FORMATS["MXFP4"], words.ctypes.data, out.ctypes.data, 32)
    assert (out == unpacked("MXFP4", words)[0]).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("instructions", BYTE_PANELS)
def test_many_rows_are_multiplied_as_the_same_whole_numbers(pool: Pool, instructions: str, name: str) -> None:
    """Panels of 32 rows of weights, and what is left; more columns than a panel has, and in places outliers."""
    columns = 1024 + columns_of(name)
    words = random_blocks(name, 75, columns)
    generator = np.random.default_rng(7)
    x = generator.standard_normal((27, columns)).astype(np.float32)
    x[generator.random(x.shape) < 0.005] *= 30
    alone = np.concatenate([product(pool, "scalar", matrix(name, words), x[row : row + 1]) for row in range(len(x))])
    for rows in (*range(17, 24), 27):
        found = product(pool, instructions, matrix(name, words), x[:rows])
        np.testing.assert_allclose(found, alone[:rows], rtol=0, atol=2e-6 * float(np.abs(alone).max()))


@pytest.mark.parametrize("rows", [5, 16, 75])
@pytest.mark.parametrize(("instructions", "name"), pairwise(BYTE_PANELS, tuple(BLOCKS)))
def test_tokens_that_are_read_give_the_same_beside_any_others(instructions: str, name: str, rows: int) -> None:
    """Few of them do not pass panels. Vectors and panels of rows that are whole and that are not."""
    columns = 1024 + columns_of(name)
    words = random_blocks(name, rows, columns)
    assert_read_alike(instructions, matrix(name, words), unpacked(name, words))


@pytest.mark.parametrize(("instructions", "name"), pairwise(AVAILABLE, tuple(BLOCKS)))
def test_rows_that_are_passed_in_parts_give_the_same(pool: Pool, instructions: str, name: str) -> None:
    """Several tokens' input is larger than the cache that it is kept in, and is taken in parts; one token's is not."""
    columns = 10240
    words = random_blocks(name, 19, columns)
    x = np.random.default_rng(6).standard_normal((16, columns)).astype(np.float32)
    together = product(pool, instructions, matrix(name, words), x)
    assert error(together, x @ unpacked(name, words).astype(np.float64).T) < GAUSSIAN
    for row in range(len(x)):
        assert (product(pool, instructions, matrix(name, words), x[row : row + 1]) == together[row]).all()


MIXED = (("Q4_K", "Q4_K", "Q6_K"), ("MXFP4", "MXFP4", "MXFP4"), ("Q8_0", "Q5_0", "Q4_1"))


@pytest.mark.parametrize(("instructions", "formats", "tokens"), pairwise(AVAILABLE, MIXED, (1, 5, 30)))
def test_experts_whose_matrices_have_formats_of_their_own(
    pool: Pool, instructions: str, formats: tuple[str, str, str], tokens: int
) -> None:
    hidden, ffn, count, k = 512, 256, 4, 2
    shapes = [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    named = list(zip(formats, shapes, strict=True))
    words = [
        [random_blocks(name, *shape, seed=10 * e + i) for i, (name, shape) in enumerate(named)] for e in range(count)
    ]
    generator = np.random.default_rng(5)
    biases = [[generator.standard_normal(rows).astype(np.float32) for rows, _ in shapes] for _ in range(count)]
    experts = [
        Expert(
            *(matrix(name, each) for name, each in zip(formats, words[e], strict=True)),
            *(bias.ctypes.data for bias in biases[e]),
        )
        for e in range(count)
    ]
    layer = Layer(
        (Expert * count)(*experts), count, hidden, ffn, CActivation(0, 0, 0, 0), SETS[instructions],
        *(FORMATS[name] for name in formats),
    )  # fmt: skip
    x = generator.standard_normal((tokens, hidden)).astype(np.float32) / 8
    routes = np.array([generator.permutation(count)[:k] for _ in range(tokens)], np.int32)
    shares = generator.random((tokens, k)).astype(np.float32)
    found = np.full((tokens, hidden), np.nan, np.float32)
    code = bindings.load().pllm_experts(
        pool.handle, ctypes.addressof(layer), x.ctypes.data, routes.ctypes.data, shares.ctypes.data, tokens, k, 0, 0,
        found.ctypes.data, None, None, None, 0,
    )  # fmt: skip
    assert code == 0
    results = []
    for e in range(count):
        gate, up, down = (unpacked(name, each).astype(np.float64) for name, each in zip(formats, words[e], strict=True))
        g, u = x @ gate.T + biases[e][0], x @ up.T + biases[e][1]
        results.append((g / (1 + np.exp(-g)) * u) @ down.T + biases[e][2])
    wanted = sum(shares[:, i, None] * np.stack(results)[routes[:, i], range(tokens)] for i in range(k))
    assert error(found, np.asarray(wanted)) < 2 * GAUSSIAN  # inputs are rounded twice


@pytest.mark.parametrize("name", BLOCKS)
def test_random_weights_are_around_zero(name: str) -> None:
    """Otherwise the layers of a benchmark's model make all tokens alike, and they use the same experts."""
    values = unpacked(name, random_blocks(name, 512, 1024))
    assert abs(values.mean()) < 0.005 * values.std()
