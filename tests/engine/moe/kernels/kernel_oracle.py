"""Experts in float64, and the weights and routes that the kernels are tried on."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.formats.model_files import ExpertWeights, StoredTensor
from engine.moe.kernels import bindings
from engine.moe.kernels.bindings import Matrix
from engine.moe.kernels.layers import Gate
from engine.moe.kernels.pool import Pool

Wide = NDArray[np.float64]
GAUSSIAN, OUTLIERS = 0.008, 0.013
"""Largest root mean square of the error, as a share of the result's, for inputs that are normal, and with some that
are thirty times as large."""


class CInput(ctypes.Structure):
    """``pllm_input``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("set", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("few", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[Any]) -> Wide:
    """As the AVX512_BF16 kernels see activations."""
    return from_bf16(to_bf16(values)).astype(np.float64)


def _words(values: NDArray[Any], dtype: str) -> NDArray[np.uint16] | NDArray[np.uint32]:
    if dtype == "BF16":
        return to_bf16(values)
    if dtype == "F16":
        return np.ascontiguousarray(values, dtype=np.float16).view(np.uint16)
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def stored(values: NDArray[Any], dtype: str, skew: int = 0, gap: int = 0) -> StoredTensor:
    """``values`` in memory, ``skew`` elements off a multiple of 64 bytes, with ``gap`` elements between rows."""
    words = _words(values, dtype)
    rows, width = (1, words.shape[0]) if words.ndim == 1 else words.shape
    memory = np.full(rows * (width + gap) + 64 + skew, 0xFFFFFFFF >> (32 - 8 * words.itemsize), dtype=words.dtype)
    start = -memory.ctypes.data % 64 // words.itemsize + skew
    view = memory[start : start + rows * (width + gap)].reshape(rows, width + gap)[:, :width]
    view[:] = words.reshape(rows, width)
    return StoredTensor(dtype, view[0] if words.ndim == 1 else view)


def wide(tensor: StoredTensor) -> Wide:
    words = np.ascontiguousarray(tensor.words)
    if tensor.dtype == "BF16":
        return from_bf16(words).astype(np.float64)
    return words.view(np.float16 if tensor.dtype == "F16" else np.float32).astype(np.float64)


def before_a_hole(words: NDArray[Any]) -> NDArray[Any]:
    """A copy that ends where the memory does: the page after it cannot be read."""
    held = -(-words.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, held + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    no_access = 0
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + held), mmap.PAGESIZE, no_access) == 0
    copy = np.frombuffer(memory, words.dtype, words.size, held - words.nbytes).reshape(words.shape)
    copy[:] = words
    return copy


def expert(
    generator: np.random.Generator, hidden: int, ffn: int, dtype: str, biases: bool, skew: int = 0, gap: int = 0
) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> StoredTensor:
        return stored(generator.standard_normal((rows, columns)) / np.sqrt(columns), dtype, skew, gap)

    def bias(size: int) -> StoredTensor | None:
        return stored(generator.standard_normal(size), dtype, skew) if biases else None

    return ExpertWeights(
        gate=matrix(ffn, hidden),
        up=matrix(ffn, hidden),
        down=matrix(hidden, ffn),
        gate_bias=bias(ffn),
        up_bias=bias(ffn),
        down_bias=bias(hidden),
    )


def activated(gate: Gate, g: Wide, u: Wide) -> Wide:
    with np.errstate(over="ignore"):  # exp of something large: the sigmoid is 0
        return _activated(gate, g, u)


def _activated(gate: Gate, g: Wide, u: Wide) -> Wide:
    if gate.kind == "silu":
        return g / (1 + np.exp(-g)) * u
    if gate.kind == "gelu":
        return np.asarray(0.5 * g * np.vectorize(math.erfc, otypes=[float])(-g / np.sqrt(2)) * u)
    if gate.kind == "gelu_tanh":
        return np.asarray(0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u)
    if gate.kind == "relu":
        return np.maximum(g, 0) * u
    if gate.kind == "clamped_silu":
        return np.minimum(g / (1 + np.exp(-g)), gate.limit) * np.clip(u, -gate.limit, gate.limit)
    if gate.kind == "xielu":
        below = (np.expm1(np.minimum(g, gate.epsilon)) - g) * gate.limit
        return np.where(g >= 0, gate.alpha * g * g, below) + gate.beta * g
    g, u = np.minimum(g, gate.limit), np.clip(u, -gate.limit, gate.limit)
    return np.asarray((u + gate.beta) * g / (1 + np.exp(-gate.alpha * g)))


