"""Keeps stray output of this process away from the screen: native code that prints would corrupt it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOG_LIMIT = 1_000_000
"""Bytes after which the log is begun anew."""


def open_log(path: Path) -> IO[bytes] | None:
    """The log for appending; None if there is no such place."""
    try:
        too_long = path.exists() and path.stat().st_size > _LOG_LIMIT
        return path.open("wb" if too_long else "ab")
    except OSError:
        return None


@contextlib.contextmanager
def guarded_output(log_path: Path | None = None) -> Iterator[None]:
    """Inside, descriptors 1 and 2 lead to the log, and only what the screen draws on to the terminal.

    The screen draws on ``sys.__stderr__`` (and ``sys.__stdout__``, which is the same then). Afterwards everything is as
    before. Does nothing where there is no terminal.
    """
    terminal = next((fd for fd in (1, 2) if _is_terminal(fd)), None)
    if terminal is None:
        yield
        return
    log = open_log(log_path if log_path is not None else _log_path())
    target = log.fileno() if log is not None else os.open(os.devnull, os.O_WRONLY)
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    screen = os.fdopen(os.dup(terminal), "w", encoding="utf-8", errors="replace", newline="")
    streams = sys.stderr, sys.__stderr__, sys.__stdout__
    _flush(sys.stdout, sys.stderr)
    for fd in (1, 2):
        os.dup2(target, fd)
    # Textual draws on sys.__stderr__, and reports a crash on sys.stderr once the terminal is a terminal again.
    # It asks sys.__stdout__ how large the terminal is.
    sys.stderr = sys.__stderr__ = sys.__stdout__ = screen  # type: ignore[misc]
    try:
        yield
    finally:
        _flush(sys.stdout, screen)
        sys.stderr, sys.__stderr__, sys.__stdout__ = streams  # type: ignore[misc]
        for fd, original in kept.items():
            os.dup2(original, fd)
            os.close(original)
        with contextlib.suppress(OSError):  # a terminal that is gone
            screen.close()
        if log is not None:
            log.close()
        else:
            os.close(target)


def _log_path() -> Path:
    from engine.models.locations import ensure, locate

    try:
        return ensure("logs") / "screen.log"
    except OSError:
        return locate("logs") / "screen.log"


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _flush(*streams: IO[str] | None) -> None:
    for stream in streams:
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
