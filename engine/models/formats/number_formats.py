"""The number formats of stored weights, and the bytes that they take.

A plain format stores every number by itself; its name is safetensors'. A packed format stores numbers of a few bits
that share scales. In blocks, whose names and layouts are ggml's (``ggml-common.h``), the scale lies beside its numbers.
In grouped formats the codes of all numbers lie together, and the scales and biases of their groups in tensors of their
own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

WIDTHS: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per number of the plain formats."""

_BLOCKS = {
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "IQ3_S": (21, 256, 110), "IQ3_XXS": (18, 256, 98), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74),
    "IQ2_S": (22, 256, 82), "IQ1_S": (19, 256, 50), "IQ1_M": (29, 256, 56), "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18),
}  # fmt: skip
"""ggml's number of each packed format, and the numbers and bytes per block. The kernels' ``native/formats.h`` has the
same formats in the same order."""

BLOCKS: Mapping[str, tuple[int, int]] = {name: (numbers, nbytes) for name, (_, numbers, nbytes) in _BLOCKS.items()}
"""Numbers and bytes per block of the packed formats. A block never goes beyond its row."""

GGML_TYPES: Mapping[int, str] = {0: "F32", 1: "F16", 30: "BF16"} | {kind: name for name, (kind, *_) in _BLOCKS.items()}
"""The formats of GGUF files that can be run, by ggml's numbers of its types."""

MLX_BITS: Mapping[str, int] = {
    "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "MXFP4": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q8_0": 8, "IQ4_NL": 8, "IQ4_XS": 8,
    "Q1_0": 2, "Q2_0": 2,
}  # fmt: skip
"""Bits of a code with which mlx's quantised kernels hold the numbers of packed formats exactly, in groups that have a
scale and a bias each (of MXFP4 an exponent of a byte). The codes of IQ4_NL and IQ4_XS stand for whole numbers of eight
bits, which lie unevenly; mlx has no codes of one bit."""

MLX_GROUP = 32
"""Numbers of such a group."""

GROUPED: Mapping[str, tuple[int, int]] = {
    "AFFINE4": (32, 16), "AFFINE8": (32, 32), "AFFINE2": (32, 8), "AFFINE3": (32, 12), "AFFINE5": (32, 20),
    "AFFINE6": (32, 24), "OCP_MXFP4": (32, 16), "BLOCK_FP8": (1, 1),
    "GROUPED_NVFP4": (32, 16),
}  # fmt: skip
"""Numbers and bytes of codes of the smallest group of the grouped formats. ``AFFINE4`` and the like are mlx's, with
codes of so many bits: a number is scale * code + bias. ``OCP_MXFP4`` is MXFP4 as its authors publish it: groups of 32
numbers of four bits with an exponent of two (E8M0). Codes follow one another, the first in the lowest bits of a byte.
``BLOCK_FP8`` has numbers of eight bits (E4M3, without infinities) times a scale: that of their block of rows and
columns, as DeepSeek publishes it, of their row, or of the whole matrix. ``GROUPED_NVFP4`` is NVFP4 as NVIDIA publishes
it: groups of 16 numbers as those of MXFP4, each with one byte for its scale (E4M3). A matrix has, in place of biases,
a table of 256 numbers: for each byte half of the scale that it stands for, with the matrix's own scale in it."""

NVFP4_GROUP = 16
"""Numbers of a group of ``GROUPED_NVFP4``."""

SMALLEST_GROUP = 32
"""Numbers of the smallest group of the affine formats; others have a multiple of it, of which 64 and 128 are read."""

BLOCK_SIDE = 128
"""Rows, and columns, of a block of ``BLOCK_FP8``; the last ones of a matrix may have fewer."""

_PACKED = {**BLOCKS, **GROUPED}

_WORDS: dict[int, np.dtype[Any]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def is_packed(number_format: str) -> bool:
    """Whether numbers of a few bits share scales, in blocks or in groups."""
    return number_format in _PACKED


def is_grouped(number_format: str) -> bool:
    """Whether scales lie in tensors of their own."""
    return number_format in GROUPED


def block_size(number_format: str) -> tuple[int, int]:
    """Numbers and bytes of a block, or of the smallest group's codes; of a plain format 1 and the bytes of a number."""
    return _PACKED.get(number_format) or (1, WIDTHS[number_format])


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of ``BLOCK_FP8`` numbers of ``shape`` [..., rows, columns]."""
    return (*shape[:-2], *(-(-size // BLOCK_SIDE) for size in shape[-2:]))


def fp8_side(shape: tuple[int, ...], scales: tuple[int, ...]) -> int | None:
    """What a scale of ``BLOCK_FP8`` numbers of ``shape`` belongs to, by the shape of the ``scales``: ``BLOCK_SIDE``
    rows and columns, 1 for a row, 0 for the whole matrix; None if they do not fit."""
    if scales == scales_shape(shape):
        return BLOCK_SIDE
    if len(shape) != 2 or scales not in ((shape[0], 1), (1, 1)):
        return None
    return 0 if scales == (1, 1) else 1


def words_dtype(number_format: str) -> np.dtype[Any]:
    """numpy's unsigned integer as wide as a number of a plain format; bytes for a packed one."""
    return _WORDS[WIDTHS.get(number_format, 1)]


def words_shape(number_format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the words that store numbers of ``shape``. The rows of a packed format become rows of bytes, of a
    grouped one those of the codes.

    Raises ValueError if the rows are not whole blocks.
    """
    if number_format not in _PACKED:
        return shape
    numbers, nbytes = _PACKED[number_format]
    if not shape or shape[-1] % numbers:
        raise ValueError(f"rows of {shape[-1] if shape else 0} numbers are not whole blocks of {numbers}")
    return (*shape[:-1], shape[-1] // numbers * nbytes)


def in_mlx(number_format: str, numbers: int) -> tuple[int, int]:
    """What ``numbers`` of a format take in mlx: bytes of codes and exponents, and numbers of the type that it computes
    with, which are scales and biases or, where no kernel takes the format, all of them."""
    bits = MLX_BITS.get(number_format)
    if bits is None:
        return 0, numbers
    if number_format == "MXFP4":
        return numbers * bits // 8 + numbers // MLX_GROUP, 0
    return numbers * bits // 8, 2 * numbers // MLX_GROUP


def numbers_shape(number_format: str, words: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the numbers that words of shape ``words`` store."""
    if number_format not in _PACKED:
        return words
    numbers, nbytes = _PACKED[number_format]
    return (*words[:-1], words[-1] // nbytes * numbers)


def stored_bytes(number_format: str, shape: tuple[int, ...]) -> int:
    """Bytes of numbers of ``shape``, of a grouped format those of the codes. Raises ValueError if rows of a packed
    format are not whole blocks."""
    return math.prod(words_shape(number_format, shape)) * words_dtype(number_format).itemsize
