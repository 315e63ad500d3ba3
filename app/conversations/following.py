"""A database whose file is deleted, moved or replaced while it is open. Its connection still reads all of it."""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

FileId = tuple[int, int]
"""Device and inode of a file."""


def file_id(path: Path) -> FileId | None:
    """The identity of the file at ``path``; None if there is none. Raises OSError if that cannot be found out."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def copy_database(connection: sqlite3.Connection, target: Path) -> None:
    """Write all of ``connection`` to the file ``target``, which must not exist, whole or not at all.

    Raises FileExistsError, OSError, sqlite3.Error.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        with closing(sqlite3.connect(name, isolation_level=None)) as copy:
            copy.execute("PRAGMA synchronous = FULL")
            connection.backup(copy)
            # The copy has the original's write-ahead log, whose file would have another name after the next step.
            copy.execute("PRAGMA journal_mode = DELETE")
        _put_in_place(Path(name), target)
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                Path(f"{name}{ending}").unlink()


def _put_in_place(made: Path, target: Path) -> None:
    """Give ``made`` the name ``target``, never in place of another file. Raises OSError."""
    try:
        os.link(made, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links, such as exFAT.
        if target.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(target)) from None
        made.rename(target)


def side_files(path: Path) -> dict[Path, FileId | None]:
    """The files of the write-ahead log of a database. Raises OSError."""
    sides = [path.with_name(f"{path.name}{ending}") for ending in ("-wal", "-shm")]
    return {side: file_id(side) for side in sides}


def remove_side_files(own: dict[Path, FileId | None]) -> None:
    """Remove the log of a database that is gone, unless it is another's: SQLite would apply it to the next database.

    Raises OSError.
    """
    for side, known in own.items():
        if known is not None and file_id(side) == known:
            side.unlink(missing_ok=True)


def holds(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether the database at ``path`` has all messages of ``connection``, as another program's copy of it has."""
    known = "SELECT count(*), coalesce(max(id), 0), total(created) FROM message"
    count, last, created = connection.execute(known).fetchone()
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as other:
            found = other.execute(f"{known} WHERE id <= ?", (last,)).fetchone()
    except sqlite3.Error:
        return False
    return bool(found == (count, last, created))


def name_kept(path: Path) -> Path:
    """A free name beside ``path`` for what was in the database before another file was put in its place."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    kept, number = path.with_name(f"{path.stem}.kept-{stamp}{path.suffix}"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.stem}.kept-{stamp}-{number}{path.suffix}")
    return kept


def abandon(connection: sqlite3.Connection) -> None:
    """Never close ``connection``, not even at the end of the process.

    SQLite removes a write-ahead log by its name when it is closed, and that is the log of the next database now.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
