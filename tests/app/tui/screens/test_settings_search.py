"""The search in the settings: by words of their labels, help, choices and keys."""

from __future__ import annotations

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from app.settings.schema import SCHEMA
from app.tui.application import ChatApp
from app.tui.screens.settings import SearchField, SettingRow, SettingsScreen
from tests.app.tui.screen_helpers import MakeApp, ready, wait_until

WIDEST_HELP = 96
"""Columns of a help text in a wide window: longer lines are hard to read."""


def shown_keys(app: ChatApp) -> list[str]:
    return [row.setting.key for row in app.screen.query(SettingRow).results(SettingRow) if row.display]


async def opened(pilot: Pilot[int], app: ChatApp) -> None:
    await ready(pilot, app)
    await pilot.press("ctrl+s")
    await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
    await wait_until(pilot, lambda: len(app.screen.query(SettingRow)) == len(SCHEMA))
    app.screen.set_focus(None)


@pytest.mark.soak
async def test_settings_are_found_by_all_words_and_groups_without_them_hide(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await opened(pilot, app)
        for setting in SCHEMA[::12]:
            app.screen.set_focus(None)
            await pilot.press("slash")
            field = app.screen.query_one(SearchField)
            await wait_until(pilot, lambda field=field: app.focused is field)
            field.value = f"{setting.key.upper()} {setting.help.split()[0]}"
            await pilot.pause()
            assert setting.key in shown_keys(app)
            groups = {s.group for s in SCHEMA if s.key in shown_keys(app)}
            assert sum(group.display for group in app.screen.query(".setting-group")) == len(groups)
        field.value = "engine nosuchword"
        await pilot.pause()
        assert shown_keys(app) == [] and app.screen.query_one("#no-settings").display
        await pilot.press("f7")
        assert isinstance(app.screen, SettingsScreen)


@pytest.mark.soak
async def test_esc_ends_the_search_before_it_leaves_the_settings(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(200, 40)) as pilot:
        await opened(pilot, app)
        await pilot.pause()
        widths = [line.size.width for line in app.screen.query(".setting-help")]
        assert max(widths) == WIDEST_HELP
        # A slash that is typed in a field is text: a model can be a path.
        app.screen.query_one("SettingRow Input", Input).focus()
        for name, character in (("ctrl+f", None), *((letter, letter) for letter in "seed")):
            app.post_message(Key(name, character))
        await wait_until(pilot, lambda: app.screen.query_one(SearchField).value == "seed")
        await pilot.press("enter")
        assert len(shown_keys(app)) < len(SCHEMA) and not isinstance(app.focused, SearchField)
        await pilot.press("escape")
        await wait_until(pilot, lambda: len(shown_keys(app)) == len(SCHEMA))
        assert isinstance(app.screen, SettingsScreen) and not app.screen.query_one(SearchField).display
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_the_first_setting_has_the_focus_and_not_the_hidden_search(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen) and app.focused is not None)
        assert next(iter(app.screen.query(SettingRow))).has_focus_within
