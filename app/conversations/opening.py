"""Opens the database, whatever state it is in."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from app.conversations.database import SqliteStore
from app.conversations.failures import explain, is_damage
from app.conversations.migrating import Migration, known_migrations, migrate
from app.conversations.records import StoreError
from app.conversations.recovering import put_aside, recover_into

_LOCK_WAIT_S = 2.0
"""How long opening waits for another program's write."""
_CALL_WAIT_S = 0.1
"""How long a call waits, once the database is open: it may come from where a person types. Callers try again."""
_ALWAYS_CHECKED_BYTES = 32 * 1024 * 1024


def open_database(
    path: Path, *, clock: Callable[[], float] = time.time, migrations: Sequence[Migration] | None = None
) -> SqliteStore:
    """See :func:`app.conversations.store.open_store`."""
    steps = known_migrations() if migrations is None else tuple(migrations)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"The folder {path.parent} cannot be made: {error.strerror or error}.") from error
    try:
        return _opened(_connect(path, steps), path, [], clock)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise explain(error, path) from error
        return _start_again(path, steps, clock, str(error))
    except StoreError as error:
        if error.reason != "damaged":
            raise
        return _start_again(path, steps, clock, str(error.__cause__ or error))


def _opened(connection: sqlite3.Connection, path: Path, notices: list[str], clock: Callable[[], float]) -> SqliteStore:
    store = SqliteStore(connection, path, notices, clock)
    connection.execute(f"PRAGMA busy_timeout = {1000 * min(_CALL_WAIT_S, _LOCK_WAIT_S):.0f}")
    return store


def _store(connection: sqlite3.Connection, path: Path, notices: list[str], clock: Callable[[], float]) -> SqliteStore:
    """The store on ``connection``, which is closed if there can be none: a file that is put aside is not held open."""
    try:
        return SqliteStore(connection, path, notices, clock)
    except BaseException:
        connection.close()
        raise


def _connect(path: Path, migrations: Sequence[Migration]) -> sqlite3.Connection:
    """A checked, migrated connection. Raises sqlite3.Error, StoreError."""
    unclean = path.with_name(path.name + "-wal").exists()
    _make_private(path)
    connection = sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        # FULL: a question is on disk when add() returns, also if the power fails; that is one fsync per commit, and
        # there are one or two commits a second at most.
        connection.execute("PRAGMA synchronous = FULL")
        # macOS: a plain fsync leaves what was written in the disk's own cache.
        connection.execute("PRAGMA fullfsync = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        # What a person deletes is overwritten, not only unlinked.
        connection.execute("PRAGMA secure_delete = ON")
        # A check reads the whole file: always for a small one, for a large one when it was not closed in order.
        if unclean or path.stat().st_size <= _ALWAYS_CHECKED_BYTES:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise StoreError(str(verdict).replace("\n", " "), "damaged")
        migrate(connection, migrations, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _make_private(path: Path) -> None:
    """Conversations are for their owner's eyes; SQLite gives its side files the database's permissions."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return  # SQLite says what is wrong, in its own terms


def _start_again(path: Path, migrations: Sequence[Migration], clock: Callable[[], float], reason: str) -> SqliteStore:
    try:
        aside = put_aside(path)
    except OSError as error:
        raise StoreError(
            f"The conversations in {path} are damaged ({reason}) and cannot be put aside: {error.strerror or error}.",
            "damaged",
        ) from error
    try:
        connection = _connect(path, migrations)
        try:
            recovered = recover_into(connection, aside)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise explain(error, path) from error
    notice = (
        f"The conversations were damaged ({reason}): {recovered.conversations} conversations with "
        f"{recovered.messages} messages could be recovered; the damaged file is kept as {aside.name}."
    )
    return _opened(connection, path, [notice], clock)
