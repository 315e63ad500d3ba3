"""Giving a part of a file back to the disk: the bytes read as zeros from then on and take no room."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MAC_PUNCH_HOLE = 99
"""``F_PUNCHHOLE`` of ``fcntl``."""
_MAC_BLOCK = 4096
_UNABLE = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


def punch(folder: Path, spans: Iterable[tuple[str, int, int]]) -> int:
    """Free ``spans`` (file, start, stop) of ``folder``; the bytes of disk that this freed. Where the file system cannot
    do that, the bytes stay. Raises OSError."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for name, start, stop in spans:
        by_file.setdefault(name, []).append((start, stop))
    freed = 0
    for name, holes in by_file.items():
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            before = os.fstat(descriptor).st_blocks
            for start, stop in holes:
                _punch(descriptor, start, stop)
            os.fsync(descriptor)
            freed += max(0, before - os.fstat(descriptor).st_blocks) * 512
        finally:
            os.close(descriptor)
    return freed


def _punch(descriptor: int, start: int, stop: int) -> None:
    try:
        if sys.platform == "darwin":
            _punch_mac(descriptor, start, stop)
        elif sys.platform == "linux":
            _punch_linux(descriptor, start, stop)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise


def _punch_linux(descriptor: int, start: int, stop: int) -> None:
    allocate = ctypes.CDLL(None, use_errno=True).fallocate64
    allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if allocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, stop - start):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _punch_mac(descriptor: int, start: int, stop: int) -> None:
    """Whole blocks only."""
    import fcntl

    first, last = start + -start % _MAC_BLOCK, stop - stop % _MAC_BLOCK
    if first < last:
        fcntl.fcntl(descriptor, _MAC_PUNCH_HOLE, struct.pack("IIqq", 0, 0, first, last - first))
