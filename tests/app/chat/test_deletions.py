"""Messages are deleted and come back; a temporary conversation leaves nothing on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.chat.state import Entry
from app.conversations.opening import open_store
from app.conversations.store import ConversationStore
from app.tui.chat.message import MessageView
from app.tui.chat.status import Heading
from engine.ipc.messages import Generate
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, shown, wait_until


def _written(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())


async def _conversation(chat: Chat, *questions: str) -> None:
    for question in questions:
        chat.controller.submit(question)
        await chat.answered()


def _texts(entries: list[Entry]) -> list[str]:
    return [entry.content for entry in entries]


async def test_deletions_are_undone_one_after_the_other(engine: FakeEngine, store: ConversationStore) -> None:
    engine.answer = lambda request: [f"to {request.messages[-1].content if request.messages else ''}"]
    async with running(Chat(engine, store)) as chat:
        await _conversation(chat, "one", "two")
        chat.controller.deletions.message(chat.path[3])
        await chat.until(lambda: _texts(chat.path) == ["one", "to one", "two"])
        chat.controller.deletions.message(chat.path[1])
        await chat.until(lambda: _texts(chat.path) == ["one"])
        assert chat.said[-1] == "Deleted the answer and 1 more message. /undo brings it back."
        chat.controller.deletions.message(chat.path[0])
        await chat.until(lambda: not chat.path)
        assert chat.controller.thread.conversation is None and store.conversations() == []
        for wanted in (["one"], ["one", "to one", "two"], ["one", "to one", "two", "to two"]):
            chat.controller.deletions.undo()
            await chat.until(lambda wanted=wanted: _texts(chat.path) == wanted)
        assert [record.content for record in on_disk(store, chat)] == _texts(chat.path)
        assert chat.controller.thread.title == "one"
        chat.controller.deletions.undo()
        assert chat.said[-1] == "There is no deletion to undo."


async def test_an_alternative_takes_the_place_of_a_deleted_one(engine: FakeEngine, store: ConversationStore) -> None:
    answers = iter(["first", "second", "third"])
    engine.answer = lambda request: [next(answers)]
    async with running(Chat(engine, store)) as chat:
        await _conversation(chat, "q")
        for _ in range(2):
            chat.controller.regenerate()
            await chat.answered()
        chat.controller.deletions.message(chat.path[1])
        await chat.until(lambda: _texts(chat.path) == ["q", "second"] and chat.path[1].siblings == 2)
        chat.controller.deletions.message(chat.path[1], alternatives=True)
        await chat.until(lambda: _texts(chat.path) == ["q"])
        assert "and 1 more message" in chat.said[-1]
        chat.controller.deletions.undo()
        await chat.until(lambda: _texts(chat.path) == ["q", "second"])


async def test_an_answer_in_progress_is_stopped_and_deleted(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.until(lambda: chat.path[1].content)
        chat.controller.deletions.message(chat.path[1])
        await chat.until(lambda: _texts(chat.path) == ["q"])
        engine.gate.set()
        await chat.until(lambda: not chat.controller.busy)
        assert not chat.controller.unsaved
        chat.controller.deletions.undo()
        await chat.until(lambda: len(chat.path) == 2)
        assert chat.path[1].state == "stopped" and chat.path[1].content == "Paris"


async def test_conversations_are_deleted_and_brought_back_together(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        await _conversation(chat, "shown")
        other = store.create(model="m", title="Other").id
        shown = chat.controller.thread.conversation
        assert shown is not None
        chat.controller.deletions.conversations([other, shown], "2 chats")
        await chat.until(lambda: chat.said and chat.said[-1].startswith("Deleted 2 chats."))
        assert store.conversations() == [] and not chat.path
        chat.controller.deletions.undo()
        await chat.until(lambda: chat.said[-1] == "Brought back 2 chats.")
        assert len(store.conversations()) == 2


async def test_a_temporary_conversation_leaves_nothing_on_disk(engine: FakeEngine, home: Path) -> None:
    store = open_store(home / "data" / "conversations.sqlite")
    async with running(Chat(engine, store)) as chat:
        await _conversation(chat, "kept")
        engine.answer = lambda request: ["Quetzal", "coatlus north", "ropi."]
        chat.controller.new_conversation(temporary=True)
        await _conversation(chat, "What was Quetzalcoatlus?", "And Quetzalcoatlus lawsoni?")
        memory = chat.controller.thread.memory
        assert memory is not None and len(on_disk(memory, chat)) == 4
        sent = [asked for asked in engine.requests if isinstance(asked, Generate)]
        assert [(bool(asked.conversation), asked.quotes) for asked in sent] == [(True, True), *[(False, False)] * 2]
        chat.controller.regenerate()
        await chat.answered()
        chat.controller.switch(chat.path[-1], -1)
        chat.controller.setup.set_system("Speak as Quetzalcoatlus would.")
        chat.controller.deletions.message(chat.path[2])
        await chat.until(lambda: len(chat.path) == 2)
        chat.controller.deletions.undo()
        await chat.until(lambda: len(chat.path) == 4)
        chat.controller.deletions.message(chat.path[0])
        await chat.until(lambda: not chat.path)
        assert chat.controller.thread.memory is memory, "what follows is temporary too"
        chat.controller.new_conversation()
        assert chat.controller.thread.memory is None and chat.controller.deletions.latest == ""
        assert [found.title for found in store.conversations()] == ["kept"] and store.search("Quetzalcoatlus") == []
    store.close()
    written = _written(home)
    assert b"kept" in written and b"uetzalcoatl" not in written.lower()


@pytest.mark.soak
async def test_the_keys_of_deleting_and_undoing(make_app: MakeApp, home: Path) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        for question in ("one", "two"):
            await ask(pilot, app, question)
        assert app.chat is not None
        await pilot.press("shift+tab", "up", "x")
        await wait_until(pilot, lambda: len(shown(app)) == 2)
        await wait_until(pilot, lambda: isinstance(app.focused, MessageView))
        await pilot.press("z")
        await wait_until(pilot, lambda: len(shown(app)) == 4)
        brought_back = app.chat.transcript.views[2]
        await wait_until(pilot, lambda: app.focused is brought_back)
        await pilot.press("escape", *"/delete chat", "enter")
        await wait_until(pilot, lambda: not shown(app) and not app.store.conversations())
        await pilot.press(*"/undo", "enter")
        await wait_until(pilot, lambda: len(shown(app)) == 4)
        await pilot.press("escape", *"/temporary", "enter")
        await wait_until(pilot, lambda: controller(app).thread.memory is not None and not shown(app))
        assert app.chat.query_one(Heading).shown[0].startswith("◌ Temporary chat")
        await ask(pilot, app, "Quetzalcoatlus three")
        await pilot.press(*"/delete", "enter")
        await wait_until(pilot, lambda: len(shown(app)) == 1)
        await pilot.press(*"/undo", "enter")
        await wait_until(pilot, lambda: len(shown(app)) == 2)
        await pilot.press(*"Quetzalcoatlus draft", "ctrl+n")
        await wait_until(pilot, lambda: controller(app).thread.memory is None)
        assert app.chat.query_one(Heading).shown[0] == ""
        await wait_until(pilot, lambda: app.chat and app.chat.prompt.text == "")
        await pilot.press(*"typed later")
        app.chat.drafting.write()
    written = _written(home)
    assert b"typed later" in written and b"Quetzalcoatlus" not in written
