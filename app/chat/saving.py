"""Saving what is on the screen, with new attempts when the store refuses. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from app.chat.state import Entry, Severity
from app.chat.thread import Thread
from app.conversations.importing.parts import ImportProblem
from app.conversations.importing.reading import read_conversations
from app.conversations.store import ConversationStore, StoreError

RETRY_SAVE_S = 5.0
"""Seconds between two attempts while there is a problem."""
LOCKED_TRIES = 8
"""Number of attempts that may find the store locked before it is a problem. Most writes are short."""
RETRY_LOCKED_S = 0.15
"""Seconds between these attempts, each of which waits a little itself."""


Result = TypeVar("Result")


async def unlocked(change: Callable[[], Result]) -> Result:
    """The result of ``change``, which is tried again while another program has the store locked.

    Raises StoreError as ``change`` does, and with the reason "locked" only after :data:`LOCKED_TRIES` attempts.
    """
    for _ in range(LOCKED_TRIES - 1):
        try:
            return change()
        except StoreError as error:
            if error.reason != "locked":
                raise
        await asyncio.sleep(RETRY_LOCKED_S)
    return change()


async def rename(store: ConversationStore, thread: Thread, title: str) -> None:
    """Give the conversation of ``thread`` a title, also on disk if it is saved. Raises StoreError."""
    conversation = thread.conversation
    if conversation is not None:
        kept = thread.store_in(store)
        title = (await unlocked(lambda: kept.change(conversation, title=title))).title
    thread.title = title


async def save_setup(store: ConversationStore, thread: Thread) -> None:
    """Write the system prompt and the own values of ``thread`` if its conversation is saved. Raises StoreError."""
    conversation = thread.conversation
    if conversation is not None:
        kept = thread.store_in(store)
        await unlocked(lambda: kept.change(conversation, system=thread.system, own_values=thread.values.stored))


class Saver:
    """Writes entries to the store. What could not be written is kept for another attempt.

    ``on_problem`` is called once with the reason when the store starts to refuse, and once with an empty text when
    everything is on disk again. A short lock does not count. ``on_late`` is called when everything that was refused
    before is on disk.
    """

    def __init__(
        self, store: ConversationStore, on_problem: Callable[[str], None], on_late: Callable[[], None] = lambda: None
    ) -> None:
        self.store = store
        self.problem = ""
        self._told = len(store.notices)
        self._on_problem = on_problem
        self._on_late = on_late
        self._settling = asyncio.Lock()
        self._pending: list[tuple[Thread, tuple[Entry, ...]]] = []
        self._refusals = 0

    @property
    def waits(self) -> bool:
        """Whether the store is locked by another program's write. :meth:`settle` waits for its end."""
        return bool(self._pending) and not self.problem

    async def settle(self) -> None:
        """Try until everything is on disk, or the store has been locked for so long that it is a problem."""
        async with self._settling:
            while self.waits:
                await asyncio.sleep(RETRY_LOCKED_S)
                if self.waits:
                    self.retry()

    @property
    def unsaved(self) -> int:
        """Number of messages that are on the screen only."""
        return len({entry.key for _, path in self._pending for entry in path if _differs(entry)})

    def look_after_file(self) -> list[str]:
        """Have the store's file written again if it is gone. Returns the messages about the store since the last
        call."""
        try:
            self.store.look_after_file()
        except StoreError as error:
            self._report(str(error))
        new, self._told = self.store.notices[self._told :], len(self.store.notices)
        return new

    def save(self, thread: Thread, path: Sequence[Entry]) -> bool:
        """Write ``path``, from the first message on. Returns False if that failed. Unchanged messages cost nothing."""
        self._remember(thread, tuple(path))
        return self.retry()

    def retry(self) -> bool:
        """Write everything that is missing. Returns False if that failed."""
        try:
            self.store.look_after_file()
            while self._pending:
                self._write(*self._pending[0])
                del self._pending[0]
        except StoreError as error:
            self._refused(error)
            return False
        late, self._refusals = self._refusals > 0, 0
        self._report("")
        if late:
            self._on_late()
        return True

    def refused(self, thread: Thread, path: Sequence[Entry], error: StoreError) -> None:
        """Try later to write ``path``, whose write failed elsewhere with ``error``."""
        self._remember(thread, tuple(path))
        self._refused(error)

    def _refused(self, error: StoreError) -> None:
        self._refusals += 1
        if error.reason != "locked" or self._refusals >= LOCKED_TRIES:
            self._report(str(error))

    def _remember(self, thread: Thread, path: tuple[Entry, ...]) -> None:
        known = [index for index, (other, held) in enumerate(self._pending) if other is thread and held[-1] is path[-1]]
        if known:
            self._pending[known[0]] = (thread, path)
        else:
            self._pending.append((thread, path))

    def _write(self, thread: Thread, path: tuple[Entry, ...]) -> None:
        store = thread.store_in(self.store)
        if thread.conversation is None:
            created = store.create(
                model=thread.model, system=thread.system, title=thread.title, own_values=thread.values.stored
            )
            thread.conversation = created.id
        parent: int | None = None
        added = False
        for entry in path:
            if entry.record is None:
                self._add(store, thread.conversation, entry, parent)
                added = True
            elif entry.dirty:
                self._update(store, entry)
            parent = entry.record
        if added and not thread.title:
            thread.title = store.conversation(thread.conversation).title

    def _add(self, store: ConversationStore, conversation: int, entry: Entry, parent: int | None) -> None:
        record = store.add(
            conversation,
            entry.role,
            entry.content,
            parent=parent,
            state=entry.state,
            model=entry.model,
            attachments=entry.attachments,
        )
        entry.record = record.id
        entry.siblings, entry.sibling_index = record.siblings, record.sibling_index
        if entry.tokens or entry.finish_reason or entry.thoughts.text or entry.generation.known:
            self._update(store, entry)
        entry.dirty = False

    def _update(self, store: ConversationStore, entry: Entry) -> None:
        assert entry.record is not None
        store.update(
            entry.record,
            content=entry.content,
            state=entry.state,
            tokens=entry.tokens,
            tokens_per_s=entry.tokens_per_s,
            finish_reason=entry.finish_reason,
            thoughts=entry.thoughts,
            generation=entry.generation,
        )
        entry.dirty = False

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)


