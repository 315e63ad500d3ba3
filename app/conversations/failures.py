"""SQLite's errors in words a person can act on."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.conversations.records import StoreError

_NO_SPACE_BYTES = 256 * 1024
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, e.g. SQLITE_BUSY; 0 if the error came from Python."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_damage(error: sqlite3.Error) -> bool:
    return primary_code(error) in _DAMAGED


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    code = primary_code(error)
    if code in _LOCKED:
        return StoreError(
            f"The conversations in {path} are locked by another program; close it or try again.", "locked"
        )
    if code in _DAMAGED:
        return StoreError(
            f"The conversations in {path} are damaged ({error}); start privatellm again to recover what is readable.",
            "damaged",
        )
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path)):
        return StoreError(f"There is no space left to save to {path}; free some and the text is saved then.", "full")
    if code == sqlite3.SQLITE_READONLY:
        return StoreError(f"The conversations in {path} cannot be written: the file or its folder is read-only.")
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreError(f"The conversations in {path} cannot be opened; check that the folder may be read.")
    return StoreError(f"The conversations in {path} cannot be used: {error}.")


def _is_full(path: Path) -> bool:
    """Some writes to a full disk, such as growing a mapped file, fail without saying why."""
    try:
        return shutil.disk_usage(path.parent).free < _NO_SPACE_BYTES
    except OSError:
        return False


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns sqlite3.Error into StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, path) from error
