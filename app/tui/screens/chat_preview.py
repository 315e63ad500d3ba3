"""The marked conversation below the list: its first question and its last answer, read when the list stands still."""

from __future__ import annotations

import asyncio

from textual import work
from textual.content import Content
from textual.widgets import Static

from app.conversations.store import ConversationStore, StoreError
from app.text_safety import one_line, sanitize, visible

PAUSE_S = 0.15
"""Seconds that the same conversation is marked before it is read."""
LEAST_COLUMNS, LEAST_ROWS = 60, 28
"""Size of the terminal from which on there is room."""
_LONGEST = 2_000
_LINES = 4


class ChatPreview(Static):
    """Hidden while there is nothing to show, or no room for it."""

    def __init__(self, store: ConversationStore) -> None:
        super().__init__(classes="chat-preview", markup=False)
        self._store = store
        self.display = False

    @work(group="preview", exclusive=True)
    async def show(self, conversation: int | None) -> None:
        """Show ``conversation``. It is read beside the screen; another call before that replaces this one."""
        size = self.app.size
        if conversation is None or size.width < LEAST_COLUMNS or size.height < LEAST_ROWS:
            self.display = False
            return
        await asyncio.sleep(PAUSE_S)
        try:
            path = await asyncio.to_thread(self._store.shown, conversation)
        except StoreError:
            path = []
        lines = [one_line(path[0].content[:_LONGEST])] if path else []
        if len(path) > 1:
            end = visible(sanitize(path[-1].content[-_LONGEST:]))
            lines += [line for line in end.splitlines() if line.strip()][-_LINES:]
        width = max(1, size.width - 6)
        shown = [Content(line.expandtabs(4)).truncate(width, ellipsis=True) for line in lines]
        self.update(Content("\n").join([shown[0].stylize("bold"), *shown[1:]]) if shown else Content())
        self.display = bool(shown)
