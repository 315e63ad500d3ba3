"""The files attached to messages, in the store: each text and picture once, however many messages have it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence

from app.attachments.attachment import AttachedPicture, Attachment


class AttachedFiles:
    """The part of the store with attachments. The methods are parts of the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def put(self, message: int, attachments: Sequence[Attachment]) -> None:
        """Attach files to a new message."""
        for position, attachment in enumerate(attachments):
            digest = attachment.digest
            if attachment.picture is None:
                self._connection.execute(
                    "INSERT INTO attached_text (digest, text) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING",
                    (digest, attachment.data.decode("utf-8", "replace")),
                )
                self._connection.execute(
                    "INSERT INTO attachment (message, position, name, text)"
                    " SELECT ?, ?, ?, id FROM attached_text WHERE digest = ?",
                    (message, position, attachment.name, digest),
                )
            else:
                picture = attachment.picture
                self._connection.execute(
                    "INSERT INTO picture (digest, width, height, data) VALUES (?, ?, ?, ?)"
                    " ON CONFLICT (digest) DO NOTHING",
                    (digest, picture.width, picture.height, picture.data),
                )
                self._connection.execute(
                    "INSERT INTO attached_picture (message, position, name, picture)"
                    " SELECT ?, ?, ?, id FROM picture WHERE digest = ?",
                    (message, position, attachment.name, digest),
                )

    def of(self, messages: Iterable[int]) -> dict[int, tuple[Attachment, ...]]:
        """The attachments of those of ``messages`` that have any."""
        wanted = json.dumps(list(messages))
        texts = self._connection.execute(
            "SELECT a.message, a.position, a.name, t.text FROM json_each(?) wanted"
            " JOIN attachment a ON a.message = wanted.value JOIN attached_text t ON t.id = a.text",
            (wanted,),
        )
        placed = [(message, position, Attachment(name, text)) for message, position, name, text in texts]
        shown = self._connection.execute(
            "SELECT a.message, a.position, a.name, a.picture FROM json_each(?) wanted"
            " JOIN attached_picture a ON a.message = wanted.value",
            (wanted,),
        )
        pictures: dict[int, AttachedPicture] = {}
        for message, position, name, number in shown.fetchall():
            # A picture that several messages have is in memory once.
            picture = pictures[number] = pictures.get(number) or self._picture(number)
            placed.append((message, position, Attachment(name, picture=picture)))
        found: dict[int, tuple[Attachment, ...]] = {}
        for message, _, attachment in sorted(placed, key=lambda each: each[:2]):
            found[message] = (*found.get(message, ()), attachment)
        return found

    def _picture(self, number: int) -> AttachedPicture:
        (row,) = self._connection.execute("SELECT data, width, height FROM picture WHERE id = ?", (number,))
        return AttachedPicture(*row)

    def drop_unlinked(self) -> None:
        """Remove the texts and pictures that no message has any more."""
        self._connection.execute(
            "DELETE FROM attached_text WHERE NOT EXISTS (SELECT 1 FROM attachment WHERE text = attached_text.id)"
        )
        self._connection.execute(
            "DELETE FROM picture WHERE NOT EXISTS (SELECT 1 FROM attached_picture WHERE picture = picture.id)"
        )
