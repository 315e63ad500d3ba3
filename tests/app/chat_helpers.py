"""The chat without its screen, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from app.chat.controller import ChatController
from app.chat.state import Entry, Update, UserNotice
from app.conversations.records import MessageRecord
from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.settings.schema import Settings
from tests.app.fake_engine import FakeEngine


class Chat:
    def __init__(self, engine: FakeEngine, store: ConversationStore, options: Settings | None = None) -> None:
        settings = open_settings()
        settings.settings = options or Settings()
        self.updates: list[Update] = []
        self.missing = False
        self.controller = ChatController(
            engine, store, settings, self.updates.append, is_missing=lambda model: self.missing,
            autosave_s=0.01, watch_engine_s=0.02,
        )  # fmt: skip

    @property
    def path(self) -> list[Entry]:
        return self.controller.thread.path

    @property
    def said(self) -> list[str]:
        return [update.text for update in self.updates if isinstance(update, UserNotice)]

    async def until(self, predicate: Callable[[], object]) -> None:
        for _ in range(1000):
            if predicate():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it never came about")

    async def answered(self) -> None:
        await self.until(lambda: not self.controller.busy and self.path and self.path[-1].state != "writing")


@asynccontextmanager
async def running(chat: Chat) -> AsyncIterator[Chat]:
    task = asyncio.create_task(chat.controller.run())
    try:
        yield chat
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def on_disk(store: ConversationStore, chat: Chat) -> list[MessageRecord]:
    assert chat.controller.thread.conversation is not None
    return store.shown(chat.controller.thread.conversation)
