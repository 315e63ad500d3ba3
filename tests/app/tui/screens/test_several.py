"""Several answers side by side: as many as fit, while they are written, until one is picked."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tui.screens.several import NARROWEST, AnswerColumn, SeveralScreen, columns_shown
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, wait_until

pytestmark = pytest.mark.usefixtures("few_settings")


@given(count=st.integers(2, 8), width=st.integers(1, 400), data=st.data())
def test_the_chosen_answer_is_always_in_sight(count: int, width: int, data: st.DataObject) -> None:
    shown = range(0)
    for chosen in data.draw(st.lists(st.integers(0, count - 1), min_size=1)):
        before = shown
        shown = columns_shown(count, chosen, shown.start, width)
        assert chosen in shown and shown.start >= 0 and shown.stop <= count
        assert len(shown) == min(count, max(1, width // NARROWEST))
        if len(before) == len(shown) and chosen in before:
            assert shown == before, "nothing moves without need"


def texts(screen: SeveralScreen) -> list[str]:
    return [column.text.text_at(30) for column in screen.query(AnswerColumn) if column.display]


@pytest.mark.parametrize(("columns", "shown"), [(80, 2), (170, 4)])
async def test_answers_are_seen_growing_and_one_is_picked(
    make_app: MakeApp, engine: FakeEngine, columns: int, shown: int
) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(columns, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press(*"/n 4 Which city?", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, SeveralScreen) and "▍" in "".join(texts(app.screen)))
        screen = app.screen
        assert isinstance(screen, SeveralScreen)
        await wait_until(pilot, lambda: all("aris" in text.lower() for text in texts(screen)))
        assert len(texts(screen)) == shown
        assert "temperature" in texts(screen)[0] and "PARIS▍" in texts(screen)[1]
        engine.gate.set()
        await wait_until(pilot, lambda: "PARIS IS THE CAPITAL." in texts(screen)[1])
        assert "▍" not in "".join(texts(screen))
        await pilot.press("right", "right")
        assert "pARIS IS THE CAPITAL." in "".join(texts(screen)) and len(texts(screen)) == shown
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert controller(app).thread.path[-1].content == "pARIS IS THE CAPITAL."
        assert controller(app).thread.path[-1].siblings == 4
        await pilot.press(*"/n", "escape", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, SeveralScreen))
        await pilot.press("1", "enter")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert controller(app).thread.path[-1].content == "Paris is the capital."


async def test_all_are_stopped_together(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press(*"/n 2 Which city?", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, SeveralScreen) and "PARIS" in texts(app.screen)[-1])
        screen = app.screen
        assert isinstance(screen, SeveralScreen)
        await pilot.press("x")
        await wait_until(pilot, lambda: all("Stopped." in text for text in texts(screen)))
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert controller(app).thread.path[-1].content == "Paris"


async def test_an_impossible_number_is_refused(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        for typed, said in (("/n 9 q", "from 2 to 8, not 9"), ("/n many", "not many"), ("/n 2", "no question to ask")):
            await pilot.press(*typed, "enter")
            await wait_until(pilot, lambda said=said: app.chat is not None and said in str(app.chat.notice.render()))
