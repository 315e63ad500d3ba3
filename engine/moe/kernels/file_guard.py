"""Mapped files that another program shortens, or a disk fails to read, while they are in use.

Touching a page that is gone ends a process. With the native library it does not: the page reads as zeros and is
counted, and :meth:`FileGuard.check` says so before anything computed from it is handed out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from engine.errors import ModelError
from engine.models.formats.byte_map import FileMapping
from engine.moe.kernels.bindings import load, path


class FileGuard:
    """Watches ``files`` until it is closed, and keeps them mapped. Without the library it does nothing."""

    def __init__(self, files: Iterable[FileMapping]) -> None:
        self._places: dict[int, FileMapping] = {}
        self._native = _functions()
        if self._native is not None:
            for mapped in files:
                place = self._native.pllm_guard_add(mapped.address, mapped.size)
                if place >= 0:
                    self._places[place] = mapped

    def check(self) -> None:
        """Raises ModelError if a page of a file was read that is not there."""
        for place, mapped in self._places.items():
            if self._native is not None and self._native.pllm_guard_faults(place):
                raise ModelError(
                    f"A part of {mapped.path} could not be read: it was shortened while the model was open, or its "
                    "disk is failing; check the disk, then load the model again.",
                    kind="disk",
                )

    def close(self) -> None:
        """Stop watching: from here on a page that is gone ends the process again."""
        while self._places and self._native is not None:
            self._native.pllm_guard_remove(self._places.popitem()[0])

    def __del__(self) -> None:
        if getattr(self, "_places", None):
            self.close()


@contextmanager
def unchanged(files: Sequence[FileMapping]) -> Iterator[None]:
    """For reading ``files`` before a model guards them itself.

    Raises ModelError at the end if one was changed meanwhile, or a page of it was not there, also in place of an error
    that came of that.
    """
    guard = FileGuard(files)
    try:
        yield
    finally:
        try:
            for mapped in files:
                mapped.check_unchanged()
            guard.check()
        finally:
            guard.close()


def _functions() -> ctypes.CDLL | None:
    """The library with the guard's functions declared, or None where there is none."""
    if path() is None:
        return None
    try:
        native = load()
        native.pllm_guard_add.argtypes, native.pllm_guard_add.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
        native.pllm_guard_faults.argtypes, native.pllm_guard_faults.restype = [ctypes.c_int], ctypes.c_int64
        native.pllm_guard_remove.argtypes, native.pllm_guard_remove.restype = [ctypes.c_int], None
    except (ModelError, AttributeError):
        return None
    return native
