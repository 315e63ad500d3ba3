"""The files attached to messages, in the store: each text once, however many messages have it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence

from app.attachments.attachment import Attachment


class AttachedFiles:
    """The part of the store with attachments. The methods are parts of the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def put(self, message: int, attachments: Sequence[Attachment]) -> None:
        """Attach files to a new message."""
        for position, attachment in enumerate(attachments):
            digest = attachment.digest
            self._connection.execute(
                "INSERT INTO attached_text (digest, text) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING",
                (digest, attachment.data.decode("utf-8", "replace")),
            )
            self._connection.execute(
                "INSERT INTO attachment (message, position, name, text)"
                " SELECT ?, ?, ?, id FROM attached_text WHERE digest = ?",
                (message, position, attachment.name, digest),
            )

    def of(self, messages: Iterable[int]) -> dict[int, tuple[Attachment, ...]]:
        """The attachments of those of ``messages`` that have any."""
        rows = self._connection.execute(
            "SELECT a.message, a.name, t.text FROM json_each(?) wanted JOIN attachment a ON a.message = wanted.value"
            " JOIN attached_text t ON t.id = a.text ORDER BY a.message, a.position",
            (json.dumps(list(messages)),),
        )
        found: dict[int, tuple[Attachment, ...]] = {}
        for message, name, text in rows:
            found[message] = (*found.get(message, ()), Attachment(name, text))
        return found

    def drop_unlinked(self) -> None:
        """Remove the texts that no message has any more."""
        self._connection.execute(
            "DELETE FROM attached_text WHERE NOT EXISTS (SELECT 1 FROM attachment WHERE text = attached_text.id)"
        )
