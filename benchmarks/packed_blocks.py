"""Rows of packed weights for tests and benchmarks: any codes, with scales that keep the values around zero and all
about as large."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from engine.models.formats.number_formats import BLOCKS

WRITTEN = tuple(name for name in BLOCKS if name in GGMLQuantizationType.__members__)
"""Packed formats that gguf writes; its release does not know Q2_0."""


def block_of(name: str) -> tuple[int, int]:
    """Values and bytes of a block."""
    if name == "Q2_0":
        return 64, 18
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return int(values), int(nbytes)


def unpacked(name: str, words: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What gguf makes of ``words`` [..., bytes]: [..., columns]."""
    with np.errstate(all="ignore"):
        if name in ("Q1_0", "Q2_0"):
            values = _of_bits(words.reshape(-1, block_of(name)[1]), 1 if name == "Q1_0" else 2)
        else:
            # As one long row: gguf takes a few rows at a time, which costs more than unpacking them.
            values = dequantize(words.reshape(1, -1), GGMLQuantizationType[name])
    return np.asarray(values, np.float32).reshape(*words.shape[:-1], -1)


def _of_bits(blocks: NDArray[np.uint8], width: int) -> NDArray[np.float32]:
    """Values of the formats that gguf does not unpack: codes of one bit are -1 and 1, of two bits -1 to 2."""
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    codes = 2 * bits - 1 if width == 1 else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    return scales * codes


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """The bytes [rows, bytes] of a random matrix [rows, columns].

    The values' mean is zero: in a deep model any other makes all tokens alike, so that they use the same experts.
    """
    values, nbytes = block_of(name)
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // values, nbytes), dtype=np.uint8)
    # Codes have one more step below zero than above, which scales of both signs balance.
    scale = (generator.uniform(0.01, 0.02, len(blocks)) * generator.choice((-1, 1), len(blocks))).astype(np.float16)

    def put(at: int, numbers: NDArray[np.float16]) -> None:
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)

    for at in SCALES.get(name, (0,))[:1]:
        put(at, scale)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(120, 123, len(blocks))
    if name == "NVFP4":
        blocks[:, :4] = generator.integers(40, 50, (len(blocks), 4))
    if name == "IQ1_M":
        _put_apart(blocks, scale)
    if name in ("TQ2_0", "Q2_0"):  # models have no weights that are twice the scale
        codes = generator.integers(0, 3, (len(blocks), values // 4, 4), dtype=np.uint8)
        start = 0 if name == "TQ2_0" else 2
        blocks[:, start : start + values // 4] = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(2)
    if name == "Q6_K":
        blocks[:, 192:208] = generator.integers(20, 60, (len(blocks), 16))
    if name == "Q2_K":
        put(82, (scale * np.float16(1.5)).astype(np.float16))
        blocks[:, :16] = generator.integers(4, 16, (len(blocks), 16)) * 0x11
    if name in ("Q4_1", "Q5_1"):
        put(2, (scale * np.float16(-7.5 if name == "Q4_1" else -15.5)).astype(np.float16))
    if name in ("Q4_K", "Q5_K"):
        put(2, (scale * np.float16(7.5 if name == "Q4_K" else 15.5)).astype(np.float16))
        # Six bits for each of 8 scales and minima, two of them apart for the last 4: all are 33, or all are 50.
        larger = generator.integers(0, 2, (len(blocks), 1), dtype=np.uint8)
        blocks[:, 4:12] = np.where(larger, 0xF2, 0xA1)
        blocks[:, 12:16] = np.where(larger, 0x22, 0x11)
    return blocks.reshape(rows, -1)


def random_values(
    name: str, rows: int, columns: int, seed: int = 0, deviation: float | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Random blocks and the values they stand for, with a standard deviation of about ``deviation`` (None: one over the
    root of ``columns``)."""
    words = random_blocks(name, rows, columns, seed)
    factor = (columns**-0.5 if deviation is None else deviation) / unpacked(name, words[:64]).std()
    blocks, power = words.reshape(-1, block_of(name)[1]), round(np.log2(factor))
    if name == "MXFP4":
        blocks[:, 0] = np.clip(blocks[:, 0].astype(int) + power, 0, 254)
    if name == "NVFP4":
        blocks[:, :4] = np.clip(blocks[:, :4].astype(int) + 8 * power, 1, 126)
    if name == "IQ1_M":
        nibbles = blocks[:, 49:56:2].astype(np.uint16) >> 4
        halves = (nibbles << np.array([0, 4, 8, 12], np.uint16)).sum(1).astype(np.uint16).view(np.float16)
        _put_apart(blocks, (halves * np.float16(factor)).astype(np.float16))
    for scale in SCALES.get(name, (0,)):
        numbers = np.ascontiguousarray(blocks[:, scale : scale + 2]).view(np.float16)
        blocks[:, scale : scale + 2] = (numbers * np.float16(factor)).view(np.uint8)
    return words, unpacked(name, words)


def _put_apart(blocks: NDArray[np.uint8], scales: NDArray[np.float16]) -> None:
    """The scales of IQ1_M: four bits of each in the upper halves of four bytes."""
    nibbles = scales.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
    blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | (nibbles << 4).astype(np.uint8)


SCALES: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": (),
}  # fmt: skip
"""Where the float16 scales of a block are, in bytes; in formats that are not here at its beginning."""
