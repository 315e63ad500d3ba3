"""Importing conversations while the chat runs. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from app.chat.saving import unlocked
from app.chat.state import Severity
from app.conversations.importing.parts import ImportProblem
from app.conversations.importing.reading import read_conversations
from app.conversations.store import ConversationStore, StoreError


class ImportingChat(Protocol):
    """What an import needs of the controller."""

    store: ConversationStore

    def notify(self, text: str, severity: Severity = "information") -> None: ...


async def import_file(chat: ImportingChat, file: str, done: Callable[[], object] = lambda: None) -> None:
    """Import the conversations in ``file``, which is read in a thread, and notify of what came of it.

    ``done`` is called after a successful import.
    """
    try:
        found = await asyncio.to_thread(lambda: read_conversations(Path(file).expanduser()))
        added = await unlocked(lambda: chat.store.take_in(found.conversations))
    except (ImportProblem, StoreError) as problem:
        chat.notify(f"Nothing was imported: {problem}", "error")
        return
    chat.notify(f"Imported from {found.program}: {added}. {found.left_out}".rstrip())
    done()
