"""The ends of this program's log files, as text that is safe to show. No Textual."""

from __future__ import annotations

import os
from pathlib import Path

from app.text_safety import sanitize
from engine.system.locations import locate

LOGS = ("engine", "screen")
"""Names of the logs: of the engine process, and of the process with the screen."""
TAIL_BYTES = 64 * 1024
"""Largest part of a log that is read, in bytes."""


def log_path(log: str) -> Path:
    """The file of one of :data:`LOGS`; it may not exist."""
    return locate("logs") / f"{log}.log"


def read_tail(path: Path, most: int = TAIL_BYTES) -> str:
    """The last whole lines of the file, at most ``most`` bytes of it. Empty if there is none or it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return ""
    if size > most:
        data = data.partition(b"\n")[2]
    return sanitize(data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n"))


def version(path: Path) -> tuple[int, int]:
    """Changes whenever the file does; zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
