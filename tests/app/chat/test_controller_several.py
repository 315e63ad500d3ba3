"""A question that is asked several times at once: all answers grow, are saved, are stopped, and one is picked."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.answering import HOTTEST, STEP, spread_temperatures
from app.conversations.store import ConversationStore
from app.settings.schema import Settings
from engine.ipc.messages import Generate
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine

FOUR = ["Paris is the capital.", "PARIS IS THE CAPITAL.", "pARIS IS THE CAPITAL.", "Paris Is The Capital."]


@given(middle=st.floats(0, 2), count=st.integers(2, 16))
def test_temperatures_rise_around_the_usual_one(middle: float, count: int) -> None:
    found = spread_temperatures(middle, count)
    assert len(found) == count and found == sorted(found)
    assert found[0] >= 0 and found[-1] <= max(HOTTEST, round(middle, 2)) + 0.01
    assert all(later - earlier <= STEP + 0.011 for earlier, later in itertools.pairwise(found))
    if STEP * count < middle < HOTTEST - STEP * count:
        assert round(middle, 2) in found or any(abs(each - middle) < 0.011 for each in found)


async def test_all_answers_are_written_and_saved_at_once(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store, Settings(temperature=0.7))) as chat:
        assert chat.controller.ask_several(4, "Capital of France?")
        turn = chat.controller.answers.several
        assert turn is not None
        await chat.until(lambda: all(answer.content for answer in turn.answers))
        assert [answer.content for answer in turn.answers] == ["Paris", "PARIS", "pARIS", "Paris"]
        first = turn.answer.record
        assert first is not None

        def saved() -> list[tuple[str, str]]:
            return [(record.content, record.state) for record in store.siblings(first)]

        await chat.until(lambda: saved() == [(answer.content, "writing") for answer in turn.answers])
        assert on_disk(store, chat)[-1].id == first, "the first is shown"
        engine.gate.set()
        await chat.answered()
        assert saved() == [(text, "complete") for text in FOUR]
        assert [record.generation.temperature for record in store.siblings(first)] == [0.4, 0.7, 1.0, 1.3]
        assert [(each.siblings, each.sibling_index) for each in turn.answers] == [(4, 0), (4, 1), (4, 2), (4, 3)]
        assert [answer.tokens for answer in turn.answers] == [2, 3, 4, 5]
        assert chat.controller.status.context_used == 20 + 2
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate)
        assert (request.samples, request.temperatures, request.beams) == (4, [0.4, 0.7, 1.0, 1.3], 1)


async def test_one_is_picked_and_the_others_stay(engine: FakeEngine, store: ConversationStore) -> None:
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("Capital of France?")
        await chat.answered()
        assert chat.controller.ask_several(2), "the last question again"
        await chat.answered()
        assert (chat.path[-1].content, chat.path[-1].siblings) == (FOUR[0], 3)
        chat.controller.pick_answer(1)
        assert (chat.path[-1].content, chat.path[-1].siblings, len(chat.path)) == (FOUR[1], 3, 2)
        assert on_disk(store, chat)[-1].content == FOUR[1]
        chat.controller.pick_answer(1)
        assert chat.path[-1].content == FOUR[1]
        chat.controller.switch(chat.path[-1], -1)
        assert chat.path[-1].content == FOUR[0]
        chat.controller.pick_answer(7)
        assert chat.said[-1] == "There are no answers to choose from."
        chat.controller.new_conversation()
        chat.controller.pick_answer(0)
        assert chat.said[-1] == "That question is no longer on the screen."


async def test_one_is_picked_while_all_are_written(engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.ask_several(3, "q")
        turn = chat.controller.answers.several
        assert turn is not None
        await chat.until(lambda: all(answer.content for answer in turn.answers))
        chat.controller.pick_answer(2)
        assert chat.path[-1] is turn.answers[2], "it goes on growing"
        engine.gate.set()
        await chat.answered()
        assert chat.path[-1].content == FOUR[2]
        assert {record.content for record in store.siblings(turn.answer.record or 0)} == set(FOUR[:3])
        chat.controller.submit("next")
        await chat.until(lambda: len(chat.path) == 4 and not chat.controller.busy)
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate) and request.messages is not None
        assert [message.content for message in request.messages][1] == FOUR[2]


@pytest.mark.parametrize("dies", [False, True])
async def test_stopping_or_a_crash_keeps_the_text_of_all(
    engine: FakeEngine, store: ConversationStore, dies: bool
) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        chat.controller.ask_several(3, "q")
        turn = chat.controller.answers.several
        assert turn is not None
        await chat.until(lambda: all(answer.content for answer in turn.answers))
        if dies:
            engine.dies_at = 2
            engine.gate.set()
        else:
            chat.controller.stop()
        await chat.until(lambda: turn.ended)
        found = [(record.content, record.state) for record in store.siblings(turn.answer.record or 0)]
        assert found == [(text, "failed" if dies else "stopped") for text in ("Paris", "PARIS", "pARIS")]
        assert all(answer.note for answer in turn.answers)


async def test_a_question_that_is_too_long_is_so_with_whichever_answer_is_picked(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.generate_error = "The prompt is too long."
    async with running(Chat(engine, store)) as chat:
        chat.controller.ask_several(2, "long")
        await chat.answered()
        chat.controller.pick_answer(1)
        engine.generate_error = None
        chat.controller.submit("short")
        await chat.answered()
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate) and request.messages is not None
        assert [message.content for message in request.messages] == ["short"]


async def test_it_is_refused_where_there_is_no_question_or_one_waits(
    engine: FakeEngine, store: ConversationStore
) -> None:
    engine.gate = asyncio.Event()
    async with running(Chat(engine, store)) as chat:
        assert not chat.controller.ask_several(2)
        assert chat.said[-1] == "There is no question to ask again yet."
        chat.controller.submit("q")
        assert not chat.controller.ask_several(2, "other")
        assert chat.said[-1].startswith("Wait for the answer")
        engine.gate.set()
        await chat.answered()
