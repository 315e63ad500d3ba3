"""Unsent text, kept on disk while it is typed and brought back with its conversation. No Textual."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from app.chat.thread import Thread
from app.conversations.drafts import Draft
from app.conversations.store import ConversationStore, StoreError

KEEP_S = 0.5
"""Seconds between a change of the draft and its write. A crash may cost one second; half is left for a slow disk."""


class DraftKeeper:
    """Keeps the draft of one conversation after the other in ``store``; that of a temporary one in its memory.

    A draft that cannot be written is written with the next change: no answer depends on it.
    """

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._thread: Thread | None = None
        self._draft: Draft | None = None
        self._dirty = False
        self._key = 0
        self._task: asyncio.Task[None] | None = None

    def note(self, thread: Thread, draft: Draft) -> None:
        """``draft`` is what is now typed in the conversation of ``thread``. It is written soon."""
        new = draft if draft.text.strip() else None
        if thread is self._thread and new == self._draft and thread.conversation == (self._key or None):
            return
        if thread is not self._thread:
            self.write()
            self._thread, self._key = thread, thread.conversation or 0
        self._draft, self._dirty = new, True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write_soon(), name="draft")

    def open(self, thread: Thread) -> Draft | None:
        """Write what is to be written, and return the draft of ``thread``."""
        self.write()
        self._thread, self._key, self._draft, self._dirty = thread, thread.conversation or 0, None, False
        with suppress(StoreError):
            self._draft = thread.store_in(self._store).draft(self._key)
        return self._draft

    def write(self) -> None:
        """Write the draft now if it changed."""
        if not self._dirty or self._thread is None:
            return
        store, key, draft = self._thread.store_in(self._store), self._thread.conversation or 0, self._draft
        with suppress(StoreError):
            if key != self._key:
                # The conversation has begun: what was typed before is no longer the draft of a new one.
                store.keep_draft(self._key, None)
            store.keep_draft(key, draft)
            self._key, self._dirty = key, False

    async def _write_soon(self) -> None:
        while self._dirty:
            await asyncio.sleep(KEEP_S)
            await asyncio.to_thread(self.write)
            if self._dirty:
                # Another program writes, or there is no space left.
                await asyncio.sleep(KEEP_S)
