"""Keys and values in pages, which grow without copying and are shared by reference between rows of tokens.

A page is one allocation for all layers. Rows refer to pages through segments, each a run of positions in one page. A
shared segment is never written again; later positions go after it or into another page. Attention adds up segment by
segment, so the borders of segments affect the last bits. For a single row the borders depend only on the position,
never on how the row grew or was cut back.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.models.formats.number_formats import stored_bytes, words_dtype
from engine.planning.units import byte_size
from engine.runtimes.native.bindings import KEY_BLOCK, CSegment
from engine.runtimes.protocol import Bytes, Fill, RowArray, RowPart, as_bytes

SMALLEST_PAGE = 128
"""Minimum positions of a page. A page of a long row has an eighth of the row's length, so that there are few pages."""


@dataclass(frozen=True)
class AlikeLayers:
    """Layers with attention whose keys have the same ``heads`` of the same ``width`` and their values the same
    ``value_width``, and whose queries see the same ``window`` of positions, their own included (0: all)."""

    layers: int
    heads: int
    width: int
    value_width: int
    window: int = 0
    plain: bool = False
    """Whether what is kept is plain numbers, by position, whatever the format of the page: in float32 or bfloat16."""

    def first_seen(self, position: int) -> int:
        """The oldest position that a query at ``position`` sees."""
        return max(0, position + 1 - self.window) if self.window else 0


@dataclass(frozen=True)
class PageShape:
    """The layout of a position: keys and values of all layers with attention, stored in ``number_format`` (``BF16``,
    ``F32``, ``Q8_0`` or ``Q4_0``).

    Without ``has_values`` the keys are also the values. ``blocks``: the keys by which attention chooses blocks of
    positions; None where it sees all.
    """

    alike: tuple[AlikeLayers, ...]
    number_format: str
    has_values: bool = True
    blocks: AlikeLayers | None = None

    @property
    def arrays(self) -> tuple[tuple[str, AlikeLayers], ...]:
        """Names of a page's arrays and the layers in them, with the width of what the array holds, in the order of the
        page."""
        held: list[tuple[str, AlikeLayers]] = []
        for alike in self.alike:
            held.append(("keys", alike))
            if self.has_values:
                held.append(("values", replace(alike, width=alike.value_width)))
        return tuple(held if self.blocks is None else [*held, ("blocks", self.blocks)])

    def format_of(self, alike: AlikeLayers) -> str:
        """The format in which an array of ``alike`` is."""
        return "BF16" if alike.plain and self.number_format != "F32" else self.number_format

    def block_bytes(self, alike: AlikeLayers) -> int:
        """Bytes of KEY_BLOCK positions of what one head of ``alike`` keeps. Packed ones include the scales."""
        return KEY_BLOCK * stored_bytes(self.format_of(alike), (alike.width,))

    def array_bytes(self, alike: AlikeLayers) -> int:
        """Bytes of one position in one array."""
        return alike.layers * alike.heads * self.block_bytes(alike) // KEY_BLOCK

    @property
    def token_bytes(self) -> int:
        return sum(self.array_bytes(alike) for _, alike in self.arrays)


