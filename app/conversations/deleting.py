"""Deletions that can be undone until the program ends, and the removal from disk after that."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from app.conversations.attached import AttachedFiles
from app.conversations.drafts import Drafts
from app.conversations.records import Deletion
from app.conversations.searching import SearchIndex
from app.conversations.store import StoreError

_PASTED_LINES = 10
"""Number of lines that a question has at most if nothing was pasted into it."""
TITLE_LENGTH = 60
"""Length in characters that a title made from a question has at most."""

_BELOW = (
    "WITH RECURSIVE below (id) AS (SELECT id FROM message WHERE {chosen} AND deleted = '' UNION ALL"
    " SELECT m.id FROM below JOIN message m ON m.parent = below.id AND m.deleted = '') SELECT id FROM below ORDER BY id"
)
_ALTERNATIVES = (
    "id IN (SELECT s.id FROM message m JOIN message s"
    " ON s.conversation = m.conversation AND s.parent IS m.parent AND s.role = m.role WHERE m.id = :id)"
)


class Deleting:
    """The part of the store that deletes.

    A deleted row names the program that deleted it, by its ``token``. No call of the store returns such a row, and it
    is not in the search index. :meth:`purge` removes it from disk: when the store is closed, or, after a crash, when
    it is next opened. The methods are parts of the caller's transaction.
    """

    def __init__(self, connection: sqlite3.Connection, index: SearchIndex, token: str) -> None:
        self._connection = connection
        self._index = index
        self._token = token

    def conversation(self, conversation: int) -> Deletion:
        """Delete a conversation with all its messages."""
        messages = self._ids("SELECT id FROM message WHERE conversation = ? AND deleted = ''", conversation)
        leaf = self._leaf(conversation)
        self._mark("message", messages, self._token)
        self._mark("conversation", [conversation], self._token)
        return Deletion(conversation, tuple(messages), leaf, whole=True)

    def message(self, message: int, *, alternatives: bool) -> Deletion:
        """Delete a message and what follows it, as ``delete_message`` of the store says."""
        conversation, parent = self._connection.execute(
            "SELECT conversation, parent FROM message WHERE id = ?", (message,)
        ).fetchone()
        chosen = _ALTERNATIVES if alternatives else "id = :id"
        messages = [row[0] for row in self._connection.execute(_BELOW.format(chosen=chosen), {"id": message})]
        leaf = self._leaf(conversation)
        named_by_itself = self._named_by_a_question(conversation)
        self._mark("message", messages, self._token)
        if not self._ids("SELECT id FROM message WHERE conversation = ? AND deleted = '' LIMIT 1", conversation):
            self._mark("conversation", [conversation], self._token)
            return Deletion(conversation, tuple(messages), leaf, whole=True)
        if leaf in set(messages):
            self._set_leaf(conversation, self._newest_leaf(conversation, parent))
        if named_by_itself:
            self._name(conversation)
        return Deletion(conversation, tuple(messages), leaf)

    def restore(self, deletion: Deletion) -> None:
        """Undo ``deletion``. Raises StoreError if the rows are gone, or what they follow."""
        conversation = deletion.conversation
        there = self._connection.execute("SELECT deleted FROM conversation WHERE id = ?", (conversation,)).fetchone()
        if there is None or (there[0] and not deletion.whole):
            raise StoreError("this can no longer be brought back: its conversation was deleted meanwhile")
        named_by_itself = not deletion.whole and self._named_by_a_question(conversation)
        self._mark("conversation", [conversation], "")
        self._mark("message", deletion.messages, "")
        orphans = (
            "SELECT m.id FROM message m JOIN message p ON p.id = m.parent"
            " WHERE m.conversation = ? AND m.deleted = '' AND p.deleted <> '' LIMIT 1"
        )
        if self._ids(orphans, conversation):
            raise StoreError("this cannot be brought back yet: the message before it is deleted too")
        leaves = "SELECT id FROM message WHERE id = ? AND deleted = ''"
        if deletion.leaf is not None and self._ids(leaves, deletion.leaf):
            self._set_leaf(conversation, deletion.leaf)
        if named_by_itself:
            self._name(conversation)

    def left_over(self, is_alive: Callable[[str], bool]) -> list[str]:
        """Tokens of the programs that have ended and whose deletions are still on disk."""
        rows = self._connection.execute(
            "SELECT deleted FROM message WHERE deleted <> '' UNION SELECT deleted FROM conversation WHERE deleted <> ''"
        ).fetchall()
        return [token for (token,) in rows if not is_alive(token)]

    def purge(self, tokens: list[str]) -> None:
        """Remove from disk what the programs of ``tokens`` have deleted. It cannot be undone."""
        for token in tokens:
            self._connection.execute("DELETE FROM message WHERE deleted = ?", (token,))
            self._connection.execute("DELETE FROM conversation WHERE deleted = ?", (token,))
        if tokens:
            AttachedFiles(self._connection).drop_unlinked()
            Drafts(self._connection).drop_orphans()
        self._index.forget_for_good()

    # --- inside ---

    def _mark(self, table: str, rows: tuple[int, ...] | list[int], token: str) -> None:
        changed = [(token, row) for row in rows]
        self._connection.executemany(f"UPDATE {table} SET deleted = ? WHERE id = ?", changed)
        if table == "message":
            if token:
                self._index.forget(rows)
            else:
                self._index.catch_up()

    def _ids(self, query: str, argument: int) -> list[int]:
        return [int(row[0]) for row in self._connection.execute(query, (argument,))]

    def _leaf(self, conversation: int) -> int | None:
        found = self._ids("SELECT leaf FROM conversation WHERE id = ? AND leaf IS NOT NULL", conversation)
        return found[0] if found else None

    def _set_leaf(self, conversation: int, leaf: int | None) -> None:
        self._connection.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, conversation))

    def _newest_leaf(self, conversation: int, parent: int | None) -> int:
        """The newest message below ``parent``, or ``parent`` itself; the newest of all if ``parent`` is None."""
        if parent is not None:
            return self._ids(_BELOW.format(chosen="id = ?"), parent)[-1]
        return self._ids("SELECT max(id) FROM message WHERE conversation = ? AND deleted = ''", conversation)[0]

    def _named_by_a_question(self, conversation: int) -> bool:
        """Whether the title was made from a first question. Then it is made again when that question is deleted."""
        (title,) = self._connection.execute("SELECT title FROM conversation WHERE id = ?", (conversation,)).fetchone()
        return title in ("", *map(title_from, self._first_questions(conversation)))

    def _name(self, conversation: int) -> None:
        questions = self._first_questions(conversation)
        title = title_from(questions[0]) if questions else ""
        self._connection.execute("UPDATE conversation SET title = ? WHERE id = ?", (title, conversation))

    def _first_questions(self, conversation: int) -> list[str]:
        rows = self._connection.execute(
            "SELECT content FROM message WHERE conversation = ? AND parent IS NULL AND role = 'user' AND deleted = ''"
            " ORDER BY id",
            (conversation,),
        )
        return [row[0] for row in rows]


def title_from(question: str) -> str:
    """The first line that is not blank, cut at a word; of a pasted text the last one, if that alone asks something."""
    lines = [" ".join(line.split()) for line in question.splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if len(lines) > _PASTED_LINES and lines[-1].endswith("?") and not line.endswith(("?", ":")):
        line = lines[-1]
    line = "".join(character for character in line if character.isprintable()).strip("# *`>")
    if len(line) <= TITLE_LENGTH:
        return line
    cut = line[: TITLE_LENGTH - 1]
    words = cut.rsplit(" ", 1)[0]
    return (words if len(words) > TITLE_LENGTH // 2 else cut) + "…"
