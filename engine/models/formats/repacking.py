"""Tensors of a grouped number format that are computed from what is stored, once, in memory of their own.

A weight of vLLM's formats is scale * (code - zero) with a scale and a zero point for each group. Ours is
scale * code + bias, so that biases are computed, without another rounding. Codes that lie by columns, as AutoAWQ and
GPTQModel pack them, or have a sign are laid out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, damaged
from engine.models.formats.mapped_file import MappedFile
from engine.models.formats.safetensors_files import TensorEntry

Bytes = NDArray[np.uint8]
Read = Callable[[str], NDArray[Any]]
"""The stored words of a part."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of eight that AutoAWQ packs into a word, the first in its lowest bits."""

_BAND = 32
"""Words of a row of stored codes that are turned at once, few enough for a processor's caches."""


@dataclass(frozen=True, eq=False)
class Repacking:
    """How a tensor's parts in memory of their own are computed from stored ones.

    ``kind`` and ``added_to_zeros`` are those of :class:`engine.models.architectures.schemes.Scheme`. ``sources``: the
    stored ``codes``, ``scales`` and perhaps ``zeros`` and ``order``, each with its file's name. ``codes``, ``scales``
    and ``biases`` lie in the memory; None for what is used where it is stored.
    """

    name: str
    kind: str
    bits: int
    added_to_zeros: int
    shape: tuple[int, int]
    sources: Mapping[str, tuple[str, TensorEntry]]
    biases: TensorEntry
    scales: TensorEntry | None = None
    codes: TensorEntry | None = None

    @property
    def spent(self) -> tuple[tuple[str, TensorEntry], ...]:
        """The sources that nothing else reads."""
        in_place = {part for part, made in (("codes", self.codes), ("scales", self.scales)) if made is None}
        return tuple(source for part, source in self.sources.items() if part not in in_place)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.biases) if part is not None)

    def run(self, files: Mapping[str, MappedFile], memory: MappedFile) -> int:
        """Compute the parts, and return their bytes. Raises ModelError if columns lie in the order of activations, or
        scales or biases are no finite numbers of their format."""

        def read(part: str) -> NDArray[Any]:
            file, entry = self.sources[part]
            return files[file].tensor(entry.dtype, entry.shape, entry.start).words

        def place(entry: TensorEntry) -> NDArray[Any]:
            return memory.tensor(entry.dtype, entry.shape, entry.start).words

        rows, groups = self.shape[0], self.biases.shape[1]
        by_columns = self.kind in _BY_COLUMNS
        scales = _wide(read("scales"), self.sources["scales"][1].dtype)
        scales = scales.T if by_columns else scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
        scales = np.broadcast_to(scales, (rows, scales.shape[1]))
        if "order" in self.sources:
            self._check_order(read("order"), scales.shape[1])
        zeros = self._zeros(read, rows) if "zeros" in self.sources else np.float32(1 << self.bits - 1)
        repeated = groups // scales.shape[1]
        with np.errstate(all="ignore"):
            biases = -(scales * zeros)
            stored = _narrow(biases, self.biases.dtype)
        # Of a scale that is no finite number the bias is none, either; in half precision it may overflow by itself.
        if not np.isfinite(_wide(stored, self.biases.dtype)).all():
            raise damaged(f"Scales of {self.name} are no numbers, or too large")
        place(self.biases)[...] = np.repeat(stored, repeated, axis=1)
        if self.scales is not None:
            place(self.scales)[...] = _narrow(np.repeat(scales, repeated, axis=1), self.scales.dtype)
        if self.codes is not None:
            _CODES[self.kind](read("codes"), place(self.codes))
        return self.nbytes

    def _zeros(self, read: Read, rows: int) -> NDArray[np.float32]:
        """The zero points, [rows, groups]."""
        stored = read("zeros")
        if self.sources["zeros"][1].dtype == "I8":
            zeros = stored.view(np.int8).astype(np.float32).reshape(-1, stored.shape[-1] if stored.ndim > 1 else 1)
            return zeros + np.float32(1 << self.bits - 1)
        words = np.ascontiguousarray(stored if self.kind in _BY_COLUMNS else stored.T)
        codes = _codes(words.view(np.uint8), self.bits)
        if self.kind == "AWQ":
            packed = codes.reshape(len(codes), -1, len(AWQ_ORDER))
            codes = packed[:, :, np.argsort(AWQ_ORDER)].reshape(len(codes), -1)
        return codes[:, :rows].T.astype(np.float32) + np.float32(self.added_to_zeros)

    def _check_order(self, order: NDArray[Any], groups: int) -> None:
        columns = self.shape[1]
        if (order != np.arange(columns) // (columns // groups)).any():
            raise ModelError(
                f"The columns of {self.name} are quantised in the order of activations (desc_act, g_idx), which does "
                "not run here; take another copy of the model."
            )


@dataclass(frozen=True, eq=False)
class ScaleTable:
    """How the ``table`` of an NVFP4 matrix is computed, which has for each byte of a scale half of the number that it
    stands for.

    That number is the byte's as E4M3, multiplied by the matrix's own ``factor`` (None: 1), or if it ``divides``,
    divided by it. ``name`` is the matrix's. Codes count in halves, hence half.
    """

    name: str
    table: TensorEntry
    factor: tuple[str, TensorEntry] | None
    divides: bool

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return self.table.nbytes

    def run(self, files: Mapping[str, MappedFile], memory: MappedFile) -> int:
        """Compute the table, and return its bytes. Raises ModelError if the factor makes scales infinite."""
        scales = _e4m3()
        numbers = np.isfinite(scales)
        if self.factor is not None:
            file, entry = self.factor
            factor = files[file].tensor(entry.dtype, entry.shape, entry.start).words.view(np.float32).reshape(())
            with np.errstate(all="ignore"):
                scales = scales / factor if self.divides else scales * factor
            if not np.isfinite(scales[numbers]).all():
                raise damaged(f"Scales of {self.name} are no numbers with their factor {factor}")
        place = memory.tensor("F32", self.table.shape, self.table.start).words
        place[...] = (scales * np.float32(0.5)).view(np.uint32)
        return self.nbytes


POWERS = "F8_E8M0"
"""safetensors' name of numbers of a byte that are powers of two."""


@dataclass(frozen=True, eq=False)
class WidenedPowers:
    """How the ``scales`` in bfloat16 of the FP8 matrix ``name`` are computed from ``stored`` powers of two, which are
    an exponent each (E8M0)."""

    name: str
    scales: TensorEntry
    stored: tuple[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return self.scales.nbytes

    def run(self, files: Mapping[str, MappedFile], memory: MappedFile) -> int:
        """Compute the scales, and return their bytes. Raises ModelError if one of them is no number."""
        file, entry = self.stored
        exponents = files[file].tensor("U8", entry.shape, entry.start).words
        if (exponents == 255).any():
            raise damaged(f"Scales of {self.name} are no numbers")
        # The smallest power has an exponent of its own in bfloat16: it is half of the smallest normal number.
        words = np.where(exponents == 0, 64, exponents.astype(np.uint16) << 7).astype(np.uint16)
        memory.tensor("BF16", self.scales.shape, self.scales.start).words[...] = words
        return self.nbytes


def _e4m3() -> NDArray[np.float32]:
    """The 256 numbers of E4M3 by their bytes. The two bytes that are no number get infinities, so that what is computed
    with them is seen to be none."""
    code = np.arange(256)
    exponent, digits = code >> 3 & 15, code & 7
    sizes = np.where(exponent == 0, np.ldexp(digits, -9), np.ldexp(8 + digits, exponent - 10))
    sizes[code & 127 == 127] = np.inf
    numbers: NDArray[np.float32] = np.where(code < 128, sizes, -sizes).astype(np.float32)
    return numbers


def _wide(words: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    numbers: NDArray[np.float32] = words.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
    return numbers


def _narrow(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The words of ``numbers``, which ``dtype`` holds without loss."""
    if dtype == "BF16":
        return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return numbers.astype(np.float16).view(np.uint16) if dtype == "F16" else numbers.view(np.uint32)


def _codes(packed: Bytes, bits: int) -> Bytes:
    """Codes of four or eight bits, each its own byte; those of four lie low ones first."""
    if bits == 8:
        return packed
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)


def _turned(stored: NDArray[Any], out: Bytes) -> None:
    """Words [words, rows] of codes that follow one another along the columns."""
    words = out.view(np.uint32)
    for start in range(0, len(words), _BAND):
        words[start : start + _BAND] = stored[:, start : start + _BAND].T


def _awq(stored: NDArray[Any], out: Bytes) -> None:
    """Words [columns, rows / 8], each of which has codes of eight rows in :data:`AWQ_ORDER`."""
    rows, mask = out.reshape(-1, 8, out.shape[1]), np.uint32(0x0F0F0F0F)
    for start in range(0, len(rows), _BAND):
        turned = np.ascontiguousarray(stored[:, start : start + _BAND].T)
        even, odd = turned[:, 0::2], turned[:, 1::2]
        # Each byte of these has a row's codes of two columns that follow one another.
        for first, pairs in enumerate((even & mask | (odd & mask) << 4, even >> 4 & mask | odd & ~mask)):
            codes = pairs.view(np.uint8)
            for byte in range(4):
                rows[start : start + _BAND, AWQ_ORDER[2 * byte + first]] = codes[:, byte::4]


def _unsigned(stored: NDArray[Any], out: Bytes) -> None:
    np.bitwise_xor(stored, np.uint8(128), out=out)


_BY_COLUMNS = ("AWQ", "GPTQ")
_CODES: Mapping[str, Callable[[NDArray[Any], Bytes], None]] = {
    "AWQ": _awq, "GPTQ": _turned, "int-quantized": _unsigned
}  # fmt: skip
"""How codes are laid out anew; those of other kinds are used where they are stored."""
