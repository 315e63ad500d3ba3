"""The rate at which weights come from the disk, for models that do not fit in memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.models.byte_map import FileMapping

SAMPLE_BYTES = 256 * 2**20
"""Maximum bytes read to measure a disk."""
SAMPLE_SECONDS = 0.3
"""Time after which no further block is read, in seconds."""
_BLOCK = 8 * 2**20
_PAGE = mmap.PAGESIZE

_Key = tuple[Path, int, int]
_known: dict[_Key, float | None] = {}


def disk_rate(path: Path) -> float | None:
    """As :func:`read_rate`, measured once per process and state of the file."""
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
    """Bytes per second at which ``path`` comes from its disk, not from the system's memory. None if that can't be told.

    Reads at most SAMPLE_BYTES from the middle of the file, for about SAMPLE_SECONDS.
    """
    try:
        size = path.stat().st_size
        start = max(0, (size - SAMPLE_BYTES) // 2) // _BLOCK * _BLOCK
        blocks: Iterable[int] = range(start, min(start + SAMPLE_BYTES, size), _BLOCK)
        with contextlib.ExitStack() as stack:
            file, past_the_cache = _open_uncached(path, start, stack)
            if not past_the_cache:
                blocks = [block for block in blocks if not _any_cached(file, block, min(_BLOCK, size - block))]
            buffer = stack.enter_context(mmap.mmap(-1, _BLOCK))
            return _timed(file, buffer, blocks)
    except (OSError, ValueError):
        return None


def _timed(file: int, buffer: mmap.mmap, blocks: Iterable[int]) -> float | None:
    begun = time.perf_counter()
    done = 0
    for block in blocks:
        count = os.preadv(file, [buffer], block)
        done += count
        if count < _BLOCK or time.perf_counter() - begun > SAMPLE_SECONDS:
            break
    seconds = time.perf_counter() - begun
    return done / seconds if done and seconds > 0 else None


def _any_cached(file: int, start: int, nbytes: int) -> bool:
    """Whether the system's memory has any page of ``nbytes`` of ``file``, which begin at a multiple of a page."""
    states = (ctypes.c_uint8 * -(-nbytes // _PAGE))()
    with mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start) as mapped:
        pages = ctypes.c_uint8.from_buffer(mapped)
        try:
            failed = _libc.mincore(ctypes.addressof(pages), nbytes, ctypes.addressof(states))
        finally:
            del pages  # a mapping that is looked at cannot be closed
    return bool(failed) or any(state & 1 for state in states)


def _open_uncached(path: Path, start: int, stack: contextlib.ExitStack) -> tuple[int, bool]:
    """``path``, open for reading, and whether every read goes past the system's cache.

    Linux: O_DIRECT; where a file system lacks that, what is cached of the range is dropped first. macOS: F_NOCACHE adds
    nothing to the cache and still takes what is there, so the caller leaves cached blocks out.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            file = os.open(path, os.O_RDONLY | direct)
        except OSError:  # not every file system has it
            pass
        else:
            stack.callback(os.close, file)
            return file, True
    file = os.open(path, os.O_RDONLY)
    stack.callback(os.close, file)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    elif hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
    return file, False


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
