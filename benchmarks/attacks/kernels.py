"""The C kernels: routes, shapes and weights that make no sense, in memory that ends at a page nobody may touch.

A read or a write behind the end of any array is a crash. What stays within the arrays and is undefined all the same is
found with the builds of :mod:`benchmarks.attacks.sanitizers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.attacks.campaign import Attack, Attempt, Draw, Refused
from engine.errors import ModelError
from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.models.formats.number_formats import (
    block_size,
    is_grouped,
    is_packed,
    scales_shape,
    words_dtype,
    words_shape,
)
from engine.moe.kernels.bindings import FORMATS, KernelChoice, available
from engine.moe.kernels.layers import Gate, LayerExperts, linear
from engine.moe.kernels.pool import Pool

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def at_the_edge(values: NDArray[Any]) -> NDArray[Any]:
    """A copy of ``values`` whose last byte is the last one before a page that cannot be touched."""
    pages = -(-max(1, values.nbytes) // mmap.PAGESIZE) + 1
    mapping = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapping, np.uint8)
    edge = (pages - 1) * mmap.PAGESIZE
    copy = whole[edge - values.nbytes : edge].view(values.dtype).reshape(values.shape)
    copy[...] = values
    if _libc.mprotect(whole.ctypes.data + edge, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def floats(draw: Draw, *shape: int) -> NDArray[np.float32]:
    values = np.random.default_rng(draw.getrandbits(32)).standard_normal(shape, dtype=np.float32)
    if values.size and draw.random() < 0.2:
        values.flat[draw.randrange(values.size)] = draw.choice((math.nan, math.inf, -math.inf, 3e38, 1e-45))
    return values


def words(draw: Draw, number_format: str, *shape: int) -> StoredTensor:
    """Words of a plain format, as a file could hold them: any numbers, among them some that are none."""
    generator = np.random.default_rng(draw.getrandbits(32))
    dtype = words_dtype(number_format)
    if draw.random() < 0.5:
        return StoredTensor(number_format, at_the_edge(generator.integers(0, 1 << 8 * dtype.itemsize, shape, dtype)))
    values = floats(draw, *shape)
    if number_format == "F32":
        return StoredTensor(number_format, at_the_edge(values.view(np.uint32)))
    if number_format == "F16":
        with np.errstate(over="ignore"):
            return StoredTensor(number_format, at_the_edge(values.astype(np.float16).view(np.uint16)))
    return StoredTensor(number_format, at_the_edge((values.view(np.uint32) >> 16).astype(dtype)))


def stored(draw: Draw, number_format: str, rows: int, columns: int) -> StoredTensor:
    """A matrix of any format that the kernels read, with any codes and scales."""
    if not is_packed(number_format):
        return words(draw, number_format, rows, columns)
    shape = words_shape(number_format, (rows, columns))
    codes = at_the_edge(np.random.default_rng(draw.getrandbits(32)).integers(0, 256, shape, np.uint8))
    if not is_grouped(number_format):
        return StoredTensor(number_format, codes)
    if number_format == "BLOCK_FP8":
        scales = scales_shape((rows, columns)) if draw.random() < 0.95 else (1, 1)
        return StoredTensor(number_format, codes, words(draw, draw.choice(("F32", "BF16", "F16")), *scales))
    if number_format == "OCP_MXFP4":
        return StoredTensor(number_format, codes, words(draw, "U8", rows, columns // 32))
    group = draw.choice([size for size in (32, 64, 128) if columns % size == 0])
    kind = draw.choice(("F32", "BF16", "F16"))
    return StoredTensor(
        number_format, codes, *(words(draw, kind, rows, columns // group) for _ in ("scales", "biases"))
    )


def unit(*formats: str) -> int:
    """Numbers that are whole blocks in all ``formats``."""
    return max(block_size(each)[0] for each in formats)


@contextlib.contextmanager
def experts(home: Path) -> Iterator[Attempt]:
    """Calls of a layer's experts with routes to experts that are none, are absent, or are somebody else's."""
    pool = Pool(2)
    sets = [name for name in available() if name != "none"]

    def attempt(draw: Draw) -> None:
        count = draw.randint(1, 5)
        number_format = draw.choice(tuple(FORMATS))
        gate, up, down = (number_format if draw.random() < 0.8 else draw.choice(tuple(FORMATS)) for _ in range(3))
        hidden, ffn = (unit(gate, up, down) * (1 if unit(gate, up, down) > 1 else draw.randint(1, 70)) for _ in "hf")
        hidden *= draw.randint(1, 3)
        tokens, k = draw.choice((0, 1, 2, 5, 16, 17, 40)), draw.randint(1, 4)
        try:
            weights = {
                number: ExpertWeights(
                    gate=stored(draw, gate, ffn, hidden),
                    up=stored(draw, up, ffn if draw.random() < 0.95 else ffn + 1, hidden),
                    down=stored(draw, down, hidden, ffn),
                )
                for number in range(count)
                if number == 0 or draw.random() < 0.8
            }
            layer = LayerExperts(weights, count, Gate("silu"), KernelChoice(draw.choice(sets), ""))
            highest = count if draw.random() < 0.8 else draw.choice((count + 1, 2**31 - 1))
            routes = [draw.randrange(-1, highest) if draw.random() < 0.95 else -(2**31) for _ in range(tokens * k)]
            indices = at_the_edge(np.array(routes, np.int32).reshape(tokens, k))
            rows, scales = at_the_edge(floats(draw, tokens, hidden)), at_the_edge(floats(draw, tokens, k))
            total = at_the_edge(np.zeros((tokens, hidden), np.float32))
            outputs = at_the_edge(np.zeros((tokens * k, hidden), np.float32))
            counts = at_the_edge(np.zeros(count, np.int64))
            layer.run(
                pool,
                rows.ctypes.data,
                indices.ctypes.data,
                scales.ctypes.data,
                tokens,
                k,
                total.ctypes.data,
                outputs.ctypes.data,
                counts.ctypes.data,
                scale_input=draw.random() < 0.3,
                reads=draw.random() < 0.5,
            )
        except ModelError as error:
            raise Refused from error

    yield attempt
    pool.close()


@contextlib.contextmanager
def products(home: Path) -> Iterator[Attempt]:
    pool = Pool(2)
    sets = [name for name in available() if name != "none"]

    def attempt(draw: Draw) -> None:
        number_format = draw.choice(tuple(FORMATS))
        out, rows = draw.randint(1, 130), draw.choice((1, 2, 7, 16, 33))
        columns = unit(number_format) * draw.randint(1, 4 if unit(number_format) > 1 else 130)
        weight = stored(draw, number_format, out, columns)
        given = at_the_edge(floats(draw, rows, columns if draw.random() < 0.9 else columns + 1))
        try:
            linear(pool, KernelChoice(draw.choice(sets), ""), weight, None, given)
        except ModelError as error:
            raise Refused from error

    yield attempt
    pool.close()


ATTACKS = [
    Attack("calls of the expert kernels", 30_000, experts),
    Attack("products of matrices by the kernels", 20_000, products),
]
