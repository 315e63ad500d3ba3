"""GGUF's blocks of numbers as mlx's quantised kernels take them: codes of groups of 32 numbers, scales and biases.

What is in :data:`engine.models.formats.number_formats.MLX_BITS` keeps every number: only where codes, scales and biases
lie changes. Where ggml subtracts from a code before it multiplies (``d * (code - 8)``), mlx adds a bias afterwards
(``d * code - 8 * d``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import IQ4_NL, dequantize
from numpy.typing import NDArray

from engine.models.architectures.quantisation import Groups
from engine.models.formats.model_files import Change, Order, StoredTensor
from engine.models.formats.number_formats import BLOCKS, MLX_BITS, MLX_GROUP

Array = Any
_Parts = tuple[Array, Array, Array]
"""Codes [..., 32], scales and biases [...] of groups in float32. Of MXFP4 the scales are exponents, and the biases are
not used."""

_UNKNOWN_TO_GGUF = ("Q1_0", "Q2_0")
"""Formats that the gguf package does not unpack."""
_UNPACKED_AT_ONCE = 1 << 24
"""Numbers that are unpacked on the CPU at once."""


@dataclass(frozen=True)
class QuantisedArrays:
    """A quantised matrix [..., rows, columns] as mlx-lm's modules hold it; see ``mlx.core.dequantize``."""

    weight: Array
    scales: Array
    biases: Array | None
    groups: Groups

    @property
    def named(self) -> dict[str, Array]:
        """The arrays by their names in a module."""
        found = {"weight": self.weight, "scales": self.scales}
        return found if self.biases is None else found | {"biases": self.biases}


def groups_of_format(number_format: str) -> Groups:
    """How mlx's kernels hold a format of :data:`MLX_BITS`."""
    return Groups(MLX_BITS[number_format], MLX_GROUP, "mxfp4" if number_format == "MXFP4" else "affine")


def laid_out(tensor: StoredTensor, dtype: Any, change: Change | None = None) -> QuantisedArrays | None:
    """``tensor`` after ``change`` for mlx's kernels, with scales and biases of ``dtype``, unevaluated.

    None if its format, or the change, makes that impossible without another rounding.
    """
    if tensor.dtype not in MLX_BITS:
        return None
    order = None
    if change is not None:
        if change.subtracted or change.log_of:
            return None
        if change.columns is not None:
            order = _order_of_groups(change.columns)
            if order is None:
                return None
        tensor = change.in_rows(tensor)
    groups = groups_of_format(tensor.dtype)
    _, nbytes = BLOCKS[tensor.dtype]
    words = mx.array(np.ascontiguousarray(tensor.words))
    rows = words.shape[:-1]
    codes, scales, biases = _READERS[tensor.dtype](words.reshape(*rows, -1, nbytes))
    codes, scales, biases = codes.reshape(*rows, -1, MLX_GROUP), scales.reshape(*rows, -1), biases.reshape(*rows, -1)
    if order is not None:
        places = mx.array(order.astype(np.int32))
        codes, scales, biases = codes[..., places, :], scales[..., places], biases[..., places]
    weight = _PACKERS[groups.bits](codes).reshape(*rows, -1).view(mx.uint32)
    if groups.mode == "mxfp4":
        return QuantisedArrays(weight, scales, None, groups)
    return QuantisedArrays(weight, scales.astype(dtype), biases.astype(dtype), groups)


