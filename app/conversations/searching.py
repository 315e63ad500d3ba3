"""The full-text index over messages: derived data, made again whenever it is missing, damaged or incomplete."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.conversations.store import StoreError, primary_code

HIT_START, HIT_END = "\ue000", "\ue001"
_MARKS = str.maketrans("", "", HIT_START + HIT_END)
_LEFT_OUT = "indexed = 0 AND state <> 'writing' AND deleted = ''"
_INDEX_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_ERROR}
"""SQLite's result codes for a damaged FTS5 index. A full disk or a lock has others."""
_SNIPPET_WORDS = 16
_AROUND = 60
_MOST_MESSAGES = 5_000
"""Maximum number of messages that a search counts."""
_THERE = "message.deleted = '' AND conversation.deleted = ''"


@dataclass(frozen=True)
class FoundChat:
    """Search results in one conversation. ``message``: the best of the ``messages`` that have the text."""

    conversation: int
    message: int
    messages: int
    snippet: str


class SearchIndex:
    """Finds messages by words.

    An answer is indexed when it is complete: indexing each partial text would cost several times the writing itself.
    ``available`` is false where Python's SQLite was built without FTS5. Then all messages are read, which finds the
    same text more slowly.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._damaged = False
        self.available = self._make()
        connection.create_function("contains_folded", 2, contains_folded, deterministic=True)

    def put(self, message: int, content: str) -> None:
        """Index ``content``; part of the caller's transaction."""
        self._write(lambda: self._put(message, content))

    def forget(self, messages: Iterable[int]) -> None:
        """Remove messages from the index; :meth:`catch_up` brings those back that are there again."""
        rows = [(message,) for message in messages]
        self._write(lambda: self._forget(rows))

    def forget_for_good(self) -> None:
        """Overwrite what was removed: an index of words keeps them in the file until its parts are merged."""
        self._write(lambda: self._connection.execute("INSERT INTO message_words (message_words) VALUES ('optimize')"))

    def catch_up(self) -> None:
        """Index what was left out: answers whose writer died, and messages that a program without FTS5 has written.
        Remove what such a program has deleted."""
        self._write(self._catch_up)

    @property
    def behind(self) -> bool:
        """Whether :meth:`catch_up` has anything to do."""
        if not self.available:
            return False
        (behind,) = self._connection.execute(
            f"SELECT EXISTS (SELECT 1 FROM message WHERE {_LEFT_OUT})"
            " OR EXISTS (SELECT 1 FROM message_words_content WHERE id NOT IN (SELECT id FROM message))"
        ).fetchone()
        return bool(behind)

    def find(self, text: str, limit: int) -> list[FoundChat]:
        """At most ``limit`` conversations, best first. ``text`` is searched for literally: it has no operators."""
        try:
            chats = self._find_words(text, limit) if self.available else []
        except sqlite3.Error as error:
            if not self._is_damage(error):
                raise
            chats = []
        return chats or self._read_through(text, limit)

    def _make(self) -> bool:
        try:
            self._connection.execute(
                "CREATE VIRTUAL TABLE IF NOT EXISTS message_words"
                " USING fts5 (content, tokenize = 'unicode61 remove_diacritics 2')"
            )
            self._connection.execute("SELECT rowid FROM message_words LIMIT 1").fetchone()
        except sqlite3.OperationalError as error:
            if "no such module" in str(error):
                return False
            if primary_code(error) in _INDEX_DAMAGED:
                raise StoreError(str(error), "damaged") from error
            raise
        return True

    def _write(self, change: Callable[[], object]) -> None:
        """Do ``change``. A damaged index is made again, so that it never keeps a message from being saved."""
        if not self.available:
            return
        self._connection.execute("SAVEPOINT indexing")
        try:
            if self._damaged:
                self._make_anew()
            change()
            # At a savepoint FTS5 writes what it has buffered. Damage is found here, where it can be rolled back.
            self._connection.execute("SAVEPOINT indexed")
        except sqlite3.Error as error:
            if not self._is_damage(error) or not self._connection.in_transaction:
                # SQLite may have rolled everything back by itself; the next change starts with a new index.
                raise
            self._connection.execute("ROLLBACK TO indexing")
            self._make_anew()
            change()
        self._connection.execute("RELEASE indexing")

    def _is_damage(self, error: sqlite3.Error) -> bool:
        self._damaged = primary_code(error) in _INDEX_DAMAGED
        return self._damaged

    def _make_anew(self) -> None:
        self._connection.execute("DROP TABLE message_words")
        self._make()
        self._connection.execute("UPDATE message SET indexed = 0")
        self._catch_up()
        self._damaged = False

    def _put(self, message: int, content: str) -> None:
        self._connection.execute("DELETE FROM message_words WHERE rowid = ?", (message,))
        self._connection.execute(
            "INSERT INTO message_words (rowid, content) VALUES (?, ?)", (message, content.translate(_MARKS))
        )
        self._connection.execute("UPDATE message SET indexed = 1 WHERE id = ?", (message,))

    def _forget(self, rows: list[tuple[int]]) -> None:
        self._connection.executemany("DELETE FROM message_words WHERE rowid = ?", rows)
        self._connection.executemany("UPDATE message SET indexed = 0 WHERE id = ?", rows)

    def _catch_up(self) -> None:
        left_out = self._connection.execute(f"SELECT id, content FROM message WHERE {_LEFT_OUT}").fetchall()
        for message, content in left_out:
            self._put(message, content)
        self._connection.execute("DELETE FROM message_words WHERE rowid NOT IN (SELECT id FROM message)")

    def _find_words(self, text: str, limit: int) -> list[FoundChat]:
        words = re.findall(r"\w+", text)
        if not words:
            return []
        # Quoted, so that no word is an operator; the last may be the beginning of a word still being typed.
        query = " ".join(f'"{word}"' for word in words) + "*"
        rows = self._connection.execute(
            "SELECT message.conversation, message.id FROM message_words"
            " JOIN message ON message.id = message_words.rowid"
            " JOIN conversation ON conversation.id = message.conversation"
            f" WHERE message_words MATCH ? AND {_THERE} ORDER BY message_words.rank LIMIT ?",
            (query, _MOST_MESSAGES),
        )
        best = _by_conversation(rows, limit)
        snippets = self._connection.execute(
            "SELECT rowid, snippet(message_words, 0, ?, ?, '…', ?) FROM message_words"
            f" WHERE message_words MATCH ? AND rowid IN ({_numbers(best)})",
            (HIT_START, HIT_END, _SNIPPET_WORDS, query),
        )
        return _found(best, {int(message): str(snippet) for message, snippet in snippets})

    def _read_through(self, text: str, limit: int) -> list[FoundChat]:
        """Search all messages for any part of a word and any character, which an index of words cannot find."""
        wanted = text.strip()
        if not wanted:
            return []
        rows = self._connection.execute(
            "SELECT message.conversation, message.id FROM message"
            " JOIN conversation ON conversation.id = message.conversation"
            f" WHERE {_THERE} AND contains_folded(message.content, ?) ORDER BY message.id DESC LIMIT ?",
            (wanted, _MOST_MESSAGES),
        )
        best = _by_conversation(rows, limit)
        contents = self._connection.execute(f"SELECT id, content FROM message WHERE id IN ({_numbers(best)})")
        return _found(best, {int(message): snippet_around(content, wanted) for message, content in contents})