def outputs(
    weights: dict[int, ExpertWeights],
    gate: Gate,
    hidden: NDArray[np.float32],
    indices: NDArray[np.int32],
    scales: NDArray[np.float32] | None,
    rounds: bool,
) -> Wide:
    """Each route's result [tokens, k, hidden]; ``scales`` multiply the inputs; ``rounds``: activations to bfloat16."""
    tokens, k = indices.shape
    out = np.zeros((tokens, k, hidden.shape[1]))
    seen = rounded if rounds else (lambda values: np.asarray(values, dtype=np.float64))
    for number, one in weights.items():
        rows, places = np.nonzero(indices == number)
        if not len(rows):
            continue
        given = hidden[rows] if scales is None else hidden[rows] * scales[rows, places, None]
        x = seen(given)
        g, u = x @ wide(one.gate).T, x @ wide(one.up).T
        if one.gate_bias is not None and one.up_bias is not None:
            g, u = g + wide(one.gate_bias), u + wide(one.up_bias)
        y = seen(activated(gate, g, u)) @ wide(one.down).T
        out[rows, places] = y if one.down_bias is None else y + wide(one.down_bias)
    return out


def product(pool: Pool, instructions: str, weight: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the kernels of a set make of ``weight`` and the rows of ``x`` [tokens, columns]."""
    out = np.full((len(x), weight.rows), np.nan, np.float32)
    code = bindings.load().pllm_linear(
        pool.handle, bindings.SETS[instructions], ctypes.addressof(weight), None, x.ctypes.data, x.shape[1], len(x),
        out.ctypes.data, weight.rows,
    )  # fmt: skip
    assert code == 0
    return out


def read(
    instructions: str, weight: Matrix, x: NDArray[np.float32], before: NDArray[np.float32], threads: int
) -> NDArray[np.float32]:
    """``before`` [tokens, rows] and what is added to it of ``x`` [tokens, columns], as rows of tokens that are read, by
    ``threads`` one after another. Their input lies where something else did before."""
    library, tokens, columns = bindings.load(), ctypes.c_int64(len(x)), ctypes.c_int64(x.shape[1])
    memory = np.full(8 * (len(x) + 12) * (x.shape[1] + 320) + (1 << 20), 0xFF, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    data, scratch = ctypes.c_void_p(start + (1 << 19)), ctypes.c_void_p(start)
    described, out = CInput(), before[: len(x)].copy()
    input_, set_ = ctypes.byref(described), bindings.SETS[instructions]
    library.pllm_input_describe(input_, set_, weight.dtype, data, tokens, columns, 1)
    for thread in range(threads):
        library.pllm_input_fill_part(input_, ctypes.c_void_p(x.ctypes.data), columns, thread, threads)
    for thread in range(threads):
        library.pllm_linear_part(
            input_, ctypes.byref(weight), None, ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(weight.rows), 1,
            scratch, thread, threads,
        )  # fmt: skip
    return out


def assert_read_alike(instructions: str, weight: Matrix, values: NDArray[np.float32]) -> None:
    """Tokens that are read give the same bits beside any number of others, with any number of threads: products with
    ``values`` [rows, columns], which ``weight`` stands for."""
    generator = np.random.default_rng(8)
    x = generator.standard_normal((33, weight.columns)).astype(np.float32)
    x[generator.random(x.shape) < 0.005] *= 30
    before = generator.standard_normal((len(x), weight.rows)).astype(np.float32)
    together = read(instructions, weight, x, before, threads=1)
    assert error(together - before, x @ values.astype(np.float64).T) < OUTLIERS
    for tokens in (*range(1, 20), 33):
        for threads in (1, 3):
            assert (read(instructions, weight, x[:tokens], before, threads) == together[:tokens]).all()


def error(found: NDArray[np.float32], wanted: Wide) -> float:
    """Root mean square of the error, as a share of the result's."""
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


def opened(weight: Matrix, row: int) -> NDArray[np.float32]:
    """A row of ``weight`` as the kernels unpack it."""
    out = np.empty(weight.columns, np.float32)
    bindings.load().pllm_open_row(ctypes.addressof(weight), row, out.ctypes.data)
    return out