_GIVEN_BACK = getattr(mmap, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", None)
"""Advice by which the system takes memory back. Reading it again gives zeros, or what was there before."""


def _untouched(nbytes: int) -> mmap.mmap:
    """Zeros that take memory only where they are written, so that a half-filled page of keys takes half its bytes.

    A weight of zero does not hide a NaN, so values must be numbers from the start. numpy would ask the system for huge
    pages, which a single write to each head of each layer would fill.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


class Page:
    """Memory for ``capacity`` positions of ``rows`` rows.

    ``arrays`` are those of :attr:`PageShape.arrays`, [rows, layers, heads, blocks, words of KEY_BLOCK positions];
    trunk.h describes the inside of a block. Positions before ``frozen`` are visible to others and must not change.
    ``users`` may refer to the page. The first ``forgotten`` blocks of each array were given back: only queries before
    the position ``unseen_from`` saw them.
    """

    def __init__(self, shape: PageShape, rows: int, capacity: int) -> None:
        self.shape = shape
        capacity = _whole_blocks(capacity)
        word = words_dtype(shape.number_format)
        blocks = capacity // KEY_BLOCK
        sizes = [(rows, alike.layers, alike.heads, blocks, shape.block_bytes(alike)) for _, alike in shape.arrays]
        self._mappings = [_untouched(math.prod(size)) for size in sizes]
        self.arrays = tuple(
            np.frombuffer(mapping, word).reshape(*size[:-1], -1)
            for mapping, size in zip(self._mappings, sizes, strict=True)
        )
        self.capacity = capacity
        self.frozen = 0
        self.users: weakref.WeakSet[Segments] = weakref.WeakSet()
        self.forgotten = [0] * len(self.arrays)
        self.unseen_from = 0

    def forget(self, length: int, origin: int) -> None:
        """Give back the blocks that no query at ``length`` or later sees. ``origin``: the position at which the page
        begins."""
        for index, (mapping, (_, alike)) in enumerate(zip(self._mappings, self.shape.arrays, strict=True)):
            before, blocks = self.forgotten[index], self.capacity // KEY_BLOCK
            unseen = min(blocks, (alike.first_seen(length) - origin) // KEY_BLOCK)
            if unseen <= before:
                continue
            self.forgotten[index], self.unseen_from = unseen, length
            if _GIVEN_BACK is None:
                continue
            nbytes = self.shape.block_bytes(alike)
            whole = blocks * nbytes
            for head in range(self.rows * alike.layers * alike.heads) if unseen < blocks else ():
                # A page of memory that the last call left, because it was half of use, is unused now.
                start = max(
                    _whole_pages(head * whole), (head * whole + before * nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                )
                end = (head * whole + unseen * nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if start < end:
                    mapping.madvise(_GIVEN_BACK, start, end - start)
            if unseen == blocks:
                mapping.madvise(_GIVEN_BACK)

    @property
    def forgotten_bytes(self) -> int:
        """Bytes of the positions that were given back."""
        arrays = zip(self.forgotten, self.shape.arrays, strict=True)
        return sum(self.rows * blocks * KEY_BLOCK * self.shape.array_bytes(alike) for blocks, (_, alike) in arrays)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays) - self.forgotten_bytes

    @property
    def rows(self) -> int:
        return int(self.arrays[0].shape[0])


@dataclass(frozen=True)
class Segment:
    """Positions ``start`` to ``start + count`` of the rows, stored in ``page`` from ``offset`` on.

    ``grows``: only the owner of this segment may append to it.
    """

    page: Page
    offset: int
    start: int
    count: int
    grows: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def full(self) -> bool:
        """Whether the segment reaches the end of its page."""
        return self.offset + self.count == self.page.capacity


class Segments:
    """The pages of rows of equal length. Pages of one row are shared by all rows.

    ``states``: the states of layers without keys and values.
    """

    def __init__(
        self, shape: PageShape, rows: int = 1, segments: Sequence[Segment] = (), states: States | None = None
    ) -> None:
        self.shape = shape
        self.rows = rows
        self.states = states
        self._segments = list(segments)
        self.length = segments[-1].end if segments else 0
        for segment in segments:
            segment.page.users.add(self)

    def room_for(self, tokens: int) -> tuple[Any, int]:
        """A C array of segments for a pass that adds ``tokens``, and their number. They take effect with
        :meth:`commit`."""
        needed = self.length + tokens
        self._grow(needed)
        table = (CSegment * len(self._segments))()
        for entry, segment in zip(table, self._segments, strict=True):
            page = segment.page
            each = 2 if self.shape.has_values else 1
            for kind in range(len(self.shape.alike)):
                keys, values = page.arrays[each * kind], page.arrays[each * kind + each - 1]
                entry.keys[kind], entry.values[kind] = keys.ctypes.data, values.ctypes.data
                if self.rows > 1 and page.rows > 1:
                    entry.key_stride[kind], entry.value_stride[kind] = keys.strides[0], values.strides[0]
            if self.shape.blocks is not None:
                entry.blocks = page.arrays[-1].ctypes.data
                entry.block_stride = page.arrays[-1].strides[0] if self.rows > 1 and page.rows > 1 else 0
            entry.capacity, entry.offset = page.capacity, segment.offset
            entry.start, entry.count = segment.start, segment.count
        return table, len(self._segments)

    def commit(self, tokens: int) -> None:
        """Record a successful pass over ``tokens`` positions."""
        self.length += tokens
        if self.states is not None:
            self.states.commit()

    def _grow(self, needed: int) -> None:
        """Extend the segments to ``needed`` positions, in the last page and in new ones."""
        end = self._segments[-1].end if self._segments else 0
        while end < needed:
            last = self._segments[-1] if self._segments else None
            if last is None or last.full or not (last.grows or self.rows == 1):
                page = Page(self.shape, self.rows, _room_from(end))
                page.users.add(self)
                last = Segment(page, 0, end, 0, True)
                self._segments.append(last)
            elif not last.grows:
                last = _copied(last)
                last.page.users.add(self)
            count = min(last.page.capacity - last.offset, needed - last.start)
            self._segments[-1] = replace(last, count=count)
            end = last.start + count

    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        segments = []
        for segment in self._segments:
            if segment.start >= length:
                break
            count = min(segment.count, length - segment.start)
            # Positions behind the cut that other rows refer to must not change.
            grows = segment.grows and segment.offset + count >= segment.page.frozen
            segments.append(replace(segment, count=count, grows=grows))
        self._segments = segments
        self.length = length

    @property
    def shortest_cut(self) -> int:
        """The fewest positions to which :meth:`truncate` can cut the rows."""
        return max((segment.page.unseen_from for segment in self._segments), default=0)

    def forget_unseen(self, length: int) -> None:
        """Give back the positions that no query at ``length`` or later sees, nor one of other rows that share them."""
        for segment in self._segments:
            sharing = [user.length for user in segment.page.users if user._refers_to(segment.page)]
            segment.page.forget(min(length, *sharing), segment.start - segment.offset)

    def _refers_to(self, page: Page) -> bool:
        return any(segment.page is page for segment in self._segments)

    @property
    def forgotten_bytes(self) -> int:
        """Bytes of the positions that were given back."""
        return sum(segment.page.forgotten_bytes for segment in self._segments)

    def _seen(self) -> list[Segment]:
        """The segments as other rows may see them, frozen."""
        seen = []
        for segment in self._segments:
            count = min(segment.count, self.length - segment.start)
            if count > 0:
                segment.page.frozen = max(segment.page.frozen, segment.offset + count)
                seen.append(replace(segment, count=count, grows=False))
        return seen

    def shared(self, rows: int) -> Segments:
        """``rows`` rows that share the contents of this single row by reference and continue independently."""
        return Segments(self.shape, rows, self._seen(), None if self.states is None else self.states.shared(rows))

    def move(self, changed: Sequence[tuple[int, int, int]]) -> int:
        """Copy for each (row, parent, first) the contents of ``parent`` from position ``first`` on to ``row``. Returns
        the bytes moved.

        All are read before any is written.
        """
        moved = 0
        for segment in self._segments:
            if segment.page.rows == 1:
                continue
            stop = min(segment.end, self.length)
            parts = []
            for row, parent, first in changed:
                begin = max(first, segment.start)
                if begin >= stop:
                    continue
                low, high = segment.offset + begin - segment.start, segment.offset + stop - segment.start
                blocks = slice(low // KEY_BLOCK, -(-high // KEY_BLOCK))
                page = segment.page
                # Whole blocks: what lies before `first` in one is the same in both rows.
                parts.append((row, blocks, [array[parent, :, :, blocks].copy() for array in page.arrays]))
                moved += (high - low) * self.shape.token_bytes
            for row, blocks, copies in parts:
                for array, copy in zip(segment.page.arrays, copies, strict=True):
                    array[row, :, :, blocks] = copy
        return moved

    def beginning(self, length: int, states: States) -> Segments:
        """One row with the first ``length`` positions of this single row, which continues from ``states``."""
        begun = Segments(self.shape, 1, self._seen(), states)
        begun.truncate(length)
        return begun

    def contents(self, checkpoint: Segments | None) -> list[RowArray]:
        """Contents of a single row: each page's filled blocks, and the states of the row and of its ``checkpoint``."""
        filled = [(part.page, min(part.count, self.length - part.start)) for part in self._segments]
        pages = [(page, count) for page, count in filled if count > 0]
        states = [part.states for part in (self, checkpoint) if part is not None and part.states is not None]

        def read(array: NDArray[Any], name: str, alike: AlikeLayers, forgotten: int, filled: int) -> Bytes:
            blocks = array[0, :, :, forgotten : -(-filled // KEY_BLOCK)].copy()
            if filled % KEY_BLOCK and blocks.size:
                _clear(blocks[:, :, -1], filled % KEY_BLOCK, self.shape.number_format, alike, name == "keys")
            return as_bytes(blocks)

        reads: list[Callable[[], Bytes]] = [
            partial(read, array, *described, forgotten, filled)
            for page, filled in pages
            for array, described, forgotten in zip(page.arrays, self.shape.arrays, page.forgotten, strict=True)
        ]
        reads += [part.only_row for part in states]
        forgotten = [blocks for page, _ in pages for blocks in page.forgotten]
        parts = _parts(self.shape, self.length, [part.numbers for part in states], forgotten)
        return [RowArray(*described) for described in zip(parts, reads, strict=True)]

    @classmethod
    def restored(
        cls, shape: PageShape, length: int, begun: int, parts: Sequence[RowPart], fill: Fill, state_numbers: int | None
    ) -> tuple[Segments, Segments | None]:
        """The row and its checkpoint, as in :meth:`engine.runtimes.protocol.LoadedModel.restored`.

        ``state_numbers``: floats of a row's states; None without states.
        """
        count = 0 if state_numbers is None else 2 if begun else 1
        if begun > length or (begun and state_numbers is None):
            raise ValueError(f"a row of {length} tokens has no checkpoint after {begun}")
        row = cls(shape)
        row._grow(length)
        row.length = length
        arrays = [(segment, index) for segment in row._segments for index in range(len(shape.arrays))]
        held = [part.shape[2] for part in parts[: len(arrays)] if len(part.shape) == 4]
        forgotten = [
            -(-segment.count // KEY_BLOCK) - blocks if shape.arrays[index][1].window else 0
            for (segment, index), blocks in zip(arrays, held, strict=False)
        ]
        if (
            list(parts) != _parts(shape, length, [state_numbers or 0] * count, forgotten)
            or min(forgotten, default=0) < 0
        ):
            raise ValueError("a row of this model has other parts")
        for (segment, index), gone in zip(arrays, forgotten, strict=True):
            page = segment.page
            page.forgotten[index] = gone
            if gone:
                page.unseen_from = max(
                    page.unseen_from, segment.start + gone * KEY_BLOCK - 1 + shape.arrays[index][1].window
                )
        pairs = zip(row._segments, row._segments[1:], strict=False)
        gaps = (
            gone and before < earlier.page.capacity // KEY_BLOCK
            for earlier, later in pairs
            for before, gone in zip(earlier.page.forgotten, later.page.forgotten, strict=True)
        )
        if row.shortest_cut > length or any(gaps):
            raise ValueError(f"a row of {length} tokens lacks positions that it sees")
        for segment in row._segments:
            for array, gone in zip(segment.page.arrays, segment.page.forgotten, strict=True):
                blocks = array[0, :, :, gone : -(-segment.count // KEY_BLOCK)]
                content = np.empty_like(blocks, order="C")
                fill(content.view(np.uint8).reshape(-1))
                blocks[:] = content
        if state_numbers is None:
            return row, None
        row.states = States.filled(state_numbers, fill)
        return row, row.beginning(begun, States.filled(state_numbers, fill)) if begun else None

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and states, including shared ones."""
        states = 0 if self.states is None else self.states.nbytes
        return states + sum(segment.page.nbytes for segment in self._segments)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _whole_blocks(positions: int) -> int:
    return -(-positions // KEY_BLOCK) * KEY_BLOCK


def _room_from(position: int) -> int:
    """Number of positions in the page that begins at ``position``."""
    return max(SMALLEST_PAGE, position // 8)


def _parts(shape: PageShape, length: int, states: Sequence[int], forgotten: Sequence[int]) -> list[RowPart]:
    """The parts of a single row with ``length`` positions. ``states``: number of floats of each state. ``forgotten``:
    number of blocks of each array that were given back; none of the arrays after those."""
    parts = []
    start = 0
    gone = iter(forgotten)
    while start < length:
        count = min(_whole_blocks(_room_from(start)), length - start)
        for name, alike in shape.arrays:
            blocks = -(-count // KEY_BLOCK) - next(gone, 0)
            size = (alike.layers, alike.heads, blocks, shape.block_bytes(alike))
            parts.append(RowPart(f"{name} from {start}", "uint8", size))
        start += count
    return parts + [RowPart(f"states {index}", "float32", (numbers,)) for index, numbers in enumerate(states)]


def _clear(block: NDArray[Any], filled: int, number_format: str, alike: AlikeLayers, keys: bool) -> None:
    """Zero the positions after the first ``filled`` of ``block`` [layers, heads, words], which trunk.h describes.

    Positions that were cut off are not part of the row. ``keys``: the block contains keys, not values.
    """
    places, width = block.shape[:2], alike.width
    if alike.plain:
        block.reshape(*places, KEY_BLOCK, -1)[:, :, filled:] = 0
        return
    if number_format == "F32":
        if keys:
            block.reshape(*places, width, KEY_BLOCK)[..., filled:] = 0
        else:
            block.reshape(*places, KEY_BLOCK, width)[:, :, filled:] = 0
        return
    numbers = block
    if number_format in ("Q8_0", "Q4_0"):
        count = KEY_BLOCK * width // (1 if number_format == "Q8_0" else 2)
        numbers = block[..., :count]
        block[..., count:].view(np.uint16).reshape(*places, -1, KEY_BLOCK)[..., filled:] = 0
    if number_format == "Q4_0" and keys:
        numbers.reshape(*places, width // 2, KEY_BLOCK)[..., filled:] = 0
    elif number_format == "Q4_0":
        pairs = numbers.reshape(*places, KEY_BLOCK // 2, width)
        pairs[:, :, -(-filled // 2) :] = 0
        if filled % 2:
            pairs[:, :, filled // 2] &= 15
    elif keys:
        numbers.reshape(*places, width // 2, KEY_BLOCK, 2)[:, :, :, filled:] = 0
    else:
        pairs = numbers.reshape(*places, KEY_BLOCK // 2, width, 2)
        pairs[:, :, -(-filled // 2) :] = 0
        if filled % 2:
            pairs[:, :, filled // 2, :, 1] = 0


def _copied(segment: Segment) -> Segment:
    """A copy of a single row's positions in their own page, at the same places, with the same free room after them."""
    old, filled = segment.page, segment.offset + segment.count
    page = Page(old.shape, 1, old.capacity)
    page.forgotten, page.unseen_from = list(old.forgotten), old.unseen_from
    blocks = -(-filled // KEY_BLOCK)
    for array, copied, forgotten in zip(page.arrays, old.arrays, old.forgotten, strict=True):
        array[:, :, :, forgotten:blocks] = copied[:, :, :, forgotten:blocks]
    return replace(segment, page=page, grows=True)


# --- states of layers without keys and values ------------------------------------------------------------------------


class _Buffer:
    """The states of one row. ``shared``: rows of other caches read them, too, so they must not change any more."""

    def __init__(self, numbers: int) -> None:
        """Allocate ``numbers`` floats. Raises ModelError (memory)."""
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
        """``rows``: the states of each row; None before its first pass."""
        self._numbers = numbers
        self._rows = list(rows)
        self._next: list[_Buffer] | None = None
        self._spare: list[_Buffer] = []

    @classmethod
    def of_one_row(cls, numbers: int) -> States:
        """The states of a row without tokens."""
        return cls(numbers, [None])

    @classmethod
    def filled(cls, numbers: int, fill: Fill) -> States:
        """The states of one row, whose bytes ``fill`` writes."""
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
        """Addresses from which a pass reads the states of each row, and to which it writes them, as C arrays.

        ``in_place``: the pass cannot be cancelled, so rows that do not share their states change them in place.
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
        """Record that the pass has succeeded."""
        assert self._next is not None
        self._drop(self._rows, self._next)
        self._rows, self._next = list(self._next), None

    def give_up(self) -> None:
        """Restore the states of before the pass, which has failed."""
        self._drop(self._next or [], self._rows)
        self._next = None

    def _drop(self, rows: Sequence[_Buffer | None], kept: Sequence[_Buffer | None]) -> None:
        """Release the states among ``rows`` that are not among ``kept``, so that they may be written again."""
        known = {id(row) for row in kept}
        for row in rows:
            if row is not None and not row.shared and id(row) not in known:
                known.add(id(row))
                self._spare.append(row)

    def shared(self, rows: int) -> States:
        """``rows`` rows that continue independently from the states of this single row."""
        only = self._rows[0]
        if only is not None:
            only.shared = True
        return States(self._numbers, [only] * rows)

    def reorder(self, parents: Sequence[int]) -> None:
        """Let row i continue from the states of ``parents[i]``. Nothing is moved."""
        rows = [self._rows[parent] for parent in parents]
        self._drop(self._rows, rows)
        self._rows = rows

    @property
    def nbytes(self) -> int:
        """Bytes of the states, including shared ones."""
        buffers = {id(buffer): buffer for buffer in (*self._rows, *self._spare) if buffer is not None}
        return sum(buffer.numbers.nbytes for buffer in buffers.values())


def joined_addresses(of_caches: Sequence[tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """What :meth:`States.begin` gave for several caches, for all their rows; None if there are none."""
    if len(of_caches) < 2:
        return of_caches[0] if of_caches else None
    sides = ([place for addresses in side for place in addresses] for side in zip(*of_caches, strict=True))
    before, after = ((ctypes.c_void_p * len(side))(*side) for side in sides)
    return before, after


def _addresses(buffers: Sequence[_Buffer | None]) -> Any:
    places = (ctypes.c_void_p * len(buffers))()
    for index, buffer in enumerate(buffers):
        places[index] = None if buffer is None else buffer.numbers.ctypes.data
    return places
