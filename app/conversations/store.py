"""Conversations in SQLite: the question is on disk before generation starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from app.conversations.records import Conversation, MessageRecord, Role, SearchHit, State


class ConversationStore(Protocol):
    """All calls are synchronous, short, and raise StoreError."""

    path: Path
    notices: list[str]
    """What opening had to say (a damaged database put aside, partial answers recovered)."""

    def create(self, *, model: str, system: str = "", title: str = "") -> Conversation: ...

    def conversations(self, *, archived: bool = False, limit: int = 500) -> list[Conversation]:
        """Newest first."""
        ...

    def conversation(self, conversation: int) -> Conversation: ...

    def change(
        self, conversation: int, *, title: str | None = None, system: str | None = None, model: str | None = None,
        archived: bool | None = None,
    ) -> Conversation: ...  # fmt: skip

    def delete(self, conversation: int) -> None: ...

    def add(
        self, conversation: int, role: Role, content: str, *, parent: int | None, state: State = "complete",
        model: str = "",
    ) -> MessageRecord:  # fmt: skip
        """Add a message, make it the conversation's leaf, commit. The first question names an untitled conversation."""
        ...

    def update(
        self, message: int, *, content: str | None = None, state: State | None = None, tokens: int | None = None,
        tokens_per_s: float | None = None, finish_reason: str | None = None,
    ) -> None: ...  # fmt: skip

    def path_to(self, message: int) -> list[MessageRecord]:
        """From the first message to ``message``."""
        ...

    def shown(self, conversation: int) -> list[MessageRecord]:
        """The path to the conversation's leaf."""
        ...

    def siblings(self, message: int) -> list[MessageRecord]:
        """Alternatives to ``message`` (itself included), oldest first."""
        ...

    def select(self, message: int) -> list[MessageRecord]:
        """Show the branch that holds ``message`` (its newest descendant becomes the leaf); the new path."""
        ...

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """Full-text search over messages and titles; any text is safe to give."""
        ...

    def export(self, conversation: int, form: str) -> str:
        """``form`` is ``markdown`` or ``json``."""
        ...

    def messages(self, conversation: int) -> Iterable[MessageRecord]:
        """All messages of all branches, oldest first."""
        ...

    def close(self) -> None: ...


def open_store(path: Path) -> ConversationStore:
    """Open or make the database: WAL, migrations, ``writing`` messages of programs that died become ``stopped``.

    A damaged file is put aside (``conversations.damaged-<time>.sqlite``) after what can be read is recovered, and said
    in ``notices``. Raises StoreError (locked by another writer, disk full, written by a later version).
    """
    from app.conversations.opening import open_database

    return open_database(path)
