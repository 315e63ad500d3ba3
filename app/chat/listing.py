"""Where the shown conversation is in the list: pinned to the top, or put away. No Textual."""

from __future__ import annotations

from typing import Literal, Protocol

from app.chat.saving import unlocked
from app.chat.state import Severity
from app.chat.thread import Thread
from app.conversations.store import ConversationStore, StoreError

_DONE = {
    ("pinned", True): "Pinned the chat.",
    ("pinned", False): "Unpinned the chat.",
    ("archived", True): "Archived the chat.",
    ("archived", False): "Restored the chat from the archive.",
}


class ListedChat(Protocol):
    """What the changes need of the controller."""

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
