"""Opening the database in whatever state it is: migrations, recovery of a damaged file."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from app.conversations.database import SqliteStore
from app.conversations.following import copy_database
from app.conversations.kept_prefixes import remove_orphaned_prefixes
from app.conversations.recovering import put_aside, recover_into
from app.conversations.store import StoreError, explain, is_damage, primary_code
from engine.models.store.prefix_files import prefix_folder

DATABASE = "conversations.sqlite"
"""Name of the file of all chats, in the data folder."""
_LOCK_WAIT_S = 2.0
"""Seconds that opening waits for another program's write."""
_TRY_AGAIN_S = 0.02
"""Seconds between two tries of what SQLite does not wait for itself."""
_CALL_WAIT_S = 0.1
"""Seconds that a call on the open database waits for another program's write. The call may block the screen, so its
caller tries again instead."""
_TEMPORARY_IDS = 1 << 40
"""Number that the ids of a store in memory begin after."""
PAGE_BYTES = 8192
"""Size in bytes of a page of a new database. The whole schema fits in the first one, so that no other lost page costs
more than its own rows."""
_ALWAYS_CHECKED_BYTES = 32 * 1024 * 1024
"""Largest size in bytes of a database that is checked at each start; a larger one is checked if it was not closed."""


def open_store(
    path: Path, *, clock: Callable[[], float] = time.time, migrations: Sequence[Migration] | None = None
) -> SqliteStore:
    """Open or make the database at ``path`` and apply the migrations that are missing.

    Messages that a program which died was still writing become ``stopped``. A damaged file is kept aside as
    ``conversations.damaged-<time>.sqlite``, and what can be read of it is copied into a new one; ``notices`` of the
    store say so. What the engine keeps on disk of conversations that are gone is removed. ``clock`` gives seconds since
    the epoch; ``migrations`` defaults to those of this program.

    Raises StoreError: another program has locked the file, the disk is full, or a later version has written it.
    """
    steps = known_migrations() if migrations is None else tuple(migrations)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"The folder {path.parent} cannot be made: {error.strerror or error}.") from error
    try:
        return _opened(_connect(path, steps), path, [], clock, steps)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise explain(error, path) from error
        return _start_again(path, steps, clock, str(error))
    except StoreError as error:
        if error.reason != "damaged":
            raise
        return _start_again(path, steps, clock, str(error.__cause__ or error))


def open_temporary(clock: Callable[[], float] = time.time) -> SqliteStore:
    """A store in memory, of which nothing is written to disk. Its ids are those of no store on disk."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    # Large sorts would be written to temporary files.
    connection.execute("PRAGMA temp_store = MEMORY")
    migrate(connection, known_migrations(), "memory")
    for table in ("conversation", "message"):
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, _TEMPORARY_IDS))
    return SqliteStore(connection, Path(":memory:"), [], clock)


def _opened(
    connection: sqlite3.Connection,
    path: Path,
    notices: list[str],
    clock: Callable[[], float],
    migrations: Sequence[Migration],
) -> SqliteStore:
    """The store on ``connection``. The connection is closed if there can be no store: the file may be renamed next."""

    def connect_again(path: Path) -> sqlite3.Connection:
        connection = _connect(path, migrations)
        _block_shortly(connection)
        return connection

    try:
        store = SqliteStore(connection, path, notices, clock, connect_again)
    except BaseException:
        connection.close()
        raise
    _block_shortly(connection)
    if path.parent == prefix_folder().parent:
        remove_orphaned_prefixes(store.has)
    return store


def _block_shortly(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA busy_timeout = {1000 * min(_CALL_WAIT_S, _LOCK_WAIT_S):.0f}")


def _connect(path: Path, migrations: Sequence[Migration]) -> sqlite3.Connection:
    """A checked, migrated connection. Raises sqlite3.Error, StoreError."""
    unclean = path.with_name(path.name + "-wal").exists()
    _make_private(path)
    connection = sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        _use_log(connection)
        # FULL: a question survives a power failure once add() returned. It costs one fsync per commit, and there are
        # one or two commits a second at most.
        connection.execute("PRAGMA synchronous = FULL")
        # macOS: a plain fsync leaves what was written in the disk's own cache.
        connection.execute("PRAGMA fullfsync = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        # What a person deletes is overwritten, not only marked as free.
        connection.execute("PRAGMA secure_delete = ON")
        # A check reads the whole file.
        if unclean or path.stat().st_size <= _ALWAYS_CHECKED_BYTES:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise StoreError(str(verdict).replace("\n", " "), "damaged")
        version, latest = schema_version(connection), migrations[-1].version
        if 0 < version < latest:
            _back_up(connection, path, version)
        elif version == latest:
            # The converted database was opened once more, and what is deleted from now on must be gone.
            for backup in path.parent.glob(f"{path.stem}.schema-*{path.suffix}"):
                with suppress(OSError):
                    backup.unlink()
        migrate(connection, migrations, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _back_up(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Keep a copy of a database that is about to be converted, until it is next opened. Raises StoreError."""
    backup = path.with_name(f"{path.stem}.schema-{version}{path.suffix}")
    try:
        backup.unlink(missing_ok=True)
        with suppress(FileExistsError):  # another program is converting the same
            copy_database(connection, backup)
    except OSError as error:
        raise StoreError(
            f"The conversations in {path} must be converted, and the copy {backup} that is kept before cannot be "
            f"written: {error.strerror or error}."
        ) from error


def _use_log(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. While another program does the same, SQLite fails at once in place of waiting."""
    end = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(_TRY_AGAIN_S)


def _make_private(path: Path) -> None:
    """Let only the owner read the database. SQLite gives its side files the same permissions."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return  # SQLite reports what is wrong


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
    return _opened(connection, path, [notice], clock, migrations)


# --- migrations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    script: str


def known_migrations() -> tuple[Migration, ...]:
    """The migrations of this program, in order; their versions are 1, 2, 3, ..."""
    folder = resources.files("app.conversations") / "migrations"
    migrations = [
        Migration(int(entry.name[:4]), entry.name, entry.read_text("utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    ]
    return tuple(sorted(migrations, key=lambda migration: migration.version))


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration], where: str) -> None:
    """Apply what is missing, each migration in its own transaction.

    Raises StoreError if the database is of a later version than the last migration; sqlite3.Error if one fails (it is
    then rolled back).
    """
    latest = migrations[-1].version
    version = schema_version(connection)
    if version > latest:
        raise StoreError(
            f"The conversations in {where} were written by a later privatellm (schema {version}, this one knows "
            f"{latest}): update privatellm, or move that file away to start a new one."
        )
    for migration in migrations:
        if migration.version > schema_version(connection):
            _apply(connection, migration)


def schema_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _apply(connection: sqlite3.Connection, migration: Migration) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another program may have migrated between our reading of the version and our lock.
        if schema_version(connection) < migration.version:
            for statement in _statements(migration.script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {migration.version:d}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: ``executescript`` would commit the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        raise ValueError(f"a migration ends in the middle of a statement: {statement.strip()[:60]!r}")
