"""How the popup of completions and the palette look. `pytest --update-screens` takes what is drawn now as right."""

from __future__ import annotations

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import OptionList

from app.tui.actions import all_actions
from app.tui.chat.completion import CompletionPopup
from app.tui.screens import keys
from app.tui.screens.machines import MachinesScreen
from tests.app.tui.screen_helpers import MakeApp, wait_until
from tests.app.tui.screens.test_screens_pictures import app_of, at_sizes, ready
from tests.support.kept_screens import CheckScreen


@at_sizes((80, 24), (40, 20))
def test_slash_completion(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("slash", "b")
        popup = app_of(pilot).screen.query_one(CompletionPopup)
        await wait_until(pilot, lambda: popup.display)
        await pilot.press("down")

    check_screen(make_app(), size, before)


def test_palette_of_a_screen(check_screen: CheckScreen, make_app: MakeApp) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press("f8")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, MachinesScreen))
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
        await wait_until(pilot, lambda: pilot.app.screen.query_one(OptionList).option_count)

    check_screen(make_app(), (80, 24), before)


@at_sizes((80, 24), (40, 20))
def test_keys(
    check_screen: CheckScreen, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    # Other actions would change the picture whenever one is added.
    shown = tuple(action for action in all_actions() if action.id.startswith("prompt.") or action.id == "chat.beams")
    monkeypatch.setattr(keys, "all_actions", lambda: shown)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("TERM_PROGRAM", "TMUX"):
        monkeypatch.delenv(name, raising=False)

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        await pilot.press(*"/keys", "enter")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, keys.KeysScreen))
        await pilot.press("ctrl+b", "f20", "ctrl+j")

    check_screen(make_app(), size, before)
