"""Brings a database to the schema this program knows. The version is SQLite's ``user_version``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from app.conversations.records import StoreError


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    script: str


def known_migrations() -> tuple[Migration, ...]:
    """The migrations of this program, in order; their versions are 1, 2, 3, ..."""
    folder = resources.files("app.conversations") / "migrations"
    found = [
        Migration(int(entry.name[:4]), entry.name, entry.read_text("utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    ]
    return tuple(sorted(found, key=lambda migration: migration.version))


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
        # Another program may have done it between our look at the version and our lock.
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
    """The statements of a script one by one: ``executescript`` would commit behind our back."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        raise ValueError(f"a migration ends in the middle of a statement: {statement.strip()[:60]!r}")
