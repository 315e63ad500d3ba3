"""Unpacks weights by torch's own operations, on the device that holds the packed bytes.

The blocks are those of :data:`engine.models.formats.number_formats.BLOCKS`, ggml's layouts. The arithmetic is in
float32 and in ggml's order, so that the values are equal to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from engine.models.formats.number_formats import BLOCK_SIDE, BLOCKS, GROUPED, fp8_side

_ON_CPU = 1 << 18
_ON_DEVICE = 1 << 22
"""Numbers unpacked at once: few enough for a CPU's caches, and enough to keep a GPU busy."""

_HALF_BYTES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of the IQ4 formats."""
_HALVES_OF_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the codes of MXFP4."""


def unpack(
    words: torch.Tensor,
    number_format: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The numbers in ``words``, uint8 [rows, bytes]: [rows, numbers] of ``dtype`` on ``device`` (None: the same one).

    The additional memory does not depend on the number of rows.
    """
    numbers, nbytes = BLOCKS[number_format]
    decode = _DECODERS[number_format]
    blocks = words.reshape(-1, nbytes)
    out = torch.empty(len(blocks), numbers, dtype=dtype, device=words.device if device is None else device)
    step = (_ON_CPU if out.device.type == "cpu" else _ON_DEVICE) // numbers
    for start in range(0, len(blocks), step):
        out[start : start + step] = decode(blocks[start : start + step].to(out.device))
    return out.view(*words.shape[:-1], -1)


def unpack_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    number_format: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The numbers of a grouped format, [rows, numbers] of ``dtype`` on ``device`` (None: the same one).

    ``codes`` uint8 [rows, bytes], ``scales`` and ``biases`` [rows, groups]; the latter of ``GROUPED_NVFP4`` [1, 256].
    The scales of ``BLOCK_FP8`` are [row blocks, column blocks], [rows, 1] or [1, 1]. The additional memory does not
    depend on the number of rows.
    """
    numbers, nbytes = GROUPED[number_format]
    rows, columns = codes.shape[0], codes.shape[1] // nbytes * numbers
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device if device is None else device)
    if number_format == "BLOCK_FP8":
        side = fp8_side((rows, columns), tuple(scales.shape))
        for start in range(0, rows, BLOCK_SIDE):
            numbers_of = codes[start : start + BLOCK_SIDE].to(out.device).view(torch.float8_e4m3fn).float()
            if side == BLOCK_SIDE:
                own = scales[start // BLOCK_SIDE].to(out.device).float().repeat_interleave(BLOCK_SIDE)[:columns]
            else:
                own = (scales[start : start + BLOCK_SIDE] if side else scales).to(out.device).float()
            out[start : start + BLOCK_SIDE] = numbers_of * own
        return out
    step = max(1, (_ON_CPU if out.device.type == "cpu" else _ON_DEVICE) // max(1, columns))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        own, scale = codes[part].to(out.device), scales[part].to(out.device)[:, :, None]
        own = _codes_of(own, 8 * nbytes // numbers).reshape(*scale.shape[:2], -1)
        if number_format == "GROUPED_NVFP4":
            assert biases is not None
            own_scale = biases.to(out.device).view(-1)[scale.int()]
            values = own_scale * _looked_up(own, _HALVES_OF_FP4)
        elif biases is None:
            values = _half_powers(scale.int()) * _looked_up(own, _HALVES_OF_FP4)
        else:
            values = scale.float() * own + biases[part].to(out.device)[:, :, None].float()
        out[part] = values.view(-1, columns)
    return out


def _codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes that follow one another in bytes [rows, n], the first in the lowest bits: [rows, m, k], in order."""
    if bits == 8:
        return words
    if 8 % bits == 0:
        return torch.stack([words >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=2)
    parts = words.reshape(len(words), -1, bits)  # eight codes in as many bytes as each has bits
    codes = []
    for first in range(0, 8 * bits, bits):
        byte, shift = divmod(first, 8)
        code = parts[:, :, byte] >> shift
        if shift + bits > 8:
            code = code | parts[:, :, byte + 1] << 8 - shift
        codes.append(code & (1 << bits) - 1)
    return torch.stack(codes, dim=2)


# --- parts of blocks ------------------------------------------------------------------------------------------------


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at byte ``at`` of each block, float32 [blocks, 1]."""
    # A copy, as blocks of odd size begin at odd addresses.
    return blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _fields(words: torch.Tensor, width: int) -> torch.Tensor:
    """The fields of ``width`` bits of bytes [blocks, groups, n], lowest first: [blocks, groups, 8 / width, n]."""
    mask = (1 << width) - 1
    return torch.stack([(words >> shift) & mask for shift in range(0, 8, width)], dim=2)


def _halves(words: torch.Tensor, group: int) -> torch.Tensor:
    """Codes of four bits [blocks, numbers]: the low halves of each ``group`` bytes, then the high ones."""
    blocks = len(words)
    return _fields(words.reshape(blocks, -1, group), 4).reshape(blocks, -1)


def _bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The 32 bits from byte ``at`` on, lowest first: [blocks, 32]."""
    return _fields(blocks[:, at : at + 4].reshape(len(blocks), 4, 1), 1).reshape(len(blocks), 32)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minima of the eight groups of Q4_K and Q5_K, float32 [blocks, 8, 1] each.

    They are six-bit numbers in the bytes 4 to 15. The upper two bits of the last four are stored above those of the
    first four.
    """
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 0x3F, (both & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (both >> 4) | ((second >> 2) & 0x30)), dim=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


@functools.cache
def _table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _looked_up(codes: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return _table(values, codes.device)[codes.int()]


# --- the formats ----------------------------------------------------------------------------------------------------


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 2:], 16).to(torch.int8) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _halves(blocks[:, 4:], 16) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _halves(blocks[:, 6:], 16) | (_bits(blocks, 2) << 4)
    return _half(blocks, 0) * (codes.to(torch.int8) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _halves(blocks[:, 8:], 16) | (_bits(blocks, 4) << 4)
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks, 0)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _looked_up(_halves(blocks[:, 2:], 16), _HALF_BYTES)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    return _half_powers(blocks[:, :1].int()) * _looked_up(_halves(blocks[:, 1:], 16), _HALVES_OF_FP4)


def _half_powers(exponent: torch.Tensor) -> torch.Tensor:
    """Half of the power of two, as the codes of MXFP4 stand for twice their values; below exponent 2 that is
    subnormal."""
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _halves(blocks[:, 16:], 32).view(len(blocks), 8, 32)
    return (scales * codes - minima).view(len(blocks), 256)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    high = _fields(blocks[:, None, 16:48], 1).view(len(blocks), 8, 32)
    codes = _halves(blocks[:, 48:], 32).view(len(blocks), 8, 32) | (high << 4)
    return (scales * codes - minima).view(len(blocks), 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _halves(blocks[:, :128], 64)
    high = _fields(blocks[:, 128:192].reshape(len(blocks), 2, 32), 2).reshape(len(blocks), 256)
    codes = ((low | (high << 4)).to(torch.int8) - 32).view(len(blocks), 16, 16)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return (scales[:, :, None] * codes).view(len(blocks), 256)


def _twos(words: torch.Tensor) -> torch.Tensor:
    """Codes of two bits [blocks, 16, 16]: the lowest bits of each 32 bytes, then the next ones."""
    return _fields(words.reshape(len(words), -1, 32), 2).reshape(len(words), 16, 16)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4)
    return (scales[:, :, None] * _twos(blocks[:, 16:80]) - minima[:, :, None]).view(len(blocks), 256)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _halves(blocks[:, 96:104], 8), _fields(blocks[:, None, 104:108], 2).reshape(len(blocks), 16)
    scales = _half(blocks, 108) * ((low | (high << 4)).to(torch.int8) - 32)
    third = _fields(blocks[:, None, :32], 1).reshape(len(blocks), 16, 16)
    codes = (_twos(blocks[:, 32:96]) | (third << 2)).to(torch.int8) - 4
    return (scales[:, :, None] * codes).view(len(blocks), 256)


@functools.cache
def _grid(name: str, device: torch.device) -> torch.Tensor:
    """The points of a codebook, float32 [points, values of a point]."""
    from gguf import quants

    own = getattr(quants, name)
    own.init_grid()
    return torch.from_numpy(own.grid.reshape(own.grid_shape)).to(device)


def _signed(scales: torch.Tensor, sizes: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The numbers [blocks, 256] of points ``sizes`` [blocks, ...], a byte of ``signs`` [blocks, 32] for each eight."""
    negative = _fields(signs[:, :, None], 1).reshape(len(signs), 256).bool()
    sizes = sizes.reshape(len(signs), 256)
    values = scales[:, :, None] * torch.where(negative, -sizes, sizes).view(*scales.shape, -1)
    return values.view(len(signs), 256)


def _words(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers in the bytes ``start`` to ``stop`` of each block, int32 [blocks, numbers]."""
    # A copy, as blocks may begin at odd addresses.
    words = blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _shifted(words: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """The first ``count`` fields of ``width`` bits of whole numbers [blocks, n], lowest first: [blocks, n * count]."""
    mask = (1 << width) - 1
    return torch.stack([(words >> (width * i)) & mask for i in range(count)], dim=2).reshape(len(words), -1)


def _even(signs: torch.Tensor) -> torch.Tensor:
    """Bytes of seven signs, and of an eighth that makes the number of negative ones even."""
    parity = signs ^ (signs >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return (signs | (parity << 7)).to(torch.uint8)


def _odd_scales(blocks: torch.Tensor, bits: torch.Tensor, factor: float) -> torch.Tensor:
    """The scales of codes of two and three bits: a number and a half, times a factor."""
    return _half(blocks, 0) * (bits + 0.5) * factor


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks, 66, 98, torch.int32)
    sizes = _grid("IQ3_XXS", blocks.device)[blocks[:, 2:66].int()]
    return _signed(_odd_scales(blocks, (words >> 28) & 15, 0.5), sizes, _even(_shifted(words, 7, 4)))


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks, 2, 66, torch.int32)[:, 1::2]
    places = blocks[:, 2:66].reshape(len(blocks), 8, 8)[:, :, :4].reshape(len(blocks), 32)
    sizes = _grid("IQ2_XXS", blocks.device)[places.int()]
    return _signed(_odd_scales(blocks, (words >> 28) & 15, 0.25), sizes, _even(_shifted(words, 7, 4)))


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks, 2, 66, torch.int16)
    sizes = _grid("IQ2_XS", blocks.device)[words & 511]
    return _signed(_odd_scales(blocks, _halves(blocks[:, 66:74], 1), 0.25), sizes, _even(words >> 9))


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _fields(blocks[:, 66:74, None], 2).reshape(len(blocks), 32).int()
    sizes = _grid("IQ2_S", blocks.device)[blocks[:, 2:34] | (high << 8)]
    return _signed(_odd_scales(blocks, _halves(blocks[:, 74:82], 1), 0.25), sizes, blocks[:, 34:66])


def _moved(scales: torch.Tensor, points: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """The numbers [blocks, 256] of points [blocks, 32] of the 1-bit formats, an eighth above or ``below`` them."""
    numbers = _grid("IQ1_S", points.device)[points] + torch.where(below.bool(), -0.125, 0.125)[:, :, None]
    return (scales[:, :, None] * numbers.view(*scales.shape, -1)).view(len(points), 256)


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _words(blocks, 34, 50, torch.int16)
    points = blocks[:, 2:34] | (_shifted(high, 3, 4) << 8)
    scales = _half(blocks, 0) * (2 * ((high >> 12) & 7) + 1)
    return _moved(scales, points, (high >> 15).repeat_interleave(4, dim=1))


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks, 48, 56, torch.int16)
    half = sum(((words[:, i] >> 12) << (4 * i) for i in range(1, 4)), words[:, 0] >> 12)
    whole = half.to(torch.int16).view(torch.float16).float()[:, None]
    high = _halves(blocks[:, 32:48], 1).int()
    points = blocks[:, :32] | ((high & 7) << 8)
    return _moved(whole * (2 * _shifted(words, 3, 4) + 1), points, high >> 3)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    def levels(words: torch.Tensor, count: int) -> torch.Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8, device=words.device)
        return (words[:, None, :] * powers[:, None]).reshape(len(words), -1)

    codes = torch.cat((levels(blocks[:, :32], 5), levels(blocks[:, 32:48], 5), levels(blocks[:, 48:52], 4)), dim=1)
    return _half(blocks, 52) * (((codes.int() * 3) >> 8) - 1)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 64) * (_twos(blocks[:, :64]).view(len(blocks), 256).to(torch.int8) - 1)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    bits = blocks[:, :4].int()
    # Half of an unsigned FP8 number, as the codes stand for twice their values.
    halves = torch.where(bits == 0x7F, 0, (bits & 0x7F) << 7).to(torch.int16).view(torch.float16)
    codes = _looked_up(_halves(blocks[:, 4:], 8), _HALVES_OF_FP4).view(len(blocks), 4, 16)
    return ((halves.float() * 128)[:, :, None] * codes).view(len(blocks), 64)


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (2 * _fields(blocks[:, 2:, None], 1).reshape(len(blocks), 128).to(torch.int8) - 1)


def _q2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:, None], 2).reshape(len(blocks), 64).to(torch.int8) - 1)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _fields(blocks[:, 66:74, None], 1).reshape(len(blocks), 64).int()
    sizes = _grid("IQ3_S", blocks.device)[blocks[:, 2:66] | (high << 8)]
    scales = _half(blocks, 0) * (1 + 2 * _halves(blocks[:, 106:110], 1))
    return _signed(scales, sizes, blocks[:, 74:106])


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _halves(blocks[:, 4:8], 1)
    high = _fields(blocks[:, 2:4].reshape(len(blocks), 2, 1), 2).reshape(len(blocks), 8)
    scales = _half(blocks, 0) * ((low | (high << 4)).to(torch.int8) - 32)
    codes = _looked_up(_halves(blocks[:, 8:], 16), _HALF_BYTES).view(len(blocks), 8, 32)
    return (scales[:, :, None] * codes).view(len(blocks), 256)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
    "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "NVFP4": _nvfp4, "Q1_0": _q1_0, "Q2_0": _q2_0,
}  # fmt: skip
"""Functions from uint8 [blocks, bytes] to float32 [blocks, numbers], by number format."""
