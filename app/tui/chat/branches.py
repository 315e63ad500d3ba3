"""Where alternatives of a message are: on the screen and in the store. No Textual."""

from __future__ import annotations

from collections.abc import Sequence

from app.conversations.records import MessageRecord
from app.conversations.store import ConversationStore
from app.tui.chat.state import Entry


def alternative(store: ConversationStore, record: int, offset: int) -> int:
    """The row of the alternative ``offset`` after ``record``, around the end. Raises StoreError."""
    alternatives = store.siblings(record)
    position = next(index for index, found in enumerate(alternatives) if found.id == record)
    return alternatives[(position + offset) % len(alternatives)].id


def answer_place(path: Sequence[Entry], question: Entry) -> int | None:
    """Where in ``path`` the answer to ``question`` is, or belongs; None: the question is not there.

    After a change of branches the same question may be another object: its row in the store is the same.
    """
    found = (i for i, entry in enumerate(path) if entry is question or (entry.record or 0) == question.record)
    place = next(found, None)
    return None if place is None else place + 1


def stored_alternative(store: ConversationStore, shown: Entry | None, text: str) -> MessageRecord | None:
    """The alternative of ``shown`` that says ``text``, if there is one on disk. Raises StoreError."""
    if shown is None or shown.record is None:
        return None
    return next((record for record in store.siblings(shown.record) if record.content == text), None)
