"""A file that is received in several ranges at once: which bytes of it are here, also after the process was killed.

The bytes lie where they belong in the whole file. How far each range is stands in a note beside it, which is written
when those bytes are on the disk. Without a note, what is here is the beginning of the file.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.models.formats.json_files import read_text
from engine.system.durable_files import new_file

_MOST_NOTE = 10_000
"""Maximum bytes of a note."""
_NOTED = 64 << 20
"""Number of bytes of a range after which it is noted how far it is."""


@dataclass
class Range:
    """Bytes of a file up to ``end``, of which those before ``have`` are here."""

    have: int
    end: int
    noted: int = 0


class _Note(msgspec.Struct):
    size: int
    ranges: list[tuple[int, int]]


class PartialFile:
    """The file at ``path`` that is to have ``size`` bytes, in at most ``most`` ranges. Raises OSError."""

    def __init__(self, path: Path, size: int, most: int) -> None:
        self._path = path
        self._size = size
        self._mutex = threading.Lock()
        noted = _ranges_noted(path, size)
        self.ranges = noted or _cut(path.stat().st_size, size, most)
        if noted is None:
            # The note comes first: a file of the whole size without one is taken for complete.
            self._write_note()
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._file, size)

    @property
    def have(self) -> int:
        """Number of bytes that are here."""
        return self._size - sum(each.end - each.have for each in self.ranges)

    def write(self, wanted: Range, data: bytes) -> int:
        """Add ``data`` to ``wanted``, of which what is beyond its end is left out. From any thread."""
        left = memoryview(data)[: wanted.end - wanted.have]
        while left:
            written = os.pwrite(self._file, left, wanted.have)
            wanted.have += written
            left = left[written:]
        if wanted.have - wanted.noted >= _NOTED:
            self.note()
        return len(data)

    def note(self) -> None:
        """Sync what is here to the disk, and note how far each range is. From any thread."""
        with self._mutex:
            reached = [each.have for each in self.ranges]
            os.fsync(self._file)
            for each, have in zip(self.ranges, reached, strict=True):
                each.noted = have
            self._write_note()

    def close(self) -> None:
        """Note what is here, of a whole file nothing, and close the file."""
        try:
            self.note()
            if self.have == self._size:
                _note_of(self._path).unlink()
        finally:
            os.close(self._file)

    def _write_note(self) -> None:
        ranges = [(each.noted, each.end) for each in self.ranges]
        with new_file(_note_of(self._path)) as file:
            file.write(msgspec.json.encode(_Note(self._size, ranges)))


def bytes_here(path: Path, size: int) -> int:
    """Number of bytes that are here of the file at ``path``, which is to have ``size``. Raises OSError."""
    ranges = _ranges_noted(path, size)
    return path.stat().st_size if ranges is None else size - sum(each.end - each.have for each in ranges)


def is_in_ranges(path: Path, size: int) -> bool:
    """Whether more of the file at ``path`` is here than its beginning, or may be."""
    return _ranges_noted(path, size) is not None


def keep_beginning(path: Path, size: int) -> None:
    """Leave of the file at ``path`` only what is here without a gap. Raises OSError."""
    ranges = _ranges_noted(path, size)
    if ranges is not None:
        os.truncate(path, ranges[0].have)
    _note_of(path).unlink(missing_ok=True)


def _cut(have: int, size: int, most: int) -> list[Range]:
    """What is missing of a file of ``size`` bytes that has the first ``have``, in ``most`` ranges of one length."""
    length = -(-(size - have) // most)
    starts = range(have, size, length)
    return [Range(start, min(start + length, size), start) for start in starts]


def _ranges_noted(path: Path, size: int) -> list[Range] | None:
    """The ranges in the note of ``path``; None if there is no note, or one of another file."""
    try:
        note = msgspec.json.decode(read_text(_note_of(path), _MOST_NOTE), type=_Note)
        here = path.stat().st_size
    except (ModelError, OSError, msgspec.DecodeError, RecursionError):
        return None
    place = note.ranges[0][0] if note.ranges else -1
    for have, end in note.ranges:
        if not place <= have <= end <= size or have > here:
            return None
        place = end
    if note.size != size or place != size:
        return None
    return [Range(have, end, have) for have, end in note.ranges]


def _note_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.ranges.part")
