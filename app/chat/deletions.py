"""Deletions in the chat: of messages and of conversations, each of which can be undone. No Textual."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from app.chat.saving import unlocked
from app.chat.state import Entry, Severity
from app.chat.thread import Thread
from app.conversations.records import Deletion, MessageRecord
from app.conversations.store import ConversationStore, StoreError
from app.text_safety import one_line


@dataclass(frozen=True)
class Deleted:
    """One step that can be undone. ``what`` names it in a notice (``the chat “Rain”``, ``3 messages``)."""

    what: str
    memory: ConversationStore | None
    """The store of a temporary conversation; None: what was deleted was on disk."""
    parts: tuple[Deletion, ...]
    shown: bool
    """True if it was on the screen, and is to be there again when it is undone."""


class OpenChat(Protocol):
    """The part of the controller that deletions need."""

    thread: Thread

    @property
    def store(self) -> ConversationStore: ...

    def stop(self) -> bool: ...

    def empty(self) -> None:
        """Show an empty conversation of the same kind as the shown one."""
        ...

    def open_conversation(
        self, conversation: int, message: int | None = None, memory: ConversationStore | None = None
    ) -> bool: ...

    def show(self, records: Sequence[MessageRecord], focus: int | None = None) -> None: ...

    def stop_conversations(self, numbers: Sequence[int]) -> None:
        """Stop the answers of saved conversations, which are about to be deleted."""
        ...

    def forget_prefixes(self, conversations: Sequence[int]) -> None:
        """Remove what the engine keeps on disk of saved conversations."""
        ...

    def notify(self, text: str, severity: Severity = "information") -> None: ...

    def run_in_background(self, work: Coroutine[None, None, None]) -> None: ...


class Deletions:
    """Deletes, and undoes deletions, the latest first.

    What is deleted stays in the store until the program ends. What the engine keeps on disk of the conversation is
    removed at once, as it can be read again. The methods return at once and notify of what happened; ``done`` is called
    afterwards.
    """

    def __init__(self, chat: OpenChat) -> None:
        self._chat = chat
        self.undo_words = "/undo", "/undo"
        """How a person brings back a message here, and a chat: a command, and keys where there are any."""
        self._steps: list[Deleted] = []

    @property
    def latest(self) -> str:
        """Description of what would be undone; empty if there is nothing."""
        return self._steps[-1].what if self._steps else ""

    def forget(self, memory: ConversationStore) -> None:
        """The temporary conversation of ``memory`` was left: nothing of it can be undone."""
        self._steps = [step for step in self._steps if step.memory is not memory]

    def named(self, what: str = "") -> None:
        """Delete the last message of the shown conversation, or, if ``what`` is ``chat``, the conversation."""
        thread = self._chat.thread
        if what.casefold() == "chat":
            if thread.memory is not None or thread.conversation is None:
                self._chat.notify("This chat is not saved, so there is nothing to delete.", "warning")
            else:
                self.conversations([thread.conversation], chat_named(thread.title))
        elif what:
            self._chat.notify(
                f"There is no /delete {what}: /delete deletes the last message, /delete chat the whole chat.", "warning"
            )
        elif thread.path:
            self.message(thread.path[-1])
        else:
            self._chat.notify("There is no message to delete.", "warning")

    def message(self, entry: Entry, *, alternatives: bool = False) -> None:
        """Delete ``entry`` and what follows it. ``alternatives``: also its alternatives and what follows them.

        An answer in progress is stopped first. Another alternative takes its place, if one is left.
        """
        if entry not in self._chat.thread.path:
            return
        self._chat.stop()
        if entry.record is None:
            self._chat.notify("This message is not saved yet, so it cannot be deleted.", "warning")
            return
        self._chat.run_in_background(self._message(self._chat.thread, entry, entry.record, alternatives))

    def conversations(self, numbers: Sequence[int], what: str, done: Callable[[], object] = lambda: None) -> None:
        """Delete the conversations ``numbers`` as one step, which notices call ``what``."""
        self._chat.run_in_background(self._conversations(numbers, what, done))

    def undo(self, done: Callable[[], object] = lambda: None) -> None:
        """Bring back what was deleted last, and show it if it was on the screen."""
        if not self._steps:
            self._chat.notify("There is no deletion to undo.")
            return
        self._chat.run_in_background(self._undo(self._steps.pop(), done))

    async def _message(self, thread: Thread, entry: Entry, record: int, alternatives: bool) -> None:
        store = thread.store_in(self._chat.store)
        try:
            deletion = await unlocked(lambda: store.delete_message(record, alternatives=alternatives))
            left = [] if deletion.whole else await unlocked(lambda: store.shown(deletion.conversation))
            title = "" if deletion.whole else store.conversation(deletion.conversation).title
        except StoreError as error:
            self._chat.notify(str(error), "error")
            return
        if thread.memory is None:
            self._chat.forget_prefixes([deletion.conversation])
        what = _messages(entry, len(deletion.messages))
        self._steps.append(Deleted(what, thread.memory, (deletion,), shown=True))
        if self._chat.thread is thread:
            if deletion.whole:
                self._chat.empty()
            else:
                thread.title = title
                self._chat.show(left, focus=_nearest(thread, entry, left))
        self._tell(what, self.undo_words[0])

    async def _conversations(self, numbers: Sequence[int], what: str, done: Callable[[], object]) -> None:
        store = self._chat.store
        thread = self._chat.thread
        shown = thread.memory is None and thread.conversation in numbers
        self._chat.stop_conversations(numbers)
        if shown:
            self._chat.empty()
        parts: list[Deletion] = []
        try:
            for number in numbers:
                parts.append(await unlocked(lambda number=number: store.delete(number)))  # type: ignore[misc]
        except StoreError as error:
            self._chat.notify(str(error), "error")
        if parts:
            self._chat.forget_prefixes([part.conversation for part in parts])
            self._steps.append(Deleted(what, None, tuple(parts), shown))
            self._tell(what, self.undo_words[1])
        done()

    async def _undo(self, step: Deleted, done: Callable[[], object]) -> None:
        store = step.memory or self._chat.store
        try:
            for part in reversed(step.parts):
                await unlocked(partial(store.restore, part))
        except StoreError as error:
            self._chat.notify(f"Not undone: {error}.", "error")
            done()
            return
        if step.shown:
            self._show_again(store, step)
        self._chat.notify(f"Brought back {step.what}.")
        done()

    def _show_again(self, store: ConversationStore, step: Deleted) -> None:
        part, chat = step.parts[0], self._chat
        if chat.thread.conversation != part.conversation:
            chat.open_conversation(part.conversation, memory=step.memory)
            return
        try:
            chat.thread.title = store.conversation(part.conversation).title
            chat.show(store.shown(part.conversation), focus=min(part.messages))
        except StoreError as error:
            chat.notify(str(error), "error")

    def _tell(self, what: str, words: str) -> None:
        self._chat.notify(f"Deleted {what}. {words} brings it back.")


def _messages(entry: Entry, count: int) -> str:
    what = "the question" if entry.role == "user" else "the answer"
    return what if count == 1 else f"{what} and {count - 1} more message{'' if count == 2 else 's'}"


def _nearest(thread: Thread, entry: Entry, left: Sequence[MessageRecord]) -> int | None:
    """The message to look at after ``entry`` was deleted: the one in its place, or the last that is left."""
    place = thread.path.index(entry) if entry in thread.path else len(left)
    return left[min(place, len(left) - 1)].id if left else None


def chat_named(title: str) -> str:
    """The name of a conversation with this ``title`` in a notice."""
    return f"the chat “{one_line(title)}”" if title.strip() else "the chat without a title"
