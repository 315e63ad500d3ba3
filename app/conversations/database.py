"""The conversation store on SQLite."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.attachments.attachment import Attachment
from app.conversations.attached import AttachedFiles
from app.conversations.deleting import Deleting, title_from
from app.conversations.drafts import Draft, Drafts
from app.conversations.exporting import as_json, as_markdown
from app.conversations.following import abandon, copy_database, file_id, holds, name_kept, remove_side_files, side_files
from app.conversations.records import (
    Conversation,
    Deletion,
    Generation,
    MessageRecord,
    Role,
    SearchHit,
    State,
    Thoughts,
    generation_from,
)
from app.conversations.searching import SearchIndex, contains_folded, snippet_around
from app.conversations.store import StoreError, explain, explained

if TYPE_CHECKING:
    from app.conversations.importing.parts import Added, ImportedConversation

_CONVERSATION = "id, title, system, model, created, updated, leaf, archived, pinned, origin, own_values"
_SIBLING = "s.conversation = m.conversation AND s.parent IS m.parent AND s.role = m.role AND s.deleted = ''"
_MESSAGE = (
    "m.id, m.conversation, m.parent, m.role, m.content, m.state, m.created, m.model, m.tokens, m.tokens_per_s,"
    f" m.finish_reason, (SELECT count(*) FROM message s WHERE {_SIBLING}) AS siblings,"
    f" (SELECT count(*) FROM message s WHERE {_SIBLING} AND s.id < m.id) AS sibling_index,"
    " m.reasoning, m.reasoning_tokens, m.reasoning_s, m.generation"
)


class SqliteStore:
    """The :class:`app.conversations.store.ConversationStore` that ``open_store`` returns.

    Calls may come from any thread; a lock orders them. Each change is one transaction, on disk when the call returns.
    """

    _index: SearchIndex
    _deleting: Deleting

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        notices: list[str],
        clock: Callable[[], float] = time.time,
        connect: Callable[[Path], sqlite3.Connection] | None = None,
    ) -> None:
        """``connect`` opens a database once more, after its file was moved; None: the store is in memory."""
        self.path = path
        self.notices = notices
        self._clock = clock
        self._connect = connect
        self._turn = threading.RLock()
        self._writer = Writer()
        self._use(connection)
        if not self._index.available:
            self.notices.append("This Python's SQLite has no FTS5: searching works, but slowly in a large history.")
        with self._reading():
            over = self._deleting.left_over(is_alive)
        if over:
            with self._change():
                self._deleting.purge(over)
        self._stop_abandoned()
        with self._reading():
            behind = self._index.behind
        if behind:
            with self._change():
                self._index.catch_up()

    def _use(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._file = file_id(self.path) if self._connect is not None else None
        with explained(self.path):
            self._index = SearchIndex(connection)
        self._attached = AttachedFiles(connection)
        self._drafts = Drafts(connection)
        self._deleting = Deleting(connection, self._index, self._writer.token)
        self._side_files = side_files(self.path) if self._connect is not None else {}

    # --- its file ---

    def look_after_file(self) -> None:
        """Write the database again if its file is gone, and say so in ``notices``. Raises StoreError."""
        with self._turn:
            self._follow()

    def _follow(self) -> None:
        """Go on in a file that is at its place: what was written to one that was deleted would be lost."""
        if self._connect is None:
            return
        try:
            current = file_id(self.path)
            if current == self._file:
                return
            notice = ""
            remove_side_files(self._side_files)
            if current is None:
                try:
                    copy_database(self._connection, self.path)
                    notice = (
                        f"The file of the chats was deleted or moved. All of them are written again to {self.path}."
                    )
                except FileExistsError:
                    # Another program was faster.
                    current = file_id(self.path)
            if current is not None and not holds(self.path, self._connection):
                replaced, kept = self.path, name_kept(self.path)
                copy_database(self._connection, kept)
                self.path = kept
                notice = f"Another file was put in the place of {replaced}. What is open here goes on in {kept}."
            connection = self._connect(self.path)
        except OSError as error:
            raise StoreError(
                f"The conversations in {self.path} are gone and cannot be written again: {error.strerror or error}."
            ) from error
        except sqlite3.Error as error:
            raise explain(error, self.path) from error
        abandon(self._connection)
        self._use(connection)
        if notice:
            self.notices.append(notice)

    # --- conversations ---

    def create(
        self, *, model: str, system: str = "", title: str = "", own_values: Mapping[str, Any] | None = None
    ) -> Conversation:
        now = self._clock()
        with self._change():
            cursor = self._connection.execute(
                "INSERT INTO conversation (title, system, model, created, updated, own_values, origin)"
                " VALUES (?, ?, ?, ?, ?, ?, 'privatellm:' || lower(hex(randomblob(16))))",
                (_storable(title), _storable(system), _storable(model), now, now, _as_column(own_values or {})),
            )
            return self._conversation(_row_id(cursor))

    def conversations(self, *, archived: bool = False, limit: int = 500) -> list[Conversation]:
        with self._reading():
            rows = self._connection.execute(
                f"SELECT {_CONVERSATION} FROM conversation WHERE archived = ? AND deleted = ''"
                " ORDER BY updated DESC, id DESC LIMIT ?",
                (archived, limit),
            ).fetchall()
        return [_conversation(row) for row in rows]

    def conversation(self, conversation: int) -> Conversation:
        with self._reading():
            return self._conversation(conversation)

    def has(self, conversation: int) -> bool:
        """Whether there is such a conversation."""
        with self._reading():
            found = "SELECT 1 FROM conversation WHERE id = ? AND deleted = ''"
            return self._connection.execute(found, (conversation,)).fetchone() is not None

    def change(
        self,
        conversation: int,
        *,
        title: str | None = None,
        system: str | None = None,
        model: str | None = None,
        archived: bool | None = None,
        pinned: bool | None = None,
        own_values: Mapping[str, Any] | None = None,
    ) -> Conversation:
        own = None if own_values is None else _as_column(own_values)
        with self._change():
            self._conversation(conversation)
            for column, value in (("title", title), ("system", system), ("model", model), ("own_values", own)):
                if value is not None:
                    self._connection.execute(
                        f"UPDATE conversation SET {column} = ? WHERE id = ?", (_storable(value), conversation)
                    )
            for column, flag in (("archived", archived), ("pinned", pinned)):
                if flag is not None:
                    self._connection.execute(f"UPDATE conversation SET {column} = ? WHERE id = ?", (flag, conversation))
            return self._conversation(conversation)

    def delete(self, conversation: int) -> Deletion:
        with self._change():
            self._conversation(conversation)
            return self._deleting.conversation(conversation)

    def delete_message(self, message: int, *, alternatives: bool = False) -> Deletion:
        with self._change():
            self._message(message)
            return self._deleting.message(message, alternatives=alternatives)

    def restore(self, deletion: Deletion) -> Conversation:
        with self._change():
            self._deleting.restore(deletion)
            return self._conversation(deletion.conversation)

    # --- messages ---

    def add(
        self,
        conversation: int,
        role: Role,
        content: str,
        *,
        parent: int | None,
        state: State = "complete",
        model: str = "",
        attachments: Sequence[Attachment] = (),
    ) -> MessageRecord:
        now = self._clock()
        with self._change():
            title = self._conversation(conversation).title
            if parent is not None and self._message(parent).conversation != conversation:
                raise StoreError(f"message {parent} is not part of conversation {conversation}")
            writer = self._writer.token if state == "writing" else ""
            cursor = self._connection.execute(
                "INSERT INTO message (conversation, parent, role, content, state, created, model, writer)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (conversation, parent, role, _storable(content), state, now, _storable(model), writer),
            )
            message = _row_id(cursor)
            self._attached.put(message, attachments)
            if state != "writing":
                self._index.put(message, _storable(content))
            if not title and role == "user":
                title = title_from(_storable(content))
            self._connection.execute(
                "UPDATE conversation SET leaf = ?, updated = ?, title = ? WHERE id = ?",
                (message, now, title, conversation),
            )
            return dataclasses.replace(self._message(message), attachments=tuple(attachments))

    def update(
        self,
        message: int,
        *,
        content: str | None = None,
        state: State | None = None,
        tokens: int | None = None,
        tokens_per_s: float | None = None,
        finish_reason: str | None = None,
        thoughts: Thoughts | None = None,
        generation: Generation | None = None,
    ) -> None:
        changes: dict[str, object] = {
            "content": None if content is None else _storable(content),
            "state": state,
            "writer": None if state is None else self._writer.token if state == "writing" else "",
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "finish_reason": finish_reason,
            "reasoning": None if thoughts is None else _storable(thoughts.text),
            "reasoning_tokens": None if thoughts is None else thoughts.tokens,
            "reasoning_s": None if thoughts is None else thoughts.seconds,
            "generation": None if generation is None else generation.to_json(),
        }
        changes = {column: value for column, value in changes.items() if value is not None}
        with self._change():
            # A deleted answer may still be growing, and comes back whole when the deletion is undone.
            record = self._message(message, deleted=True)
            if changes:
                columns = ", ".join(f"{column} = :{column}" for column in changes)
                self._connection.execute(f"UPDATE message SET {columns} WHERE id = :id", {**changes, "id": message})
            settled = (state or record.state) != "writing" and (content is not None or record.state == "writing")
            if settled and not self._is_deleted(message):
                self._index.put(message, record.content if content is None else _storable(content))
            self._connection.execute(
                "UPDATE conversation SET updated = ? WHERE id = ?", (self._clock(), record.conversation)
            )

    def shown(self, conversation: int) -> list[MessageRecord]:
        with self._reading():
            leaf = self._conversation(conversation).leaf
            return [] if leaf is None else self._path_to(leaf)

    def siblings(self, message: int) -> list[MessageRecord]:
        with self._reading():
            self._message(message)
            rows = self._connection.execute(
                f"SELECT {_MESSAGE} FROM message chosen JOIN message m ON m.conversation = chosen.conversation"
                " AND m.parent IS chosen.parent AND m.role = chosen.role AND m.deleted = ''"
                " WHERE chosen.id = ? ORDER BY m.id",
                (message,),
            ).fetchall()
        return self._records(rows)

    def select(self, message: int) -> list[MessageRecord]:
        with self._change():
            conversation = self._message(message).conversation
            # A message is always younger than its parent: the youngest of the descendants is a leaf.
            (leaf,) = self._connection.execute(
                "WITH RECURSIVE below (id) AS (VALUES (?) UNION ALL"
                " SELECT m.id FROM below JOIN message m ON m.parent = below.id AND m.deleted = '')"
                " SELECT max(id) FROM below",
                (message,),
            ).fetchone()
            self._connection.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, conversation))
            return self._path_to(leaf)

    def messages(self, conversation: int) -> Iterable[MessageRecord]:
        with self._reading():
            self._conversation(conversation)
            rows = self._connection.execute(
                f"SELECT {_MESSAGE} FROM message m WHERE m.conversation = ? AND m.deleted = '' ORDER BY m.id",
                (conversation,),
            ).fetchall()
        return self._records(rows)

    # --- what was typed ---

    def draft(self, conversation: int) -> Draft | None:
        with self._reading():
            return self._drafts.of(conversation)

    def keep_draft(self, conversation: int, draft: Draft | None) -> None:
        with self._change():
            self._drafts.keep(conversation, draft)

    def questions(self, beginning: str = "", limit: int = 100) -> list[str]:
        with self._reading():
            return self._drafts.questions(_storable(beginning), limit)

    # --- finding and taking out ---

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        wanted = _storable(text).strip()
        if not wanted or limit < 1:
            return []
        with self._reading():
            everything = {
                row[0]: _conversation(row)
                for row in self._connection.execute(
                    f"SELECT {_CONVERSATION} FROM conversation WHERE deleted = '' ORDER BY updated DESC, id DESC"
                )
            }
            found = self._index.find(wanted, limit)
        hits = [
            SearchHit(everything[hit.conversation], hit.message, hit.snippet, hit.messages)
            for hit in found
            if hit.conversation in everything
        ]
        # The title is often the question's first line: the message says more than the title then.
        shown = {hit.conversation.id for hit in hits}
        titled = [
            SearchHit(conversation, conversation.leaf or 0, snippet_around(conversation.title, wanted), messages=0)
            for conversation in everything.values()
            if conversation.id not in shown and contains_folded(conversation.title, wanted)
        ]
        return (titled + hits)[:limit]

    def export(self, conversation: int, form: str, *, thoughts: bool = False) -> str:
        with self._turn:
            facts = self.conversation(conversation)
            if form == "markdown":
                return as_markdown(facts, self.shown(conversation), thoughts=thoughts)
            if form == "json":
                return as_json(facts, self.messages(conversation), thoughts=thoughts)
        raise StoreError(f"a conversation cannot be exported as {form!r}; there are markdown and json")

    def take_in(self, conversations: Sequence[ImportedConversation]) -> Added:
        from app.conversations.importing.adding import Adding

        with self._change():
            return Adding(self._connection, self._index, self._attached).add(conversations, self._clock())

    def close(self) -> None:
        with self._turn:
            # What cannot be removed now, because another program writes, is removed when the store is next opened.
            with suppress(StoreError):
                self._purge()
            self._writer.close()
            try:
                self._follow()
            except StoreError:
                abandon(self._connection)
            else:
                self._connection.close()

    # --- inside ---

    def _stop_abandoned(self) -> None:
        """Mark answers whose writer died as stopped."""
        with self._reading():
            writing = self._connection.execute("SELECT id, writer FROM message WHERE state = 'writing'").fetchall()
        dead = [(message, writer) for message, writer in writing if not is_alive(writer)]
        if not dead:
            return
        with self._change():
            self._connection.executemany(
                "UPDATE message SET state = 'stopped', writer = '' WHERE id = ? AND state = 'writing' AND writer = ?",
                dead,
            )
        answers = "An answer was" if len(dead) == 1 else f"{len(dead)} answers were"
        self.notices.append(f"{answers} being written when privatellm ended; what there was is kept.")

    def _purge(self) -> None:
        """Remove what this store has deleted: nobody can bring it back any more."""
        with self._reading():
            own = self._deleting.left_over(lambda token: token != self._writer.token)
        if own:
            with self._change():
                self._deleting.purge(own)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._turn, explained(self.path):
            yield

    @contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction: afterwards all of it is on disk, or none of it."""
        with self._turn:
            self._follow()
            try:
                # Immediate: two programs that read first and write later would lock each other out.
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException as error:
                self._roll_back()
                if isinstance(error, sqlite3.Error):
                    raise explain(error, self.path) from error
                raise

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            # The first error is the one to report; SQLite has rolled back by itself (disk full, I/O error).
            return

    def _conversation(self, conversation: int) -> Conversation:
        row = self._connection.execute(
            f"SELECT {_CONVERSATION} FROM conversation WHERE id = ? AND deleted = ''", (conversation,)
        ).fetchone()
        if row is None:
            raise StoreError(f"there is no conversation {conversation}; it may have been deleted meanwhile")
        return _conversation(row)

    def _message(self, message: int, *, deleted: bool = False) -> MessageRecord:
        """The message. ``deleted``: also one that was deleted. Raises StoreError."""
        row = self._connection.execute(f"SELECT {_MESSAGE} FROM message m WHERE m.id = ?", (message,)).fetchone()
        if row is None or (not deleted and self._is_deleted(message)):
            raise StoreError(f"there is no message {message}; it may have been deleted meanwhile")
        return _record(row)

    def _is_deleted(self, message: int) -> bool:
        row = self._connection.execute("SELECT deleted FROM message WHERE id = ?", (message,)).fetchone()
        return bool(row and row[0])

    def _records(self, rows: Sequence[tuple[Any, ...]]) -> list[MessageRecord]:
        attached = self._attached.of(row[0] for row in rows)
        records = [_record(row) for row in rows]
        if not attached:
            return records
        return [dataclasses.replace(record, attachments=attached.get(record.id, ())) for record in records]

    def _path_to(self, message: int) -> list[MessageRecord]:
        rows = self._connection.execute(
            "WITH RECURSIVE above (id, parent) AS (SELECT id, parent FROM message WHERE id = ? UNION ALL"
            " SELECT m.id, m.parent FROM above JOIN message m ON m.id = above.parent)"
            f" SELECT {_MESSAGE} FROM above JOIN message m ON m.id = above.id ORDER BY m.id",
            (message,),
        ).fetchall()
        return self._records(rows)


