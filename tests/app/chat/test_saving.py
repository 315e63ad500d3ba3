"""Another program writes to the database while the chat goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.chat.saving import unlocked
from app.conversations.opening import open_store
from app.conversations.store import ConversationStore, StoreError
from engine.ipc.messages import Generate
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine


@pytest.fixture
def other(store: ConversationStore, home: Path) -> Iterator[sqlite3.Connection]:
    """A second program with the same database open."""
    with closing(sqlite3.connect(home / "conversations.sqlite", isolation_level=None)) as connection:
        yield connection


async def test_a_short_lock_is_waited_for_without_a_word(
    engine: FakeEngine, store: ConversationStore, other: sqlite3.Connection
) -> None:
    async with running(Chat(engine, store)) as chat:
        await chat.until(lambda: engine.running)
        other.execute("BEGIN IMMEDIATE")
        chat.controller.submit("first")
        assert chat.path[0].record is None
        await asyncio.sleep(0.2)
        assert not engine.sent(Generate)
        other.execute("ROLLBACK")
        await chat.answered()
        assert [record.content for record in on_disk(store, chat)] == ["first", "Paris is the capital."]
        assert not chat.said


async def test_a_lasting_lock_is_said_and_holds_nothing_up(
    engine: FakeEngine, store: ConversationStore, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat.answering.RETRY_SAVE_S", 0.05)
    async with running(Chat(engine, store)) as chat:
        other.execute("BEGIN IMMEDIATE")
        chat.controller.submit("first")
        await chat.answered()
        assert chat.path[-1].content == "Paris is the capital."
        assert chat.controller.unsaved == 2
        assert any("locked by another program" in text for text in chat.said)
        other.execute("ROLLBACK")
        await chat.until(lambda: not chat.controller.unsaved)
        assert [record.content for record in on_disk(store, chat)] == ["first", "Paris is the capital."]
        assert chat.said[-1] == "All messages are saved again."


async def test_a_lock_at_the_end_is_waited_for(
    engine: FakeEngine, store: ConversationStore, other: sqlite3.Connection
) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("first")
        await chat.until(lambda: chat.path[-1].content)
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(0.4, other.execute, "ROLLBACK")
    assert [(record.content, record.state) for record in on_disk(store, chat)][-1] == ("Paris", "stopped")


async def test_no_call_of_the_store_waits_for_a_lock_as_long_as_a_person_would_notice(
    store: ConversationStore, other: sqlite3.Connection
) -> None:
    """Not a benchmark: SQLite's own wait, which the event loop would sit out."""
    waits = store._connection.execute("PRAGMA busy_timeout").fetchone()[0]  # type: ignore[attr-defined]
    assert waits <= 150


async def test_a_new_name_waits_for_a_short_lock(
    engine: FakeEngine, store: ConversationStore, other: sqlite3.Connection
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("first")
        await chat.answered()
        other.execute("BEGIN IMMEDIATE")
        done: list[bool] = []
        chat.controller.rename("better", lambda: done.append(True))
        await asyncio.sleep(0.2)
        assert not done
        other.execute("ROLLBACK")
        await chat.until(lambda: done)
        assert store.conversations()[0].title == chat.controller.thread.title == "better"
        assert not chat.said


async def test_a_lock_that_stays_is_said(store: ConversationStore, other: sqlite3.Connection) -> None:
    created = store.create(model="m", system="", title="old")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        await unlocked(lambda: store.change(created.id, title="new"))
    tries = 0

    def change() -> str:
        nonlocal tries
        tries += 1
        raise StoreError("the disk is full", "full")

    with pytest.raises(StoreError, match="full"):
        await unlocked(change)
    assert tries == 1


def delete_database(folder: Path) -> None:
    for file in folder.glob("conversations.sqlite*"):
        file.unlink()


async def test_a_deleted_file_is_said_while_nothing_is_asked_and_nothing_is_lost(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("first")
        await chat.answered()
        delete_database(home)
        await chat.until(lambda: chat.said)
        assert chat.said[0].startswith("The file of the chats was deleted or moved.")
        chat.controller.submit("second")
        await chat.answered()
        conversation = chat.controller.thread.conversation
    assert conversation is not None
    with closing(open_store(home / "conversations.sqlite")) as again:
        assert [message.content for message in again.shown(conversation)] == [
            "first", "Paris is the capital.", "second", "Paris is the capital.",
        ]  # fmt: skip
