"""What the engine keeps on disk of a chat goes with the chat, and a temporary chat has nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.conversations.opening import open_store
from app.conversations.store import ConversationStore
from engine.ipc.messages import ForgetPrefixes, Generate
from engine.models.store.prefix_files import new_path, prefix_files
from tests.app.chat_helpers import Chat, running
from tests.app.fake_engine import FakeEngine

pytestmark = pytest.mark.usefixtures("home")


def kept(*owners: str) -> None:
    for owner in owners:
        new_path(owner, "ab" * 8).write_bytes(b"keys and values")


def owners() -> list[str]:
    return sorted(file.owner for file in prefix_files())


def names_sent(engine: FakeEngine) -> list[str]:
    return [request.conversation for request in engine.requests if isinstance(request, Generate)]


async def test_a_saved_chat_has_a_name_and_a_temporary_one_has_none(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("one")
        await chat.answered()
        number = chat.controller.thread.conversation
        chat.controller.new_conversation(temporary=True)
        chat.controller.submit("two")
        await chat.answered()
    assert names_sent(engine) == [f"chat{number}", ""]


async def test_a_deletion_removes_what_is_kept_at_once(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("one")
        await chat.answered()
        number = chat.controller.thread.conversation
        assert number is not None
        kept(f"chat{number}", f"chat{number}", f"chat{number + 1}", "serve")
        chat.controller.deletions.message(chat.path[1])
        await chat.until(lambda: owners() == [f"chat{number + 1}", "serve"])
        kept(f"chat{number}")
        chat.controller.deletions.conversations([number], "the chat")
        await chat.until(lambda: owners() == [f"chat{number + 1}", "serve"])
        await chat.until(lambda: len([each for each in engine.requests if isinstance(each, ForgetPrefixes)]) == 2)
        chat.controller.deletions.undo()
        await chat.until(lambda: "Brought back the chat." in chat.said)
        chat.controller.submit("again")
        await chat.answered()
    assert names_sent(engine)[-1] == f"chat{number}"


def test_what_is_kept_of_chats_that_are_gone_is_removed_at_the_start(home: Path) -> None:
    path = home / "data" / "conversations.sqlite"
    store = open_store(path)
    number, other = store.create(model="m").id, store.create(model="m").id
    kept(f"chat{number}", f"chat{other}", "serve", "chat" + "9" * 18, "chat")
    store.delete(other)
    store.close()
    elsewhere = open_store(home / "conversations.sqlite")
    elsewhere.close()
    assert len(owners()) == 5, "the store of another folder knows nothing of these"
    open_store(path).close()
    assert owners() == ["chat", f"chat{number}", "serve"]
