"""The full-text index over messages: derived data, made again whenever it is missing or behind."""

from __future__ import annotations

import re
import sqlite3

HIT_START, HIT_END = "\ue000", "\ue001"
_MARKS = str.maketrans("", "", HIT_START + HIT_END)
_LEFT_OUT = "indexed = 0 AND state <> 'writing'"
_SNIPPET_WORDS = 16
_AROUND = 60


class SearchIndex:
    """Finds messages by words.

    An answer is indexed when it is complete: indexing it at every writing would cost several times the writing itself.
    ``available`` is false where Python's SQLite was built without FTS5; then messages are read through one by one,
    which finds the same text more slowly.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.available = self._make()
        connection.create_function("contains_folded", 2, contains_folded, deterministic=True)

    def put(self, message: int, content: str) -> None:
        """Index ``content``; part of the caller's transaction."""
        if self.available:
            self._connection.execute("DELETE FROM message_words WHERE rowid = ?", (message,))
            self._connection.execute(
                "INSERT INTO message_words (rowid, content) VALUES (?, ?)", (message, content.translate(_MARKS))
            )
            self._connection.execute("UPDATE message SET indexed = 1 WHERE id = ?", (message,))

    def forget(self, conversation: int) -> None:
        """Take a conversation's messages out, before they are deleted."""
        if self.available:
            self._connection.execute(
                "DELETE FROM message_words WHERE rowid IN (SELECT id FROM message WHERE conversation = ?)",
                (conversation,),
            )

    def catch_up(self) -> None:
        """Index what was left out: answers whose writer died, and what a program without FTS5 has written; and drop
        what such a program has deleted."""
        if not self.available:
            return
        for message, content in self._connection.execute(
            f"SELECT id, content FROM message WHERE {_LEFT_OUT}"
        ).fetchall():
            self.put(message, content)
        self._connection.execute("DELETE FROM message_words WHERE rowid NOT IN (SELECT id FROM message)")

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

    def find(self, text: str, limit: int) -> list[tuple[int, str]]:
        """``(message, snippet)``, best first. Whatever is in ``text``, it is taken as text to look for."""
        found = self._find_words(text, limit) if self.available else []
        return found or self._read_through(text, limit)

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
            raise
        return True

    def _find_words(self, text: str, limit: int) -> list[tuple[int, str]]:
        words = re.findall(r"\w+", text)
        if not words:
            return []
        # Quoted, so that no word is an operator; the last may be the beginning of a word still being typed.
        query = " ".join(f'"{word}"' for word in words) + "*"
        rows = self._connection.execute(
            "SELECT rowid, snippet(message_words, 0, ?, ?, '…', ?) FROM message_words"
            " WHERE message_words MATCH ? ORDER BY rank LIMIT ?",
            (HIT_START, HIT_END, _SNIPPET_WORDS, query, limit),
        )
        return [(int(message), str(snippet)) for message, snippet in rows]

    def _read_through(self, text: str, limit: int) -> list[tuple[int, str]]:
        """Any part of a word, any sign: what an index of words cannot find."""
        if not text.strip():
            return []
        rows = self._connection.execute(
            "SELECT id, content FROM message WHERE contains_folded(content, ?) ORDER BY id DESC LIMIT ?",
            (text.strip(), limit),
        )
        return [(int(message), snippet_around(content, text.strip())) for message, content in rows]


def contains_folded(content: str, wanted: str) -> bool:
    """Whether ``wanted`` is in ``content``, whatever the case."""
    return wanted.casefold() in content.casefold()


def snippet_around(content: str, wanted: str) -> str:
    """The surroundings of the first ``wanted`` in ``content``, the hit between HIT_START and HIT_END."""
    content = content.translate(_MARKS)
    found = re.search(re.escape(wanted.translate(_MARKS)), content, re.IGNORECASE) if wanted else None
    if found is None:
        # Case folding can change lengths (ß, ss): then there is a hit but no place to mark.
        return content[: 2 * _AROUND] + ("…" if len(content) > 2 * _AROUND else "")
    start, end = max(0, found.start() - _AROUND), min(len(content), found.end() + _AROUND)
    before, after = "…" if start else "", "…" if end < len(content) else ""
    hit = f"{HIT_START}{found.group()}{HIT_END}"
    return before + content[start : found.start()] + hit + content[found.end() : end] + after