def _storable(text: str) -> str:
    """``text`` as SQLite can store it, which is UTF-8: half a surrogate pair becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _has_surrogates(text) else text


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _row_id(cursor: sqlite3.Cursor) -> int:
    assert cursor.lastrowid is not None  # an INSERT always sets it
    return cursor.lastrowid


def _conversation(row: tuple[Any, ...]) -> Conversation:
    values: list[Any] = [*row[:7], bool(row[7]), bool(row[8]), *row[9:-1], _from_column(row[-1])]
    return Conversation(*values)


def _as_column(values: Mapping[str, Any]) -> str:
    return json.dumps(values) if values else ""


def _from_column(text: str) -> dict[str, Any]:
    """The values; none if the text is not a JSON object."""
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _record(row: tuple[Any, ...]) -> MessageRecord:
    values: list[Any] = [*row[:13], Thoughts(*row[13:16]), generation_from(row[16])]
    return MessageRecord(*values)


# --- writers ------------------------------------------------------------------------------------------------------

_CLOCK_SLACK_S = 10.0
"""Largest difference, in seconds, between two readings of when the same process started."""
_numbers = itertools.count(1)


class Writer:
    """One open store of one process. ``token`` names it in the database as ``pid:start:number``.

    It tells a program that died from one that still writes. A process id alone would not: the system uses it again.
    """

    def __init__(self) -> None:
        self.token = f"{os.getpid()}:{_started(os.getpid())}:{next(_numbers)}"
        _live[self.token] = self

    def close(self) -> None:
        _live.pop(self.token, None)


_live: weakref.WeakValueDictionary[str, Writer] = weakref.WeakValueDictionary()
"""Writers of this process that are still open, by their tokens."""


def is_alive(token: str) -> bool:
    """Whether the writer with this token may still write."""
    pid, _, rest = token.partition(":")
    start = rest.partition(":")[0]
    if not pid.isdecimal() or not start.replace(".", "", 1).isdecimal():
        return False
    if int(pid) == os.getpid():
        return token in _live
    now = _start_time(int(pid))
    # The start time that the system reports changes a little when its clock is set.
    return bool(now) and abs(float(now) - float(start)) < _CLOCK_SLACK_S


@cache
def _started(pid: int) -> str:
    return _start_time(pid)


def _start_time(pid: int) -> str:
    """The start time of process ``pid`` in seconds since the epoch, as text; empty if there is no such process."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return f"{process.create_time():.2f}"
    except (psutil.Error, OverflowError, ValueError):
        return ""
