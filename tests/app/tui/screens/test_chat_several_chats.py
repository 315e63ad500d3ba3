"""Answers that go on while another conversation is shown."""

from __future__ import annotations

import asyncio

import pytest
from textual.pilot import Pilot

from app.chat.state import AnswerEnded, BeamsChanged, NewQuestion, QuestionsReturned
from app.conversations.store import ConversationStore
from app.tui.application import ChatApp
from app.tui.chat.queue_view import QueueView
from app.tui.screens.chat_rows import ChatRows
from engine.ipc.messages import Beam, Generate
from tests.app.chat_helpers import Chat, running
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, wait_until


@pytest.fixture
def gate(engine: FakeEngine) -> asyncio.Event:
    """Holds each answer after its first piece."""
    engine.gate = asyncio.Event()
    engine.answer = lambda request: [f"to {request.messages[-1].content if request.messages else ''}", "."]
    return engine.gate


async def begun(chat: Chat, question: str = "one") -> int:
    """Ask ``question`` and wait for the first piece of its answer; the conversation."""
    chat.controller.submit(question)
    await chat.until(lambda: chat.path[-1].content)
    assert chat.controller.thread.conversation is not None
    return chat.controller.thread.conversation


async def test_an_answer_goes_on_while_another_conversation_is_shown(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        first, answer = await begun(chat), chat.path[-1]
        chat.controller.new_conversation()
        assert chat.controller.answering == {first} and chat.controller.status.elsewhere
        assert chat.controller.status.context_used is None
        gate.set()
        await chat.until(lambda: not chat.controller.busy)
        assert (answer.content, answer.state) == ("to one.", "complete")
        assert store.shown(first)[-1].content == "to one."
        assert chat.controller.status.context_used is None and not chat.controller.status.elsewhere
        assert chat.controller.unread == {first} and not chat.controller.answering
        assert AnswerEnded(chat.controller.thread, answer, False) not in chat.updates
        assert chat.said == ["The answer in “one” is complete."]
        assert chat.controller.open_conversation(first)
        assert not chat.controller.unread
        assert [entry.content for entry in chat.path] == ["one", "to one."]


async def test_coming_back_shows_the_same_growing_answer(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        first = await begun(chat)
        thread, answer = chat.controller.thread, chat.path[-1]
        chat.controller.new_conversation()
        assert chat.controller.open_conversation(first)
        assert chat.controller.thread is thread and chat.path[-1] is answer and answer.state == "writing"
        assert not chat.controller.status.elsewhere
        gate.set()
        await chat.answered()
        assert answer.content == "to one." and not chat.controller.unread


async def test_a_found_message_of_an_unfinished_conversation_shows_its_growing_answer(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        first = await begun(chat)
        answer, question = chat.path[-1], chat.path[0].record
        chat.controller.new_conversation()
        assert chat.controller.open_conversation(first, question)
        assert chat.path[-1] is answer
        gate.set()
        await chat.answered()


async def test_the_question_of_another_conversation_waits_and_says_so(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        await begun(chat)
        chat.controller.new_conversation()
        chat.controller.submit("two")
        assert chat.path[-1].note == "Waiting for the answer in another chat."
        assert len(engine.sent(Generate)) == 1
        gate.set()
        await chat.answered()
        assert chat.path[-1].content == "to two."


async def test_each_conversation_keeps_its_own_questions(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        first = await begun(chat)
        chat.controller.submit("and then")
        chat.controller.new_conversation()
        assert not chat.controller.queue.items
        chat.controller.submit("two")
        chat.controller.submit("and more")
        assert chat.controller.queue.items == (NewQuestion("and more"),)
        second = chat.controller.thread
        assert second.conversation is not None and chat.controller.open_conversation(first)
        assert chat.controller.queue.items == (NewQuestion("and then"),)
        gate.set()
        await chat.until(lambda: not chat.controller.busy)
        assert [entry.content for entry in chat.path] == ["one", "to one.", "and then", "to and then."]
        contents = [message.content for message in store.shown(second.conversation)]
        assert contents == ["two", "to two.", "and more", "to and more."]
        # They take turns.
        asked = [request.messages[-1].content for request in engine.sent(Generate) if isinstance(request, Generate)]
        assert asked == ["one", "two", "and then", "and more"]


async def test_stopping_stops_what_is_shown_only(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        await begun(chat)
        answer = chat.path[-1]
        chat.controller.new_conversation()
        assert not chat.controller.stop()
        chat.controller.submit("two")
        assert chat.controller.stop()
        assert chat.path[-1].state == "stopped" and answer.state == "writing"
        gate.set()
        await chat.until(lambda: answer.state == "complete")


async def test_an_answer_that_fails_elsewhere_is_said_and_gives_its_questions_back(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    engine.dies_at = 2
    async with running(Chat(engine, store)) as chat:
        await begun(chat)
        chat.controller.submit("and then")
        first = chat.controller.thread
        chat.controller.new_conversation()
        gate.set()
        await chat.until(lambda: not chat.controller.busy)
        assert QuestionsReturned((NewQuestion("and then"),), first) in chat.updates
        assert "The answer in “one” failed." in chat.said


async def test_a_temporary_conversation_ends_when_it_is_left(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.new_conversation(temporary=True)
        await begun(chat)
        answer = chat.path[-1]
        chat.controller.new_conversation()
        await chat.until(lambda: answer.state == "stopped")
        assert not chat.controller.unread and not chat.controller.answering


async def test_deleting_a_conversation_stops_its_answer(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    async with running(Chat(engine, store)) as chat:
        first = await begun(chat)
        answer = chat.path[-1]
        chat.controller.new_conversation()
        chat.controller.deletions.conversations([first], "the chat")
        await chat.until(lambda: answer.state == "stopped" and not chat.controller.busy)
        assert not chat.controller.unread


async def test_the_candidates_of_another_conversation_are_not_shown(
    engine: FakeEngine, store: ConversationStore, gate: asyncio.Event
) -> None:
    engine.beam_steps = [[Beam("One", [1], -0.1)], [Beam("One two", [1, 2], -0.1)]]
    async with running(Chat(engine, store)) as chat:
        chat.controller.setup.change({"beams": 2})
        first = await begun(chat)
        chat.controller.new_conversation()
        chat.updates.clear()
        gate.set()
        await chat.until(lambda: not chat.controller.busy)
        assert not chat.controller.beams
        assert not any(isinstance(update, BeamsChanged) and update.beams for update in chat.updates)
        assert store.shown(first)[-1].content == "One two"


async def typed(pilot: Pilot[int], app: ChatApp, question: str) -> None:
    """Type and send ``question``, and wait for the first piece of its answer."""
    await pilot.press(*question, "enter")
    await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)


async def test_the_list_marks_what_is_written_and_what_nobody_has_seen(
    make_app: MakeApp, engine: FakeEngine, gate: asyncio.Event
) -> None:
    app = make_app(show_chats=True)
    async with app.run_test(size=(140, 30)) as pilot:
        await ready(pilot, app)
        await typed(pilot, app, "one")
        await pilot.press("ctrl+n")
        assert app.chat is not None and app.chat.chats.browser is not None
        rows = app.chat.chats.browser.rows
        await wait_until(pilot, lambda: rows._mark(1) == "◍ ")
        gate.set()
        await wait_until(pilot, lambda: rows._mark(1) == "✓ ")
        controller(app).open_conversation(1)
        await wait_until(pilot, lambda: rows._mark(1) == "● ")


async def test_the_list_that_fills_a_narrow_screen_marks_them_too(
    make_app: MakeApp, engine: FakeEngine, gate: asyncio.Event
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await typed(pilot, app, "one")
        await pilot.press("ctrl+n", "f2")
        rows = app.screen.query_one(ChatRows)
        assert rows._mark(1) == "◍ "
        gate.set()
        await wait_until(pilot, lambda: rows._mark(1) == "✓ ")


@pytest.mark.soak
async def test_what_waits_and_what_is_typed_are_there_on_coming_back_and_on_disk_meanwhile(
    make_app: MakeApp, engine: FakeEngine, gate: asyncio.Event, store: ConversationStore
) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await typed(pilot, app, "one")
        await pilot.press(*"next", "enter", *"draft")
        assert app.chat is not None
        view, prompt = app.chat.query_one(QueueView), app.chat.prompt
        await wait_until(pilot, lambda: view.option_count == 1)
        await pilot.press("ctrl+n")
        await wait_until(pilot, lambda: not view.display)
        assert prompt.text == ""
        kept = store.draft(1)
        assert kept is not None and kept.text == "next\n\ndraft"
        controller(app).open_conversation(1)
        await wait_until(pilot, lambda: view.option_count == 1 and prompt.text == "draft")
        await wait_until(pilot, lambda: "to&#160;one" in app.export_screenshot())
        await pilot.press("ctrl+n")
        gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        await wait_until(pilot, lambda: (found := store.draft(1)) is not None and found.text == "draft")
