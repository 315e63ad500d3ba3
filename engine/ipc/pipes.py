"""The engine's side of the pipes: frames have descriptors of their own, and everything else printed goes to a log.

A library that prints, in Python or in native code, would otherwise corrupt the stream of frames.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

LOG_LIMIT = 4 * 1024 * 1024
"""Size in bytes at which the log is renamed to ``engine.log.1``; at most two such files are on disk."""


class LogFile:
    """The log of descriptors 1 and 2. The file is renamed when it grows large."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        self.path = path
        self._limit = limit
        self.problem: str | None = None
        """A sentence on why nothing is logged; None if the log works."""
        self.open()

    def open(self) -> None:
        """Point descriptors 1 and 2 at the file, or at the null device if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.path.exists() and self.path.stat().st_size > self._limit:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self.problem = f"The engine keeps no log, because {self.path} cannot be written: {error.strerror}."
            target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def roll_if_large(self) -> None:
        """Rename the file if it is too large. Must be called now and then."""
        if self.problem is None:
            with contextlib.suppress(OSError):
                if os.fstat(1).st_size > self._limit:
                    self.open()


@dataclass(frozen=True)
class Pipes:
    """Descriptors of the frames, and the log that took the place of the standard streams."""

    requests: int
    events: int
    log: LogFile


def claim_standard_streams(log: Path) -> Pipes:
    """Keep descriptors 0 and 1 for frames under other numbers, not inherited by children, and redirect 0 to nothing,
    1 and 2 to ``log``."""
    requests, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    file = LogFile(log)
    sys.stdout, sys.stderr = _printing_to(1), _printing_to(2)
    return Pipes(requests, events, file)


class _Forgiving(io.FileIO):
    """A stream that ignores errors: a full disk must not turn a print into an exception."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _printing_to(descriptor: int) -> TextIO:
    raw = io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
