"""The rate at which weights come from the disk, for models that do not fit in memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from engine.models.formats.byte_map import FileMapping

SAMPLE_BYTES = 256 * 2**20
"""Maximum bytes read to measure a disk."""
SAMPLE_SECONDS = 0.3
"""Time after which no further block is read, in seconds."""
_PIECE = 2**20
"""Bytes that are announced to the system at a time, as experts are."""
_AT_ONCE = 8
"""Pieces announced before the first of them is wanted: about what a layer's experts lack."""
_PIECES = SAMPLE_BYTES // _PIECE
_LOOKED_AT = 16
"""Factor on the number of pieces to read: so many are examined to find pieces that are not in memory."""
_PAGE = mmap.PAGESIZE

_Key = tuple[Path, int, int]
_known: dict[_Key, float | None] = {}


def disk_rate(path: Path) -> float | None:
    """The :func:`read_rate` of ``path``, measured once per process and state of the file."""
    try:
        about = path.stat()
    except OSError:
        return None
    key = (path, about.st_size, about.st_mtime_ns)
    if key not in _known:
        _known[key] = read_rate(path)
    return _known[key]


def notice_beyond_memory(
    what: str,
    nbytes: int,
    files: Iterable[FileMapping],
    available: int,
    measure: Callable[[Path], float | None] | None = None,
) -> str | None:
    """A line for the person if ``nbytes`` of ``what`` (experts, weights), mapped from ``files``, do not fit in
    ``available`` bytes of memory, with the disk's rate as ``measure`` (bytes per second of the file, or None) finds it;
    None if they fit."""
    if nbytes <= available:
        return None
    text = (
        f"The model's {nbytes / 1e9:.1f} GB of {what} do not fit in the {available / 1e9:.1f} GB of memory that are "
        "free for it, so some are read from disk each time they are used"
    )
    largest = max(files, key=lambda mapped: mapped.size, default=None)
    rate = (measure or read_rate)(largest.path) if largest is not None else None
    if rate is None:
        return f"{text}, which is slow."
    return f"{text}: at {rate / 1e9:.2f} GB/s, as measured just now."


def read_rate(path: Path) -> float | None:
    """Bytes per second at which pieces of ``path`` come from its disk into memory. None if that can't be told.

    They come as experts do: from anywhere in the file, a few at once that were announced to the system, as pages that
    it first makes room for. At most SAMPLE_BYTES are read, for about SAMPLE_SECONDS; pieces that are in memory are left
    out. If all of them are, some are dropped from it.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = os.open(path, os.O_RDONLY)
            stack.callback(os.close, file)
            # No byte of the mapping is touched: a file that shrinks meanwhile would end the process.
            mapped = stack.enter_context(mmap.mmap(file, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE))
            buffer = stack.enter_context(mmap.mmap(-1, _PIECE))
            pieces = range(0, len(mapped), _PIECE)
            # Others each time: the disk, too, has a memory of what it read.
            starts = random.sample(pieces, min(len(pieces), _LOOKED_AT * _PIECES))
            return _timed(file, mapped, buffer, _absent(file, mapped, starts))
    except (OSError, ValueError):
        return None


def _absent(file: int, mapped: mmap.mmap, starts: Sequence[int]) -> list[int]:
    """The members of ``starts`` whose pieces are not in memory, at most as many as are to be read."""
    pages = _PagesInMemory(mapped)
    can_drop = hasattr(os, "posix_fadvise")
    if can_drop:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no guess of the system adds what is not wanted
    told = not can_drop or os.fstat(file).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{file}", os.W_OK)
    found = list(islice((start for start in starts if told and not pages.any(start)), _PIECES))
    if found or not can_drop:
        return found
    for start in starts[:_PIECES]:
        os.posix_fadvise(file, start, _PIECE, os.POSIX_FADV_DONTNEED)
    # Of a file that one may only read Linux tells nothing: what was dropped is taken to be gone.
    return [start for start in starts[:_PIECES] if not (told and pages.any(start))]


def _timed(file: int, mapped: mmap.mmap, buffer: mmap.mmap, starts: Sequence[int]) -> float | None:
    begun = time.perf_counter()
    done = 0
    for first in range(0, len(starts), _AT_ONCE):
        together = starts[first : first + _AT_ONCE]
        for start in together:
            mapped.madvise(mmap.MADV_WILLNEED, start, min(_PIECE, len(mapped) - start))
        for start in together:
            done += os.preadv(file, [buffer], start)
        if time.perf_counter() - begun > SAMPLE_SECONDS:
            break
    seconds = time.perf_counter() - begun
    return done / seconds if done and seconds > 0 else None


class _PagesInMemory:
    """The pages of a mapped file that are in the system's memory."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._size = len(mapped)
        self._address = np.frombuffer(mapped, np.uint8).ctypes.data
        self._states = np.zeros(_PIECE // _PAGE, np.uint8)

    def any(self, start: int) -> bool:
        """Whether any page of the piece at ``start`` is in memory, or that cannot be told."""
        nbytes = min(_PIECE, self._size - start)
        failed = _libc.mincore(self._address + start, nbytes, self._states.ctypes.data)
        return bool(failed) or bool((self._states[: -(-nbytes // _PAGE)] & 1).any())


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
