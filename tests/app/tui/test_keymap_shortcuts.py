"""Every function can be reached with a key that the plainest terminal sends."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
import string
from collections import defaultdict
from pathlib import Path

import pytest
from textual.binding import Binding
from textual.dom import DOMNode
from textual.events import Key
from textual.widgets._footer import FooterKey

import app.tui
from app import clipboard
from app.tui import keymap
from app.tui.application import ChatApp
from app.tui.chat.message import MessageView
from app.tui.keymap import HOMES, TERMINAL_APP, either, key, keys
from app.tui.render.key_footer import KeyFooter
from app.tui.render.markdown import COPY_MARK
from app.tui.render.rendered import Rendered
from app.tui.screens.dialogues import HelpScreen, KeySheet
from app.tui.screens.settings import SettingsScreen
from app.tui.terminal.keys import KeyParser
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, wait_until


def ours() -> list[type[DOMNode]]:
    """All screens, widgets and applications of the program that have keys of their own."""
    for module in pkgutil.walk_packages(app.tui.__path__, "app.tui."):
        importlib.import_module(module.name)
    found: list[type[DOMNode]] = []
    left: list[type[DOMNode]] = [DOMNode]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("app.") and "BINDINGS" in vars(kind):
            found.append(kind)
    return sorted(set(found), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", ours(), ids=lambda kind: kind.__name__)
def test_every_action_has_a_key_that_terminal_app_sends(kind: type[DOMNode]) -> None:
    actions: defaultdict[str, set[str]] = defaultdict(set)
    inherited = {binding for base in kind.__mro__[1:] for binding in vars(base).get("BINDINGS", ())}
    for binding in Binding.make_bindings(entry for entry in kind.BINDINGS if entry not in inherited):
        actions[binding.action].add(binding.key)
    assert actions
    # What delete does in a field of one line, right and backspace do too. The palette undoes, and deletes a word.
    for action in ("delete_right", "undo_typing", "delete_word_right"):
        actions.pop(action, None)
    assert {action: names for action, names in actions.items() if not names & TERMINAL_APP} == {}


SENT = {
    "enter": "\r", "escape": "\x1b", "tab": "\t", "shift+tab": "\x1b[Z", "backspace": "\x7f", "space": " ",
    "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D", "ctrl+underscore": "\x1f",
    "ctrl+right_square_bracket": "\x1d", "ctrl+backslash": "\x1c",
    "question_mark": "?", "slash": "/", "left_square_bracket": "[", "right_square_bracket": "]",
    "left_curly_bracket": "{", "right_curly_bracket": "}",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TERMINAL_APP))
def test_its_keys_arrive_under_the_names_they_are_bound_by(name: str) -> None:
    controls = {f"ctrl+{letter}": chr(ord(letter) & 31) for letter in string.ascii_lowercase}
    sent = (controls | SENT).get(name, name)
    parser = KeyParser()
    # The end of all input says that a lone ESC was the key.
    events = [*parser.feed(sent), *(parser.feed("") if name == "escape" else ())]
    assert [event.key for event in events if isinstance(event, Key)] == [name]


@pytest.mark.parametrize("function", sorted(HOMES))
def test_a_mac_is_told_of_those_first(function: str) -> None:
    assert keys(function, "darwin")[0] in TERMINAL_APP
    assert set(keys(function, "darwin")) == set(keys(function, "linux")) == set(keymap._FUNCTIONS[function][1])
    assert keys(function, "linux") == keymap._FUNCTIONS[function][1]


def test_hints_name_the_key_of_the_system() -> None:
    assert (key("model", "linux"), key("model", "darwin")) == ("f3", "ctrl+g")
    assert (either("help", "linux"), either("help", "darwin")) == ("f1 or ctrl+_", "ctrl+_ or f1")


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_the_keys_of_a_mac_work(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.answer = lambda request: [f"line {number}\n\n" for number in range(200)]
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Hello")
        assert app.chat is not None
        transcript = app.chat.transcript
        await pilot.press("shift+tab")
        assert isinstance(app.focused, MessageView)
        bottom = transcript.scroll_y
        await pilot.press("u")
        await wait_until(pilot, lambda: transcript.scroll_y < bottom)
        assert not transcript.following
        above = transcript.scroll_y
        await pilot.press("d")
        await wait_until(pilot, lambda: transcript.scroll_y > above)
        await pilot.press("u", "u", "escape", "ctrl+f")
        await wait_until(pilot, lambda: transcript.following)
        for opened in ("", "ctrl+s"):
            await pilot.press(*filter(None, [opened]), "ctrl+underscore")
            await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen))
            await pilot.press("escape")
            await wait_until(pilot, lambda: not isinstance(app.screen, HelpScreen))
        assert isinstance(app.screen, SettingsScreen)
        await pilot.press("ctrl+n")
        assert controller(app).thread.path  # in the settings it is the next group, not a new conversation


async def test_what_is_selected_goes_to_the_machine_s_clipboard_too(
    make_app: MakeApp, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, target = tmp_path / "wl-copy", tmp_path / "copied"
    tool.write_text(f"#!/bin/sh\ncat > '{target}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    for name in ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clipboard.sys, "platform", "linux")
    engine.answer = lambda request: ["Roses are red\n\n```py\na = 1\n```\n\n- as\n  ```\n  b\n  ```"]
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.fill("größer")
        app.chat.prompt.select_all()
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: app._notifications)
        assert [notice.message for notice in app._notifications] == ["The selection was copied."]
        assert target.read_text("utf-8") == app.clipboard == "größer"
        # With the mouse, over a message.
        app.clear_notifications()
        await ask(pilot, app, "A poem")
        answer = app.chat.transcript.views[-1]
        start = (answer.content_region.x - answer.region.x, answer.content_region.y - answer.region.y)
        await pilot.mouse_down(answer, offset=start)
        await pilot.hover(answer, offset=(start[0] + 4, start[1]))
        await pilot.mouse_up(answer, offset=(start[0] + 4, start[1]))
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: app._notifications)
        copied = target.read_text("utf-8")
        assert copied == answer.render().plain[: len(copied)] and len(copied) >= 4
        # A selection that ends at the mark of code has it not, and copies no code; a click on the mark does.
        lines = answer.render().plain.splitlines()
        rows = [row for row, line in enumerate(lines) if COPY_MARK in line]
        ends = [(start[0] + lines[row].index(COPY_MARK), start[1] + row) for row in rows]
        await pilot.mouse_down(answer, offset=start)
        await pilot.hover(answer, offset=ends[0])
        app.clear_notifications()
        await pilot.mouse_up(answer, offset=ends[0])
        selected = app.screen.get_selected_text()
        assert selected is not None and selected.split()[-1] == "py" and len(selected.splitlines()) == rows[0] + 1
        assert not app._notifications
        for end, code in zip(ends, ["a = 1", "b"], strict=True):
            await pilot.click(answer, offset=end)
            await wait_until(pilot, lambda code=code: app.clipboard == target.read_text("utf-8") == code)


def sheet(app: ChatApp) -> str:
    """What the sheet of keys says."""
    return app.screen.query_one(".help-text", Rendered).render().plain if isinstance(app.screen, KeySheet) else ""


@pytest.mark.soak
async def test_a_question_mark_shows_the_keys_of_the_place(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Hello")
        assert app.chat is not None
        # Where text is typed, it is typed; enter asks it, and tab takes what it may mean.
        await pilot.press("question_mark")
        assert app.chat.prompt.text == "?" and not sheet(app)
        assert app.chat.prompt.completion is not None and app.chat.prompt.completer.marked is None
        await pilot.press("tab")
        assert app.chat.prompt.text == "/help"
        app.chat.prompt.done()
        await pilot.press("shift+tab", "question_mark")
        here = sheet(app).partition("On this screen")[0]
        for line in (r"c +Copy", r"r +Regenerate", r"G end +Last message", r"\{ +Previous question"):
            assert re.search(rf"^{line}", here, re.MULTILINE), here
        # What is not possible comes after all that is.
        possible, _, impossible = sheet(app).partition("Not now")
        assert "Next version: This message has no other versions." in " ".join(impossible.split())
        assert "Copy code: This message has no code block." in impossible and "Copy code" not in possible
        assert re.search(r"^left \[ +Previous version: This message has no other", impossible, re.MULTILINE), impossible
        assert "Scroll Left" not in sheet(app)
        assert "f3 ctrl+g" in possible.partition("On this screen")[2]
        await pilot.press("question_mark")
        await pilot.press("f3", "question_mark")
        assert "Page Down" in sheet(app) or "Down" in sheet(app)
        assert "Regenerate" not in sheet(app)
        await pilot.press("escape", "escape")
        assert app.screen is app.chat


@pytest.mark.soak
async def test_the_line_of_keys_has_all_that_a_message_takes_and_what_stops_an_answer(
    make_app: MakeApp, engine: FakeEngine
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Hello")
        engine.answer = lambda request: ["```\nprint(1)\n```"]
        await ask(pilot, app, "Code")

        def keys_shown() -> list[str]:
            return [key.key_display for key in app.screen.query_one(KeyFooter).query(FooterKey)]

        await pilot.press("shift+tab")
        await wait_until(pilot, lambda: keys_shown() == [*"cberm", "x", "/", "g G u d", "esc", "f1"], str(keys_shown()))
        await pilot.press("escape")
        assert "esc" not in keys_shown()
        engine.gate = asyncio.Event()
        engine.answer = lambda request: ["The beginning", " and the end."]
        await pilot.press(*"go", "enter")
        await wait_until(pilot, lambda: keys_shown()[0] == "esc", "esc in the line of keys")
        await pilot.press("escape")
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy and "esc" not in keys_shown(), "the end")
