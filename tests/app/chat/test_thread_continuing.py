"""Answers are edited, and the model goes on writing them."""

from __future__ import annotations

import asyncio

import pytest

from app.conversations.store import ConversationStore
from engine.ipc.messages import Beam, Generate, Message
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, shown, wait_until


def _texts(chat: Chat) -> list[str]:
    return [entry.content for entry in chat.path]


def _last(engine: FakeEngine) -> Generate:
    request = engine.sent(Generate)[-1]
    assert isinstance(request, Generate)
    return request


async def test_a_stopped_answer_is_gone_on_with(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.until(lambda: chat.path[1].content == "Paris")
        chat.controller.stop_soon()
        await chat.answered()
        engine.gate.set()
        engine.answer = lambda request: [" is", " it."]
        before, tokens = chat.path[1], chat.path[1].tokens
        chat.controller.continue_answer()
        await chat.until(lambda: before.state == "complete")
        assert chat.path[1] is before and _texts(chat) == ["q", "Paris is it."]
        request = _last(engine)
        assert request.continue_last
        assert request.messages == [Message("user", "q"), Message("assistant", "Paris")]
        assert before.tokens == tokens + 12 and before.finish_reason == "stop" and before.siblings == 1
        (saved,) = on_disk(store, chat)[1:]
        assert (saved.content, saved.tokens, saved.state) == ("Paris is it.", before.tokens, "complete")


async def test_thoughts_are_given_along_and_kept(engine: FakeEngine, store: ConversationStore) -> None:
    engine.thoughts = ["Hm, ", "France."]
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.answered()
        engine.thoughts = []
        engine.answer = lambda request: [" Indeed."]
        chat.controller.continue_answer()
        await chat.answered()
        assert _texts(chat) == ["q", "Paris is the capital. Indeed."]
        assert (_last(engine).messages or [])[-1] == Message("assistant", "Paris is the capital.", "Hm, France.")
        assert chat.path[1].thoughts.text == "Hm, France." and chat.path[1].thoughts.tokens == 2


async def test_an_answer_in_the_middle_is_gone_on_with_in_an_alternative(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        for question in ("one", "two"):
            chat.controller.submit(question)
            await chat.answered()
        engine.answer = lambda request: [" More."]
        chat.controller.continue_answer(chat.path[1])
        await chat.answered()
        assert _texts(chat) == ["one", "Paris is the capital. More."] and chat.path[1].siblings == 2
        assert len(list(store.messages(chat.controller.thread.conversation or 0))) == 5
        chat.controller.switch(chat.path[1], -1)
        assert _texts(chat) == ["one", "Paris is the capital.", "two", "Paris is the capital."]


async def test_an_edited_answer_is_an_alternative_that_can_be_gone_on_with(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.answered()
        chat.controller.edit(chat.path[1], "Paris is the capital.")
        assert chat.path[1].siblings == 1, "nothing was changed"
        chat.controller.edit(chat.path[1], "Lyon is")
        assert _texts(chat) == ["q", "Lyon is"] and chat.path[1].siblings == 2
        assert len(engine.sent(Generate)) == 1, "the model is not asked"
        engine.answer = lambda request: [" another city."]
        chat.controller.continue_answer()
        await chat.answered()
        (saved,) = on_disk(store, chat)[1:]
        assert saved.content == "Lyon is another city." and saved.generation.edited


async def test_what_cannot_be_gone_on_with_is_said_and_nothing_is_lost(
    engine: FakeEngine, store: ConversationStore
) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.continue_answer()
        assert "only an answer can be continued" in chat.said[-1]
        chat.controller.submit("q")
        await chat.answered()
        chat.controller.continue_answer(chat.path[0])
        assert "only an answer can be continued" in chat.said[-1]
        engine.generate_error = "The model's chat template refuses this conversation: it cannot be continued."
        chat.controller.continue_answer()
        await chat.answered()
        answer = chat.path[1]
        assert (answer.content, answer.state, answer.finish_reason) == ("Paris is the capital.", "complete", "stop")
        assert answer.note == engine.generate_error and answer.tokens == 12
        engine.generate_error = None
        engine.answer = lambda request: [""]
        chat.controller.continue_answer()
        await chat.answered()
        assert answer.note == "The model had nothing to add." and answer.content == "Paris is the capital."


async def test_the_engine_that_dies_keeps_both_parts(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.answered()
        engine.answer = lambda request: [" And", " more."]
        engine.dies_at = 2
        chat.controller.continue_answer()
        await chat.answered()
        assert (chat.path[1].content, chat.path[1].state) == ("Paris is the capital. And", "failed")
        assert on_disk(store, chat)[1].content == "Paris is the capital. And"


async def test_a_candidate_of_a_beam_search_goes_on_too(engine: FakeEngine, store: ConversationStore) -> None:
    engine.beam_steps = [[Beam(" North.", [1], -0.1), Beam(" South.", [2], -0.2)]]
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("q")
        await chat.answered()
        chat.controller.change_settings({"beams": 2})
        chat.controller.continue_answer()
        await chat.answered()
        assert _texts(chat) == ["q", "Paris is the capital. North."]
        chat.controller.pick_beam(1)
        assert _texts(chat) == ["q", "Paris is the capital. South."] and chat.path[1].siblings == 2


@pytest.mark.sampled
@pytest.mark.parametrize("begins", ["Lyon", "// Lyon", "/again"])
async def test_the_keys(make_app: MakeApp, engine: FakeEngine, begins: str) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "What is the capital?")
        assert app.chat is not None
        await pilot.press("shift+tab", "e")
        assert app.chat.prompt.text == "Paris is the capital."
        assert app.chat.prompt.border_title == "Editing an answer · esc cancels"
        app.chat.prompt.fill(begins)
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(shown(app)) == 2 and "edited by you" in shown(app)[1])
        assert controller(app).thread.path[1].content == begins and app.chat.prompt.text == ""
        engine.answer = lambda request: [" it is."]
        await pilot.press("shift+tab", "m")
        await wait_until(pilot, lambda: len(shown(app)) == 2 and "it is." in shown(app)[1])
        await wait_until(pilot, lambda: not controller(app).busy)
        engine.answer = lambda request: [" Certainly."]
        await pilot.press(*"/continue", "enter")
        await wait_until(pilot, lambda: "Certainly" in shown(app)[1] and not controller(app).busy)
        assert controller(app).thread.path[1].content == f"{begins} it is. Certainly."
