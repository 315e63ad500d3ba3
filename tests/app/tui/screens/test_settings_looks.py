"""Reading width, reduced motion, time stamps, and marks that say without colour what colour says."""

from __future__ import annotations

import calendar
import time
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from app.tui.chat.status import NoticeLine
from app.tui.render.formatting import Stamp, stamp
from app.tui.screens.settings import ChoiceButton, Choices, OnOff, SettingsScreen
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, shown, wait_until
from tests.app.tui.screens.test_screens_pictures import app_of
from tests.support.kept_screens import CheckScreen


async def test_the_conversation_is_as_wide_as_it_is_set_and_centred(make_app: MakeApp) -> None:
    app = make_app(reading_width=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        chat = app.chat.query_one("#chat")
        assert (chat.region.x, chat.region.width) == (30, 60)
        controller(app).change_settings({"reading_width": 0})
        await wait_until(pilot, lambda: chat.region.width == 120)


async def test_with_reduced_motion_nothing_blinks(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.constants.TEXTUAL_ANIMATIONS", "full")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        assert app.animation_level == "full" and app.chat.prompt.cursor_blink
        controller(app).change_settings({"reduced_motion": True})
        await wait_until(pilot, lambda: app.animation_level == "none" and not app.chat.prompt.cursor_blink)
        await ask(pilot, app, "Hi")
        assert not app.chat.prompt.cursor_blink
        await pilot.press("f2")
        await wait_until(pilot, lambda: isinstance(app.focused, Input) and not app.focused.cursor_blink)


NOON = calendar.timegm((2027, 5, 3, 12, 0, 0))


@pytest.mark.parametrize(
    ("before", "day"),
    [(None, "Monday, 3 May 2027"), (NOON - 60, ""), (NOON - 86_400, "Monday, 3 May 2027")],
)
def test_a_stamp_names_the_day_where_it_begins(monkeypatch: pytest.MonkeyPatch, before: float | None, day: str) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert stamp(NOON, before) == Stamp("12:00", day)
        assert stamp(0.0, before) is None
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_time_stamps_are_shown_if_they_are_wanted(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Hi")
        assert shown(app)[0] == "You\nHi"
        controller(app).change_settings({"time_stamps": True})
        await wait_until(pilot, lambda: shown(app)[0].startswith("── "))
        lines = shown(app)[0].split("\n")
        assert lines[1].startswith("You  ") and lines[1][-3] == ":" and lines[2] == "Hi"
        assert not shown(app)[1].startswith("── ")
        await ask(pilot, app, "Again")
        assert shown(app)[2].split("\n")[0].startswith("You  ")


async def test_a_notice_says_how_bad_it_is_by_its_mark(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.show_notice("Careful.", "warning")
        app.chat.show_notice("Broken.", "error", beside=True)
        await pilot.pause()
        assert str(app.chat.query_one(NoticeLine).visual) == "! Careful.\n✗ Broken."


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_a_choice_that_is_made_has_another_mark(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen) and app.screen.query(ChoiceButton))
        chosen = app.screen.query_one(Choices)

        def shown() -> list[str]:
            return [str(button.render()) for button in chosen.query(ChoiceButton) if button.display]

        # Where the focus is not, only the choice that is made is shown.
        app.screen.set_focus(None)
        await pilot.pause()
        assert shown() == ["▾ Best for this machine "]
        chosen.focus()
        await pilot.pause()
        assert [line[0] for line in shown()] == ["●", "○", "○", "○"]


def test_picture_of_time_stamps_in_a_narrow_column(
    check_screen: CheckScreen, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.tui.chat.transcript.stamp", lambda created, before: STAMPS[before is not None])

    async def before(pilot: Pilot[Any]) -> None:
        app = app_of(pilot)
        await ready(pilot, app)
        await ask(pilot, app, "Which city is the capital of France, and how many people live there?")

    check_screen(make_app(time_stamps=True, reading_width=50), (80, 24), before)


STAMPS = (Stamp("12:00", "Monday, 3 May 2027"), Stamp("12:01"))


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_a_switch_says_its_state_in_a_word(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen) and app.screen.query(OnOff))
        switch = app.screen.query(OnOff).first()
        assert switch.render().plain == "○ off"
        switch.toggle()
        await pilot.pause()
        assert switch.render().plain == "● on " and controller(app).options.show_timing