def unpacked(tensor: StoredTensor, dtype: Any, change: Change | None = None) -> Array:
    """``tensor``, which is packed in blocks, as plain numbers of ``dtype`` after ``change``, evaluated."""
    numbers, nbytes = BLOCKS[tensor.dtype]
    shape = tensor.shape
    if change is not None:
        tensor = change.in_rows(tensor)
    rows = np.ascontiguousarray(tensor.words).reshape(-1, shape[-1] // numbers * nbytes)
    step = max(1, _UNPACKED_AT_ONCE // shape[-1])
    pieces = []
    for first in range(0, len(rows), step):
        values = _unpacked_rows(tensor.dtype, rows[first : first + step])
        pieces.append(mx.array(changed_values(values, change)).astype(dtype))
        mx.eval(pieces[-1])
    whole = (pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)).reshape(shape)
    mx.eval(whole)
    return whole


def _unpacked_rows(number_format: str, words: NDArray[np.uint8]) -> NDArray[np.float32]:
    if number_format not in _UNKNOWN_TO_GGUF:
        return np.asarray(dequantize(words, GGMLQuantizationType[number_format]), np.float32)
    matrix = laid_out(StoredTensor(number_format, words), mx.float32)
    assert matrix is not None
    return np.array(
        mx.dequantize(matrix.weight, matrix.scales, matrix.biases, group_size=MLX_GROUP, bits=matrix.groups.bits)
    )


def changed_values(values: Any, change: Change | None) -> Any:
    """float32 ``values`` [..., columns], whose rows are in order already, after the rest of ``change``."""
    if change is None:
        return values
    if change.columns is not None:
        values = values[..., change.columns]
    if change.subtracted:
        values = values - np.float32(change.subtracted)
    return np.log(change.log_of * values) if change.log_of else values


def _order_of_groups(columns: Order) -> Order | None:
    """``columns`` as an order of groups; None if it takes any of them apart."""
    if len(columns) % MLX_GROUP:
        return None
    first: Order = columns[::MLX_GROUP]
    whole = first[:, None] + np.arange(MLX_GROUP)
    return first // MLX_GROUP if not (first % MLX_GROUP).any() and (whole.reshape(-1) == columns).all() else None


# --- codes, scales and biases of each format, from blocks [..., bytes] ----------------------------------------------


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte ``at`` of each block, as float32 [...]."""
    return mx.contiguous(blocks[..., at : at + 2]).view(mx.float16)[..., 0].astype(mx.float32)


def _nibbles(codes: Array) -> Array:
    """The low halves of bytes [..., n], then the high ones [..., 2 * n]."""
    return mx.concatenate([codes & 15, codes >> 4], axis=-1)


def _bits(words: Array) -> Array:
    """The bits of bytes [..., n], the lowest first [..., 8 * n]."""
    return ((words[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1).reshape(*words.shape[:-1], -1)


def _q4_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, -8 * scale


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 6:]) | (_bits(blocks[..., 2:6]) << 4), scale, -16 * scale


def _q5_1(blocks: Array) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | (_bits(blocks[..., 4:8]) << 4)
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return blocks[..., 2:] ^ 128, scale, -128 * scale


def _scales_of_k(blocks: Array) -> tuple[Array, Array]:
    """Scales and biases [..., 8] of a block of Q4_K or Q5_K, which have six bits each."""
    low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = mx.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], axis=-1)
    biases = mx.concatenate([high & 63, (both >> 4) | ((high >> 2) & 48)], axis=-1)
    return (
        _half(blocks, 0)[..., None] * scales.astype(mx.float32),
        -_half(blocks, 2)[..., None] * biases.astype(mx.float32),
    )


def _in_pairs(codes: Array) -> Array:
    """The codes of groups two of which share 32 bytes, the first in the low halves [..., groups, 32]."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 32)
    return mx.stack([pairs & 15, pairs >> 4], axis=-2).reshape(*codes.shape[:-1], -1, 32)


def _q4_k(blocks: Array) -> _Parts:
    return _in_pairs(blocks[..., 16:]), *_scales_of_k(blocks)


def _q5_k(blocks: Array) -> _Parts:
    fifth = (blocks[..., None, 16:48] >> mx.arange(8, dtype=mx.uint8)[:, None]) & 1
    return _in_pairs(blocks[..., 48:]) | (fifth << 4), *_scales_of_k(blocks)


def _looked_up(codes: Array) -> Array:
    """What codes of four bits of IQ4_NL stand for, plus 128."""
    return mx.array([value + 128 for value in IQ4_NL.kvalues], dtype=mx.uint8)[codes]


def _iq4_nl(blocks: Array) -> _Parts:
    scale = _half(blocks, 0)
    return _looked_up(_nibbles(blocks[..., 2:])), scale, -128 * scale


def _iq4_xs(blocks: Array) -> _Parts:
    high, low = blocks[..., 2:4], blocks[..., 4:8]
    fours = mx.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:-1], 8)
    twos = ((high[..., None] >> mx.array([0, 2, 4, 6], dtype=mx.uint8)) & 3).reshape(*high.shape[:-1], 8)
    scales = _half(blocks, 0)[..., None] * ((fours | (twos << 4)).astype(mx.float32) - 32)
    codes = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    return _looked_up(_nibbles(codes)), scales, -128 * scales


def _q1_0(blocks: Array) -> _Parts:
    return _with_one_scale(blocks, 2 * _bits(blocks[..., 2:]))


def _q2_0(blocks: Array) -> _Parts:
    codes = (blocks[..., 2:, None] >> mx.array([0, 2, 4, 6], dtype=mx.uint8)) & 3
    return _with_one_scale(blocks, codes.reshape(*blocks.shape[:-1], -1))


def _with_one_scale(blocks: Array, codes: Array) -> _Parts:
    """The parts of blocks of several groups with the scale at their beginning, which is taken away once."""
    scales = mx.repeat(_half(blocks, 0)[..., None], codes.shape[-1] // MLX_GROUP, axis=-1)
    return codes, scales, -scales


def _mxfp4(blocks: Array) -> _Parts:
    return _nibbles(blocks[..., 1:]), blocks[..., 0], blocks[..., 0]


_READERS: dict[str, Callable[[Array], _Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "Q1_0": _q1_0, "Q2_0": _q2_0,
}  # fmt: skip


# --- codes [..., 32], one a byte, as mlx packs them: the first in the lowest bits ------------------------------------


def _in_two_bits(codes: Array) -> Array:
    return codes[..., ::4] | (codes[..., 1::4] << 2) | (codes[..., 2::4] << 4) | (codes[..., 3::4] << 6)


def _in_four_bits(codes: Array) -> Array:
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _in_five_bits(codes: Array) -> Array:
    a, b, c, d, e, f, g, h = (codes[..., place::8] for place in range(8))
    first, second, third = a | (b << 5), (b >> 3) | (c << 2) | (d << 7), (d >> 1) | (e << 4)
    return mx.stack([first, second, third, (e >> 4) | (f << 1) | (g << 6), (g >> 2) | (h << 3)], axis=-1)


_PACKERS: dict[int, Callable[[Array], Array]] = {
    2: _in_two_bits, 4: _in_four_bits, 5: _in_five_bits, 8: lambda codes: codes,
}  # fmt: skip