def _by_conversation(rows: Iterable[tuple[int, int]], limit: int) -> dict[int, list[int]]:
    """The messages of each of the first ``limit`` conversations in ``rows``, which are in order."""
    found: dict[int, list[int]] = {}
    for conversation, message in rows:
        if conversation in found or len(found) < limit:
            found.setdefault(conversation, []).append(message)
    return found


def _numbers(found: dict[int, list[int]]) -> str:
    return ",".join(str(messages[0]) for messages in found.values())


def _found(best: dict[int, list[int]], snippets: dict[int, str]) -> list[FoundChat]:
    return [
        FoundChat(conversation, messages[0], len(messages), snippets.get(messages[0], ""))
        for conversation, messages in best.items()
    ]


def contains_folded(content: str, wanted: str) -> bool:
    """Whether ``wanted`` is in ``content``, ignoring case."""
    return wanted.casefold() in content.casefold()


def snippet_around(content: str, wanted: str) -> str:
    """The surroundings of the first ``wanted`` in ``content``, the hit between HIT_START and HIT_END."""
    content = content.translate(_MARKS)
    match = re.search(re.escape(wanted.translate(_MARKS)), content, re.IGNORECASE) if wanted else None
    if match is None:
        # Case folding can change lengths (ß, ss): then there is a hit but no place to mark.
        return content[: 2 * _AROUND] + ("…" if len(content) > 2 * _AROUND else "")
    start, end = max(0, match.start() - _AROUND), min(len(content), match.end() + _AROUND)
    before, after = "…" if start else "", "…" if end < len(content) else ""
    hit = f"{HIT_START}{match.group()}{HIT_END}"
    return before + content[start : match.start()] + hit + content[match.end() : end] + after
