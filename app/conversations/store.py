"""The interface of the conversation store, and the errors it raises."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from app.attachments.attachment import Attachment
from app.conversations.drafts import Draft
from app.conversations.records import (
    Conversation,
    Deletion,
    Generation,
    MessageRecord,
    Role,
    SearchHit,
    State,
    Thoughts,
)

if TYPE_CHECKING:
    from app.conversations.importing.parts import Added, ImportedConversation


class StoreError(Exception):
    """A call to the store failed. The text is one sentence for the person.

    ``reason`` is ``locked``, ``damaged``, ``full`` or ``other``.
    """

    def __init__(self, text: str, reason: Literal["locked", "damaged", "full", "other"] = "other") -> None:
        super().__init__(text)
        self.reason = reason


class ConversationStore(Protocol):
    """All calls are synchronous, short, and raise StoreError."""

    path: Path
    notices: list[str]
    """Notices of opening: a damaged database was kept aside, partial answers were recovered. Later ones are added."""

    def look_after_file(self) -> None:
        """Write everything again if the file was deleted, moved or replaced, and say so in ``notices``."""
        ...

    def create(
        self, *, model: str, system: str = "", title: str = "", own_values: Mapping[str, Any] | None = None
    ) -> Conversation: ...

    def conversations(self, *, archived: bool = False, limit: int = 500) -> list[Conversation]:
        """Newest first."""
        ...

    def conversation(self, conversation: int) -> Conversation: ...

    def change(
        self, conversation: int, *, title: str | None = None, system: str | None = None, model: str | None = None,
        archived: bool | None = None, pinned: bool | None = None, own_values: Mapping[str, Any] | None = None,
    ) -> Conversation: ...  # fmt: skip

    def delete(self, conversation: int) -> Deletion:
        """Delete a conversation with all its branches.

        Whatever is deleted can be restored until the store is closed. Then it is removed from disk.
        """
        ...

    def delete_message(self, message: int, *, alternatives: bool = False) -> Deletion:
        """Delete ``message`` and what follows it. ``alternatives``: also its alternatives and what follows them.

        The newest branch that is left becomes the shown one. A conversation without a message left is deleted too. A
        title that was made from a deleted question is made from the oldest first question that is left.
        """
        ...

    def restore(self, deletion: Deletion) -> Conversation:
        """Undo ``deletion``: its messages are there again, and the branch that was shown before it is shown."""
        ...

    def add(
        self, conversation: int, role: Role, content: str, *, parent: int | None, state: State = "complete",
        model: str = "", attachments: Sequence[Attachment] = (),
    ) -> MessageRecord:  # fmt: skip
        """Add a message, make it the conversation's leaf, commit. The first question becomes a missing title."""
        ...

    def update(
        self, message: int, *, content: str | None = None, state: State | None = None, tokens: int | None = None,
        tokens_per_s: float | None = None, finish_reason: str | None = None, thoughts: Thoughts | None = None,
        generation: Generation | None = None,
    ) -> None: ...  # fmt: skip

    def shown(self, conversation: int) -> list[MessageRecord]:
        """The path to the conversation's leaf."""
        ...

    def siblings(self, message: int) -> list[MessageRecord]:
        """Alternatives to ``message`` (itself included), oldest first."""
        ...

    def select(self, message: int) -> list[MessageRecord]:
        """Show the branch of ``message``: its newest descendant becomes the leaf. Returns the new path."""
        ...

    def draft(self, conversation: int) -> Draft | None:
        """The text that was typed in ``conversation`` and not sent; 0 is a conversation that has not begun.

        With the number of a message and a minus: another text of that message that was not sent.
        """
        ...

    def keep_draft(self, conversation: int, draft: Draft | None) -> None:
        """Replace the draft of ``conversation``; None removes it."""
        ...

    def questions(self, beginning: str = "", limit: int = 100) -> list[str]:
        """Questions of all conversations that begin with ``beginning``, newest first, each once."""
        ...

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """Full-text search over messages and titles: each conversation once, best first. Any ``text`` is safe."""
        ...

    def export(self, conversation: int, form: str, *, thoughts: bool = False) -> str:
        """``form`` is ``markdown`` or ``json``. ``thoughts``: with what the model thought."""
        ...

    def take_in(self, conversations: Sequence[ImportedConversation]) -> Added:
        """Add conversations of other programs, all of them or, on an error, none. Those that are here are left out."""
        ...

    def messages(self, conversation: int) -> Iterable[MessageRecord]:
        """All messages of all branches, oldest first."""
        ...

    def close(self) -> None: ...


# --- errors of SQLite ----------------------------------------------------------------------------------------------

_NO_SPACE_BYTES = 256 * 1024
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, e.g. SQLITE_BUSY; 0 if the error came from Python."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_damage(error: sqlite3.Error) -> bool:
    return primary_code(error) in _DAMAGED


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    code = primary_code(error)
    if code in _LOCKED:
        return StoreError(
            f"The conversations in {path} are locked by another program; close it or try again.", "locked"
        )
    if code in _DAMAGED:
        return StoreError(
            f"The conversations in {path} are damaged ({error}); start privatellm again to recover what is readable.",
            "damaged",
        )
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path)):
        return StoreError(f"There is no space left to save to {path}; free some and the text is saved then.", "full")
    if code == sqlite3.SQLITE_READONLY:
        return StoreError(f"The conversations in {path} cannot be written: the file or its folder is read-only.")
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreError(f"The conversations in {path} cannot be opened; check that the folder may be read.")
    return StoreError(f"The conversations in {path} cannot be used: {error}.")


def _is_full(path: Path) -> bool:
    """Whether the disk is full. Some failed writes, such as growing a mapped file, do not give that as their reason."""
    try:
        return shutil.disk_usage(path.parent).free < _NO_SPACE_BYTES
    except OSError:
        return False


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns an sqlite3.Error inside into a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, path) from error
