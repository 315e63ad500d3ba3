"""Typed texts in the store: drafts that were not sent, and questions that were."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field

_INDEXED = 64
"""Number of characters of a question's beginning that are indexed."""
_MORE = 4
"""Number of questions read for one that is returned: the same question may have been asked several times."""
_HIGHEST = chr(0x10FFFF)


@dataclass(frozen=True)
class Draft:
    """Text that was not sent. ``pastes``: the folded pastes, by the labels that stand in the text."""

    text: str
    pastes: Mapping[str, str] = field(default_factory=dict)


class Drafts:
    """The part of the store with drafts and earlier questions. The methods are parts of the caller's transaction.

    Conversation 0 stands for one that has not begun. A negative number is that of a message that is being edited.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def of(self, conversation: int) -> Draft | None:
        """The draft of ``conversation``; None if there is none."""
        row = self._connection.execute(
            "SELECT text, pastes FROM draft WHERE conversation = ?", (conversation,)
        ).fetchone()
        return None if row is None else Draft(row[0], _pastes_from(row[1]))

    def keep(self, conversation: int, draft: Draft | None) -> None:
        """Replace the draft of ``conversation``; None removes it."""
        if draft is None:
            self._connection.execute("DELETE FROM draft WHERE conversation = ?", (conversation,))
            return
        pastes = json.dumps(dict(draft.pastes)) if draft.pastes else ""
        self._connection.execute(
            "INSERT INTO draft (conversation, text, pastes) VALUES (?, ?, ?)"
            " ON CONFLICT (conversation) DO UPDATE SET text = excluded.text, pastes = excluded.pastes",
            (conversation, draft.text, pastes),
        )

    def drop_orphans(self) -> None:
        """Remove the drafts of conversations and messages that are gone."""
        self._connection.execute(
            "DELETE FROM draft WHERE conversation <> 0"
            " AND NOT EXISTS (SELECT 1 FROM conversation WHERE id = draft.conversation)"
            " AND NOT EXISTS (SELECT 1 FROM message WHERE id = -draft.conversation)"
        )

    def questions(self, beginning: str, limit: int) -> list[str]:
        """Questions of all conversations that begin with ``beginning``, newest first, each once, at most ``limit``."""
        wanted, arguments = "", [limit * _MORE]
        if beginning:
            wanted = " AND substr(content, 1, 64) >= ?2 AND substr(content, 1, 64) < ?3"
            start = beginning[:_INDEXED]
            arguments += [start, start + _HIGHEST]  # type: ignore[list-item]
        rows = self._connection.execute(
            f"SELECT content FROM message WHERE role = 'user' AND deleted = ''{wanted} ORDER BY id DESC LIMIT ?1",
            arguments,
        )
        found = dict.fromkeys(content for (content,) in rows if content.startswith(beginning))
        return list(found)[:limit]


def _pastes_from(text: str) -> dict[str, str]:
    """The pastes; none if the text is not an object of texts in JSON."""
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {label: paste for label, paste in content.items() if isinstance(paste, str)}
