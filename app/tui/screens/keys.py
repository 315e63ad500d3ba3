"""The screen of keys: shows what the terminal sends for each, and lists all actions with their keys."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from app.text_safety import one_line
from app.tui.actions import Action, all_actions
from app.tui.keymap import is_unsent, keys_of, readable
from app.tui.render.rendered import Rendered
from app.tui.terminal.application import TerminalApp

_MUTED = "$foreground-muted"
_MOST_PRESSED = 4
"""Maximum number of keys shown that were pressed last."""
_MOST_RUN = 3
"""Maximum number of actions named for one key."""
_TITLE_CELLS, _ID_CELLS = 20, 26
"""Widths of the columns, where a line has room for them."""
_SCROLLING: Mapping[str, int] = {"up": -1, "down": 1, "pageup": -10, "pagedown": 10}
"""Number of lines that a key scrolls the list by, besides being shown."""


class ActionList(Rendered):
    """All actions that fit what was typed, with their keys and which of those were pressed."""

    def __init__(self) -> None:
        super().__init__(id="actions")
        self.typed = ""
        self.pressed: set[str] = set()

    def make(self, width: int) -> Content:
        return actions_view(matching(all_actions(), self.typed), self.pressed, os.environ, width)


class KeysScreen(Screen[None]):
    """Every key is shown and does nothing else. Typed letters search, esc twice leaves."""

    takes_all_keys: ClassVar[bool] = True
    """The application leaves its own keys to this screen."""

    def __init__(self) -> None:
        super().__init__()
        self._pressed: deque[tuple[str, str]] = deque(maxlen=_MOST_PRESSED)

    def compose(self) -> ComposeResult:
        yield Static("Keys", classes="screen-title", markup=False)
        yield Static(id="pressed", markup=False)
        with VerticalScroll(id="all-actions", can_focus=False):
            yield ActionList()
        yield Static(
            "Press keys to see what arrives. Letters search. esc esc leaves.", classes="panel-hint", markup=False
        )

    def on_mount(self) -> None:
        self._show()

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        if event.key == "escape" and self._pressed and self._pressed[-1][0] == "escape":
            self.dismiss(None)
            return
        sent = self.app.sequence_of(event.key) if isinstance(self.app, TerminalApp) else ""
        self._pressed.append((event.key, sent))
        listed = self.query_one(ActionList)
        listed.pressed.add(event.key)
        if event.key == "escape":
            listed.typed = ""
        elif event.key == "backspace":
            listed.typed = listed.typed[:-1]
        elif event.is_printable and event.character:
            listed.typed += event.character
        elif event.key in _SCROLLING:
            scroll = self.query_one("#all-actions", VerticalScroll)
            scroll.scroll_relative(y=_SCROLLING[event.key], animate=False)
        listed.remake()
        self._show()

    def _show(self) -> None:
        lines = [pressed_line(key, sent, all_actions()) for key, sent in self._pressed]
        lines = lines or [Content.styled("No key was pressed yet.", _MUTED)]
        lines += [Content("")] * (_MOST_PRESSED - len(lines))
        typed = self.query_one(ActionList).typed
        lines.append(Content.assemble(("Search: ", _MUTED), (one_line(typed), "bold")) if typed else Content(""))
        self.query_one("#pressed", Static).update(Content("\n").join(lines))


def matching(actions: Iterable[Action], typed: str) -> list[Action]:
    """One action for each id, those whose id, title or a key has ``typed`` in it."""
    wanted = typed.strip().casefold()
    by_id: dict[str, Action] = {}
    for action in actions:
        words = [action.id, action.title, *map(readable, keys_of(action.id, action.keys))]
        if any(wanted in word.casefold() for word in words):
            by_id.setdefault(action.id, action)
    return list(by_id.values())


def pressed_line(key: str, sent: str, actions: Sequence[Action]) -> Content:
    """One key: its name, the bytes if they are known, and what it does on which screens."""
    code = " ".join(f"{byte:02x}" for byte in sent.encode("utf-8", "replace"))
    runs = list(dict.fromkeys(action.id for action in actions if key in keys_of(action.id, action.keys)))
    more = f" and {len(runs) - _MOST_RUN} more" if len(runs) > _MOST_RUN else ""
    does = ", ".join(runs[:_MOST_RUN]) + more if runs else "no action"
    name = one_line(readable(key))
    return Content.assemble((f"{name:14}", "bold"), (f" {code}" if code else "", "$text-accent"), (f"  {does}", _MUTED))


def actions_view(
    actions: Sequence[Action], pressed: Iterable[str], environment: Mapping[str, str], width: int
) -> Content:
    """The list: keys, what they do, and the id that the keymap file calls it by."""
    seen = set(pressed)
    lines: list[Content] = []
    unsent = False
    for action in actions:
        parts: list[Content] = []
        for key in keys_of(action.id, action.keys):
            missing = key not in seen and is_unsent(key, environment)
            unsent = unsent or missing
            mark = "✓" if key in seen else "!" if missing else ""
            style = "$text-success" if key in seen else "$text-warning" if missing else "bold"
            parts.append(Content.styled(readable(key) + mark, style))
        keys = Content(" ").join(parts)
        name = Content.styled(f"{action.id:{_ID_CELLS}} ", _MUTED)
        line = Content.assemble(f"{action.title:{_TITLE_CELLS}} ", name)
        if line.cell_length + keys.cell_length <= width:
            lines.append(Content.assemble(line, keys))
        else:
            lines += [Content.assemble(action.title, "  ", (action.id, _MUTED)), Content.assemble("  ", keys)]
    if not lines:
        lines = [Content.styled("No action fits.", _MUTED)]
    if unsent:
        lines.insert(0, Content.styled("! this terminal does not send the key", "$text-warning"))
    return Content("\n").join(lines)
