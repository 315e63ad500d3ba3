"""Recovery of what can still be read of a damaged database."""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from app.attachments.attachment import Attachment
from app.files import name_aside

_CONVERSATION = (
    "id", "title", "system", "model", "created", "updated", "archived", "leaf", "deleted", "pinned", "origin",
    "own_values",
)  # fmt: skip
_MESSAGE = (
    "id", "conversation", "parent", "role", "content", "state", "created", "model", "tokens", "tokens_per_s",
    "finish_reason", "reasoning", "reasoning_tokens", "reasoning_s", "deleted", "generation",
)  # fmt: skip
_TEXT = ("id", "digest", "text")
_ATTACHMENT = ("id", "message", "position", "name", "text")
_PICTURE = ("id", "digest", "width", "height", "data")
_ATTACHED_PICTURE = ("id", "message", "position", "name", "picture")
_DRAFT = ("conversation", "text", "pastes")
_MISSES_IN_A_ROW = 10_000
_NO_PLACE = 1_000_000
"""Position after which attachments stand whose own is lost."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Recovered:
    conversations: int
    messages: int


def put_aside(path: Path) -> Path:
    """Rename the database and its side files to ``<stem>.damaged-<time>``; the new path. Raises OSError."""
    aside = name_aside(path)
    for ending in ("-wal", "-shm", ""):
        side = path.with_name(path.name + ending)
        if side.exists():
            side.rename(aside.with_name(aside.name + ending))
    return aside


def recover_into(connection: sqlite3.Connection, damaged: Path) -> Recovered:
    """Copy every row that can still be read. A message whose parent is lost follows the one before it."""
    conversations, messages = _read(damaged)
    _mend(conversations, messages)
    there = {row["id"] for row in messages}
    texts, attachments = _read_attachments(damaged, there)
    pictures, attached_pictures = _read_pictures(damaged, there)
    owners = {0, *(row["id"] for row in conversations), *(-row["id"] for row in messages)}
    drafts = _read_drafts(damaged, owners)
    connection.execute("BEGIN IMMEDIATE")
    try:
        _insert(connection, "conversation", conversations)
        _insert(connection, "message", messages)
        _insert(connection, "attached_text", texts)
        _insert(connection, "attachment", attachments)
        _insert(connection, "picture", pictures)
        _insert(connection, "attached_picture", attached_pictures)
        _insert(connection, "draft", drafts)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return Recovered(len(conversations), len(messages))


@contextmanager
def _opened(damaged: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(damaged, isolation_level=None)) as source:
        source.execute("PRAGMA cell_size_check = ON")
        source.text_factory = lambda data: data.decode("utf-8", "replace")
        yield source


def _read(damaged: Path) -> tuple[list[Row], list[Row]]:
    try:
        with _opened(damaged) as source:
            conversations = list(_rows(source, "conversation", _CONVERSATION))
            messages = {row["id"]: row for row in _rows(source, "message", _MESSAGE)}
            for row in _rows_from_indexes(source):
                messages.setdefault(row["id"], row)
            return conversations, [messages[number] for number in sorted(messages)]
    except sqlite3.Error:
        return [], []


def _read_attachments(damaged: Path, messages: set[int]) -> tuple[list[Row], list[Row]]:
    """The texts of attached files, and which of ``messages`` have them."""
    texts: dict[int, Row] = {}
    attachments: list[Row] = []
    try:
        with _opened(damaged) as source:
            for row in _rows(source, "attached_text", _TEXT):
                if isinstance(row.get("text"), str):
                    # A text that changed has another digest.
                    texts[row["id"]] = {**row, "digest": Attachment("", row["text"]).digest}
            attachments = list(_linked(_rows(source, "attachment", _ATTACHMENT), "text", texts, messages))
    except sqlite3.Error:
        return [], []
    return list(texts.values()), attachments


def _read_pictures(damaged: Path, messages: set[int]) -> tuple[list[Row], list[Row]]:
    """The attached pictures, and which of ``messages`` have them."""
    pictures: dict[int, Row] = {}
    attached: list[Row] = []
    try:
        with _opened(damaged) as source:
            for row in _rows(source, "picture", _PICTURE):
                # One that changed is no picture any more.
                if isinstance(row.get("data"), bytes) and row.get("digest") == sha256(row["data"]).hexdigest():
                    _typed(row, text=(), number=(), whole=("width", "height"))
                    pictures[row["id"]] = row
            attached = list(
                _linked(_rows(source, "attached_picture", _ATTACHED_PICTURE), "picture", pictures, messages)
            )
    except sqlite3.Error:
        return [], []
    return list(pictures.values()), attached


def _linked(links: Iterator[Row], column: str, contents: Container[int], messages: set[int]) -> Iterator[Row]:
    """The ``links`` whose message and content are there. One whose place is lost comes last."""
    taken: set[tuple[int, int]] = set()
    for row in links:
        if row.get("message") in messages and row.get(column) in contents and isinstance(row.get("name"), str):
            place = row.get("position")
            if not isinstance(place, int) or (row["message"], place) in taken:
                place = _NO_PLACE + row["id"]
            taken.add((row["message"], place))
            yield {**row, "position": place}


def _read_drafts(damaged: Path, owners: set[int]) -> list[Row]:
    try:
        with _opened(damaged) as source:
            rows = [
                dict(zip(_DRAFT, row, strict=True)) for row in _scan(source, f"SELECT {', '.join(_DRAFT)} FROM draft")
            ]
    except sqlite3.Error:
        return []
    return [
        row
        for row in rows
        if row["conversation"] in owners and isinstance(row["text"], str) and isinstance(row["pastes"], str)
    ]


def _rows(source: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> Iterator[Row]:
    """The rows, read one at a time by their ids, so that a damaged page costs only its own rows."""
    try:
        there = {name for (name,) in source.execute("SELECT name FROM pragma_table_info(?)", (table,))}
    except sqlite3.Error:
        return
    wanted = [column for column in columns if column in there]
    if "id" not in wanted:
        return
    query = f"SELECT {', '.join(wanted)} FROM {table} WHERE id = ?"
    last, number, misses = _last_id(source, table), 0, 0
    while number < last if last is not None else misses < _MISSES_IN_A_ROW:
        number += 1
        try:
            row = source.execute(query, (number,)).fetchone()
        except sqlite3.Error:
            row = None
        misses = 0 if row else misses + 1
        if row:
            yield dict(zip(wanted, row, strict=True))


def _rows_from_indexes(source: sqlite3.Connection) -> Iterator[Row]:
    """Messages rebuilt without their table: the index of siblings has their place in the conversation, and the search
    index has a copy of their text."""
    for row in _scan(source, "SELECT id, conversation, parent, role FROM message INDEXED BY message_siblings"):
        try:
            text = source.execute("SELECT c0 FROM message_words_content WHERE id = ?", (row[0],)).fetchone()
        except sqlite3.Error:
            continue
        if text is not None:
            yield dict(zip(("id", "conversation", "parent", "role", "content"), (*row, text[0]), strict=True))


def _scan(source: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    """The rows before the first that cannot be read."""
    try:
        yield from source.execute(query)
    except sqlite3.Error:
        return


def _last_id(source: sqlite3.Connection, table: str) -> int | None:
    """The highest id ever given; None if that cannot be read."""
    try:
        row = source.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    except sqlite3.Error:
        return None
    # An impossible number is damage too.
    return int(row[0]) if row and isinstance(row[0], int) and 0 <= row[0] < 10_000_000 else None


def _mend(conversations: list[Row], messages: list[Row]) -> None:
    """Make the rows consistent and fit for the schema's constraints. No text is lost."""
    conversations_by_id = {row["id"]: row for row in conversations}
    messages[:] = [row for row in messages if isinstance(row.get("content"), str)]
    last_of: dict[int, int] = {}
    seen: set[int] = set()
    for row in messages:
        named = row.get("conversation")
        owner = named if isinstance(named, int) and named > 0 else max(conversations_by_id, default=0) + 1
        if owner not in conversations_by_id:
            conversations_by_id[owner] = {"id": owner, "title": "Recovered", "created": row.get("created")}
            conversations.append(conversations_by_id[owner])
        row["conversation"] = owner
        if row.get("parent") is not None and row["parent"] not in seen:
            row["parent"] = last_of.get(owner)
        row["role"] = row.get("role") if row.get("role") in ("user", "assistant") else "assistant"
        row["state"] = row.get("state") if row.get("state") in ("complete", "stopped", "failed") else "stopped"
        _typed(
            row,
            text=("model", "finish_reason", "reasoning", "deleted", "generation"),
            number=("created", "tokens_per_s", "reasoning_s"),
            whole=("tokens", "reasoning_tokens"),
        )
        seen.add(row["id"])
        last_of[owner] = row["id"]
    origins: set[str] = set()
    for row in conversations:
        _typed(
            row,
            text=("title", "system", "model", "deleted", "origin", "own_values"),
            number=("created", "updated"),
            whole=("archived", "pinned"),
        )
        row["archived"], row["pinned"] = int(bool(row["archived"])), int(bool(row["pinned"]))
        # Only the first may have an origin: the others would not be inserted.
        row["origin"] = "" if row["origin"] in origins else row["origin"]
        origins.add(row["origin"])
        if row.get("leaf") not in seen:
            row["leaf"] = last_of.get(row["id"])


def _typed(row: Row, *, text: tuple[str, ...], number: tuple[str, ...], whole: tuple[str, ...]) -> None:
    for column in text:
        row[column] = row[column] if isinstance(row.get(column), str) else ""
    for column in number:
        row[column] = float(row[column]) if isinstance(row.get(column), int | float) else 0.0
    for column in whole:
        row[column] = row[column] if isinstance(row.get(column), int) else 0


def _insert(connection: sqlite3.Connection, table: str, rows: list[Row]) -> None:
    for row in rows:
        columns = ", ".join(row)
        values = ", ".join(f":{column}" for column in row)
        connection.execute(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({values})", row)
