"""States of layers with a delta-net or a short convolution: a fixed number of floats for each row, replaced by every
pass.

A state cannot be taken back. A pass reads the states of before and writes others, which count only once it has
succeeded; so rows may read the same states, and none is ever copied. Where a pass cannot be given up in its middle, a
row's states are replaced where they lie, which spares memory and its traffic.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.planning.units import byte_size
from engine.runtimes.row_contents import Bytes, Fill, as_bytes


class _Buffer:
    """The states of one row. ``shared``: other rows, of another cache, read them too, so they never change again."""

    def __init__(self, numbers: int) -> None:
        """Raises ModelError (memory) if there is no room for ``numbers`` floats."""
        try:
            mapping = mmap.mmap(-1, numbers * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as failed:
            raise ModelError(
                f"The states of one row take {byte_size(4 * numbers)}, which are not free; close other programs or use "
                "fewer beams.",
                kind="memory",
            ) from failed
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.numbers: NDArray[np.float32] = np.frombuffer(mapping, np.float32)
        self.shared = False


class States:
    """The states of some rows, ``numbers`` floats each."""

    def __init__(self, numbers: int, rows: Sequence[_Buffer | None]) -> None:
        """``rows`` are the states of each; None before its first pass."""
        self._numbers = numbers
        self._rows = list(rows)
        self._next: list[_Buffer] | None = None
        self._spare: list[_Buffer] = []

    @classmethod
    def of_one_row(cls, numbers: int) -> States:
        """Those of a row without tokens."""
        return cls(numbers, [None])

    @classmethod
    def filled(cls, numbers: int, fill: Fill) -> States:
        """Those of one row, whose bytes ``fill`` gives."""
        row = _Buffer(numbers)
        fill(row.numbers.view(np.uint8))
        return cls(numbers, [row])

    @property
    def numbers(self) -> int:
        """Floats of each row."""
        return self._numbers

    def only_row(self) -> Bytes:
        """The bytes of the single row, after its first pass."""
        (row,) = self._rows
        assert row is not None
        return as_bytes(row.numbers)

    def begin(self, in_place: bool) -> tuple[Any, Any]:
        """Where a pass finds the states of each row and where it puts them, as C arrays of addresses.

        ``in_place``: the pass cannot be given up, so a row that alone has its states may change them.
        """
        taken: set[int] = set()
        after = []
        for row in self._rows:
            if in_place and row is not None and not row.shared and id(row) not in taken:
                taken.add(id(row))
                after.append(row)
            else:
                after.append(self._spare.pop() if self._spare else _Buffer(self._numbers))
        self._next = after
        return _addresses(self._rows), _addresses(after)

    def commit(self) -> None:
        """The pass has succeeded."""
        assert self._next is not None
        self._drop(self._rows, self._next)
        self._rows, self._next = list(self._next), None

    def give_up(self) -> None:
        """The pass has failed: the states are those of before it."""
        self._drop(self._next or [], self._rows)
        self._next = None

    def _drop(self, rows: Sequence[_Buffer | None], kept: Sequence[_Buffer | None]) -> None:
        """What is among ``rows`` and not among ``kept`` may be written again."""
        known = {id(row) for row in kept}
        for row in rows:
            if row is not None and not row.shared and id(row) not in known:
                known.add(id(row))
                self._spare.append(row)

    def shared(self, rows: int) -> States:
        """``rows`` rows that go on from the states of this single row by themselves."""
        only = self._rows[0]
        if only is not None:
            only.shared = True
        return States(self._numbers, [only] * rows)

    def reorder(self, parents: Sequence[int]) -> None:
        """Row i goes on from the states of ``parents[i]``. Nothing is moved."""
        rows = [self._rows[parent] for parent in parents]
        self._drop(self._rows, rows)
        self._rows = rows

    @property
    def nbytes(self) -> int:
        """Bytes of the states, those shared with others included."""
        buffers = {id(buffer): buffer for buffer in (*self._rows, *self._spare) if buffer is not None}
        return sum(buffer.numbers.nbytes for buffer in buffers.values())


def _addresses(buffers: Sequence[_Buffer | None]) -> Any:
    places = (ctypes.c_void_p * len(buffers))()
    for index, buffer in enumerate(buffers):
        places[index] = None if buffer is None else buffer.numbers.ctypes.data
    return places
