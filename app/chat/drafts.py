"""Unsent text, kept on disk while it is typed and brought back with its conversation. No Textual."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from app.chat.state import Entry
from app.chat.thread import Thread
from app.conversations.drafts import Draft
from app.conversations.store import ConversationStore, StoreError

KEEP_S = 0.5
"""Seconds between a change of the draft and its write. A crash may cost one second; half is left for a slow disk."""
NO_DRAFT = Draft("")


class DraftKeeper:
    """Keeps the draft of one conversation after the other in ``store``; that of a temporary one in its memory.

    Or what one message after the other is being changed to.

    A draft that cannot be written is tried again. Nobody is told: no answer depends on it, and what cannot be saved of
    the conversation itself is said.
    """

    def __init__(self, store: ConversationStore, keep_s: float | None = None) -> None:
        self.thread: Thread | None = None
        """The conversation whose draft is kept."""
        self._entry: Entry | None = None
        """The message that is changed; None: the draft is a new question."""
        self._store = store
        self._keep_s = KEEP_S if keep_s is None else keep_s
        self._draft = NO_DRAFT
        self._kept: Draft | None = NO_DRAFT
        """The draft on disk; None while a thread writes another."""
        self._key = 0
        self._refused: dict[int, Draft] = {}
        """Drafts of conversations that were left while the store could not be written, by their conversations."""
        self._task: asyncio.Task[None] | None = None
        self._writing = threading.Lock()
        self._begun = 0
        """Number of writes begun."""
        self._last = 0
        """The latest write that was tried. A thread that comes later with an older one leaves it out."""

    def open(self, thread: Thread, entry: Entry | None = None) -> Draft:
        """Write what is still to be written, and return the draft of ``thread``, or of its message ``entry``."""
        self.write()
        self.thread, self._entry = thread, entry
        self._key = self._number(thread, entry)
        found = None
        with suppress(StoreError):
            found = thread.store_in(self._store).draft(self._key)
        self._draft = self._kept = found or NO_DRAFT
        refused = None if thread.memory is not None else self._refused.pop(self._key, None)
        if refused is not None:
            self.note(refused)
        return self._draft

    def keep(self, thread: Thread, draft: Draft) -> None:
        """Write the ``draft`` of another conversation than the one that is open."""
        key = thread.conversation or 0
        try:
            with self._writing:
                thread.store_in(self._store).keep_draft(key, draft if draft.text.strip() else None)
        except StoreError:
            if thread.memory is None:
                self._refused[key] = draft

    def kept(self, thread: Thread) -> Draft:
        """The draft of another conversation than the one that is open."""
        key = thread.conversation or 0
        if thread.memory is None and key in self._refused:
            return self._refused[key]
        with suppress(StoreError):
            return thread.store_in(self._store).draft(key) or NO_DRAFT
        return NO_DRAFT

    def note(self, draft: Draft) -> None:
        """``draft`` is what is typed now. It is written soon."""
        self._draft = draft if draft.text.strip() else NO_DRAFT
        if self._is_behind() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._write_soon(), name="draft")

    def write(self) -> None:
        """Write the draft now if it changed, and those that could not be written before."""
        if self.thread is not None and self._is_behind():
            try:
                owner = self._number(self.thread, self._entry)
                self._write(self._next(), self.thread, self._key, owner, self._draft)
                self._key, self._kept = owner, self._draft
            except StoreError:
                if self.thread.memory is None:
                    # If the conversation has begun meanwhile, its draft is no longer that of a new one.
                    self._refused[self._key] = NO_DRAFT
                    self._refused[self._number(self.thread, self._entry)] = self._draft
        with suppress(StoreError), self._writing:
            for key, draft in list(self._refused.items()):
                self._store.keep_draft(key, draft if draft.text else None)
                del self._refused[key]

    def _is_behind(self) -> bool:
        return self._draft != self._kept or (
            self.thread is not None and self._number(self.thread, self._entry) != self._key
        )

    @staticmethod
    def _number(thread: Thread, entry: Entry | None) -> int:
        """The number under which the store keeps the draft."""
        return thread.conversation or 0 if entry is None else -(entry.record or 0)

    async def _write_soon(self) -> None:
        while self._is_behind() and self.thread is not None:
            await asyncio.sleep(self._keep_s)
            thread, entry, draft, number = self.thread, self._entry, self._draft, self._next()
            # Until the thread ends nobody knows which draft is on disk: even an unchanged one is written again before
            # the conversation is left.
            self._kept = None
            with suppress(StoreError):
                owner = self._number(thread, entry)
                await asyncio.to_thread(self._write, number, thread, self._key, owner, draft)
                if (thread, entry, number) == (self.thread, self._entry, self._begun):
                    self._key, self._kept = owner, draft

    def _next(self) -> int:
        self._begun += 1
        return self._begun

    def _write(self, number: int, thread: Thread, key: int, owner: int, draft: Draft) -> None:
        """Write ``draft`` as that of ``owner``; it was that of ``key``. Nothing if a later one is written already."""
        store = thread.store_in(self._store)
        with self._writing:
            if number >= self._last:
                self._last = number
                if key != owner:
                    # The conversation has begun: this is no longer the draft of a new one.
                    store.keep_draft(key, None)
                store.keep_draft(owner, draft if draft.text else None)


# --- earlier questions -----------------------------------------------------------------------------------------------


MOST_RECALLED = 100
"""Maximum number of questions that one search goes through."""
SEARCHED = 500
"""Number of the newest questions in which words are searched for."""


def with_words(questions: Callable[[str, int], Sequence[str]], words: str, most: int) -> list[str]:
    """At most ``most`` of the newest ``questions`` that have all ``words``, whatever their case, newest first."""
    wanted = words.casefold().split()
    found = (question for question in questions("", SEARCHED) if all(word in question.casefold() for word in wanted))
    return list(islice(found, most))


class QuestionHistory:
    """Goes through earlier questions: those sent with this prompt and those of a ``source``."""

    def __init__(self) -> None:
        self.source: Callable[[str, int], list[str]] = lambda beginning, limit: []
        """Function from a text and a limit to at most that number of questions that begin with the text, newest
        first."""
        self._sent: list[str] = []
        self._found: list[str] = []
        self._typed = ""
        self._position = -1

    @property
    def recalled(self) -> str | None:
        """The question that was recalled last; None if none is."""
        return self._found[self._position] if self._position >= 0 else None

    def sent(self, question: str) -> None:
        """``question`` was sent. It need not be in the store yet."""
        self._sent = [question, *(other for other in self._sent if other != question)][:MOST_RECALLED]
        self.leave()

    def leave(self) -> None:
        """Go through nothing any more."""
        self._found, self._position = [], -1

    def back(self, typed: str) -> str | None:
        """The question before the one recalled last; None if there is none.

        With none recalled, the newest that begins with ``typed``.
        """
        if self._position < 0:
            self._typed = typed
            own = [question for question in self._sent if question.startswith(typed)]
            found = dict.fromkeys([*own, *self.source(typed, MOST_RECALLED)])
            self._found = [question for question in found if question.strip() and question != typed]
        if self._position + 1 >= len(self._found):
            return None
        self._position += 1
        return self._found[self._position]

    def forward(self) -> str:
        """The question after the one recalled last; after the newest, what was typed."""
        self._position = max(-1, self._position - 1)
        return self._typed if self._position < 0 else self._found[self._position]
