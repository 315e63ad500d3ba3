"""Writing what is imported into the database, as part of one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from app.conversations.attached import AttachedFiles
from app.conversations.deleting import title_from
from app.conversations.importing.parts import Added, ImportedConversation
from app.conversations.searching import SearchIndex


class Adding:
    """The part of the store that adds whole conversations. :meth:`add` is part of the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, index: SearchIndex, attached: AttachedFiles) -> None:
        self._connection = connection
        self._index = index
        self._attached = attached

    def add(self, conversations: Sequence[ImportedConversation], now: float) -> Added:
        """Add those whose origin is not here yet. ``now``: the time of one that has none, in seconds since the
        epoch."""
        new = 0
        for conversation in conversations:
            if not self._is_known(conversation.origin):
                self._add(conversation, now)
                new += 1
        self._index.catch_up()
        return Added(new, len(conversations) - new)

    def _is_known(self, origin: str) -> bool:
        row = self._connection.execute("SELECT id, deleted FROM conversation WHERE origin = ?", (origin,)).fetchone()
        if row is None:
            return False
        if not row[1]:
            return True
        # Who deleted it and imports it again wants it back, as it is in the file.
        self._connection.execute("UPDATE conversation SET origin = '' WHERE id = ?", (row[0],))
        return False

    def _add(self, conversation: ImportedConversation, now: float) -> None:
        times = [message.created for message in conversation.messages if message.created is not None]
        created = conversation.created or min(times, default=now)
        updated = max(created, conversation.updated or max(times, default=created))
        first = next((message.content for message in conversation.messages if message.role == "user"), "")
        number = self._insert(
            "INSERT INTO conversation (title, system, model, created, updated, archived, pinned, origin, own_values)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            conversation.title or title_from(first),
            conversation.system,
            conversation.model,
            created,
            updated,
            conversation.archived,
            conversation.pinned,
            conversation.origin,
            json.dumps(conversation.own_values) if conversation.own_values else "",
        )
        places: list[int] = []
        for message in conversation.messages:
            written = self._insert(
                "INSERT INTO message (conversation, parent, role, content, state, created, model, tokens,"
                " tokens_per_s, finish_reason, reasoning, reasoning_tokens, reasoning_s, generation)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                number,
                None if message.parent is None else places[message.parent],
                message.role,
                message.content,
                message.state,
                message.created or created,
                message.model,
                message.tokens,
                message.tokens_per_s,
                message.finish_reason,
                message.thoughts.text,
                message.thoughts.tokens,
                message.thoughts.seconds,
                message.generation.to_json(),
            )
            self._attached.put(written, message.attachments)
            places.append(written)
        leaf = places[-1 if conversation.leaf is None else conversation.leaf]
        self._connection.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, number))

    def _insert(self, statement: str, *values: object) -> int:
        row = self._connection.execute(statement, values).lastrowid
        assert row is not None  # an INSERT always sets it
        return row
