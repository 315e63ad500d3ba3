"""The screen that shows keys: what arrived, what it does, and all actions."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from app.tui.actions import all_actions
from app.tui.application import ChatApp
from app.tui.keymap import is_unsent, use
from app.tui.screens.keys import ActionList, KeysScreen, actions_view, matching, pressed_line
from app.tui.terminal.keys import KeyParser
from tests.app.tui.screen_helpers import MakeApp, ready, wait_until


def test_what_was_sent_is_kept_by_key() -> None:
    sent: dict[str, str] = {}
    parser = KeyParser(sequences=sent)
    for keys in ("\x1b[A", "\x1b\r", "\x02", "é", "\x1b[13;2u"):
        list(parser.feed(keys))
    assert sent == {"up": "\x1b[A", "alt+enter": "\x1b\r", "ctrl+b": "\x02", "é": "é", "shift+enter": "\x1b[13;2u"}


def test_a_key_is_shown_with_its_bytes_and_what_it_does() -> None:
    line = pressed_line("ctrl+b", "\x02", all_actions()).plain
    assert line.startswith("ctrl+b") and " 02 " in line and "chat.beams" in line
    assert pressed_line("f20", "", all_actions()).plain.endswith("no action")
    use({"chat.beams": ("f20",)})
    try:
        assert "chat.beams" in pressed_line("f20", "", all_actions()).plain
    finally:
        use({})


@pytest.mark.parametrize(
    ("environment", "unsent", "sent"),
    [
        ({"TERM_PROGRAM": "Apple_Terminal"}, ["pageup", "shift+enter", "f1"], ["ctrl+b", "a", "escape"]),
        ({"TERM": "xterm-256color"}, ["shift+enter", "ctrl+enter", "super+c"], ["alt+enter", "shift+tab", "pageup"]),
        ({"TERM": "xterm-kitty"}, [], ["shift+enter", "ctrl+enter"]),
        ({"TERM": "xterm-kitty", "TMUX": "x"}, ["ctrl+enter"], ["ctrl+b"]),
    ],
)  # fmt: skip
def test_what_is_not_sent_is_known(environment: dict[str, str], unsent: list[str], sent: list[str]) -> None:
    assert all(is_unsent(key, environment) for key in unsent)
    assert not any(is_unsent(key, environment) for key in sent)


def test_actions_are_found_by_name_title_and_key() -> None:
    assert [action.id for action in matching(all_actions(), "chat.bea")] == ["chat.beams"]
    assert "chat.new" in [action.id for action in matching(all_actions(), "ctrl+n")]
    assert len(matching(all_actions(), "")) == len({action.id for action in all_actions()})
    shown = actions_view(matching(all_actions(), "prompt.newline"), {"ctrl+j"}, {"TERM": "xterm"}, 80).plain
    assert "ctrl+j✓ shift+enter!" in shown and "! this terminal does not send the key" in shown
    assert actions_view([], (), {}, 80).plain == "No action fits."


async def opened(pilot: Pilot[int], app: ChatApp) -> KeysScreen:
    await ready(pilot, app)
    await pilot.press(*"/keys", "enter")
    await wait_until(pilot, lambda: isinstance(app.screen, KeysScreen))
    assert isinstance(app.screen, KeysScreen)
    return app.screen


@pytest.mark.soak
async def test_every_key_is_shown_and_does_nothing_until_esc_twice(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        await pilot.press("ctrl+q", "ctrl+p", "ctrl+c", "tab", "f1", "ctrl+z")
        assert app.screen is screen
        said = str(screen.query_one("#pressed").render())
        assert "ctrl+z" in said and "app.suspend" in said and "f1" in said
        await pilot.press(*"beams")
        assert screen.query_one(ActionList).typed == "beams"
        assert "chat.beams" in screen.query_one(ActionList).render().plain
        assert "chat.new" not in screen.query_one(ActionList).render().plain
        await pilot.press("backspace", "escape", "down", "escape")
        assert app.screen is screen and screen.query_one(ActionList).typed == ""
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await pilot.press("x")
        assert app.chat is not None and app.chat.prompt.text == "x"
