"""Questions that are sent during an answer: shown, edited, removed, handed back when the answer is stopped."""

from __future__ import annotations

import asyncio

import pytest
from textual.pilot import Pilot

from app.tui.application import ChatApp
from app.tui.chat.queue_view import QueueView
from engine.ipc.messages import Generate
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, wait_until


async def busy_with_three(pilot: Pilot[int], app: ChatApp) -> QueueView:
    """An answer in progress, and three questions behind it."""
    await ready(pilot, app)
    await pilot.press(*"go", "enter")
    await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)
    for text in ("one", "two", "three"):
        await pilot.press(*text, "enter")
    assert app.chat is not None
    view = app.chat.query_one(QueueView)
    await wait_until(pilot, lambda: view.option_count == 3)
    return view


@pytest.mark.soak
async def test_queued_questions_are_edited_and_removed_one_by_one(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: [f"to {request.messages[-1].content if request.messages else ''}", "."]
    app = make_app()
    async with app.run_test() as pilot:
        view = await busy_with_three(pilot, app)
        assert app.chat is not None and view.display
        prompt = app.chat.prompt
        await pilot.press("up")
        assert app.focused is view and view.highlighted == 2
        await pilot.press("up", "d")
        await wait_until(pilot, lambda: view.option_count == 2)
        await pilot.press("e")
        await wait_until(pilot, lambda: prompt.text == "three" and app.focused is prompt)
        await pilot.press("!", "enter")
        await wait_until(pilot, lambda: view.option_count == 2)
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        path = [entry.content for entry in controller(app).thread.path]
        assert path == ["go", "to go.", "one", "to one.", "three!", "to three!."]
        assert not view.display


async def test_esc_stops_the_answer_only_and_brings_the_questions_back(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        view = await busy_with_three(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press(*"four", "escape")
        await wait_until(pilot, lambda: not controller(app).busy)
        assert prompt.text == "one\n\ntwo\n\nthree\n\nfour"
        assert len(engine.sent(Generate)) == 1 and len(controller(app).thread.path) == 2
        assert not view.display and app.focused is prompt


@pytest.mark.soak
async def test_removing_the_last_queued_question_returns_to_the_prompt(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await busy_with_three(pilot, app)
        assert app.chat is not None
        await pilot.press("up", "backspace", "backspace", "backspace")
        await wait_until(pilot, lambda: app.chat and app.focused is app.chat.prompt)
        assert not controller(app).queue.items and controller(app).answers.busy
