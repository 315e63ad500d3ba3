"""What a row of tokens holds, as arrays of bytes that can be kept on a disk and put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_ITEM_BYTES = {"uint8": 1, "uint16": 2, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number, by the names that a part may have for its numbers."""


class RowPart(msgspec.Struct, frozen=True, array_like=True):
    """One array: its ``name``, unique in a row, the format of its ``numbers``, and its shape."""

    name: str
    numbers: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Raises ValueError for an unknown format or an impossible shape."""
        if self.numbers not in _ITEM_BYTES or not all(0 < size < 2**40 for size in self.shape):
            raise ValueError(f"{self.name} has the shape {self.shape} of {self.numbers}")
        return math.prod(self.shape) * _ITEM_BYTES[self.numbers]


@dataclass(frozen=True)
class RowContents:
    """The arrays of a row in order. ``read(i)`` gives the bytes of ``parts[i]``, and copies no more than that."""

    parts: Sequence[RowPart]
    read: Callable[[int], Bytes]


Fill = Callable[[Bytes], None]
"""Fills an array with the next bytes. It may raise."""


def as_bytes(array: NDArray[Any]) -> Bytes:
    """The bytes of ``array`` in the order of its indices."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)