def _differs(entry: Entry) -> bool:
    return entry.record is None or entry.dirty


# --- pinned and archived ---------------------------------------------------------------------------------------------


_DONE = {
    ("pinned", True): "Pinned the chat.",
    ("pinned", False): "Unpinned the chat.",
    ("archived", True): "Archived the chat.",
    ("archived", False): "Restored the chat from the archive.",
}


class ListedChat(Protocol):
    """The part of the controller that the changes need."""

    thread: Thread
    store: ConversationStore

    def notify(self, text: str, severity: Severity = "information") -> None: ...


async def toggle(chat: ListedChat, flag: Literal["pinned", "archived"]) -> None:
    """Set or unset ``flag`` of the shown conversation, and notify of it."""
    thread, store = chat.thread, chat.store
    number = thread.conversation
    if number is None or thread.memory is not None:
        chat.notify("This chat is not saved, so it is in no list.", "warning")
        return
    try:
        value = not getattr(store.conversation(number), flag)
        if flag == "pinned":
            await unlocked(lambda: store.change(number, pinned=value))
        else:
            await unlocked(lambda: store.change(number, archived=value))
    except StoreError as error:
        chat.notify(str(error), "error")
    else:
        chat.notify(_DONE[flag, value])


# --- importing -------------------------------------------------------------------------------------------------------


class ImportingChat(Protocol):
    """The part of the controller that an import needs."""

    store: ConversationStore

    def notify(self, text: str, severity: Severity = "information") -> None: ...


async def import_file(chat: ImportingChat, file: str, done: Callable[[], object] = lambda: None) -> None:
    """Import the conversations in ``file``, which is read in a thread, and notify of what came of it.

    ``done`` is called after a successful import.
    """
    try:
        imported = await asyncio.to_thread(lambda: read_conversations(Path(file).expanduser()))
        added = await unlocked(lambda: chat.store.take_in(imported.conversations))
    except (ImportProblem, StoreError) as problem:
        chat.notify(f"Nothing was imported: {problem}", "error")
        return
    chat.notify(f"Imported from {imported.program}: {added}. {imported.left_out}".rstrip())
    done()
