"""The ends of the logs, which follow what is written to them."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from app.log_tail import LOGS, log_path, read_tail, version
from app.tui.keymap import bound
from app.tui.render.key_footer import KeyFooter
from app.tui.terminal.application import CopyRequested

LOOK_S = 0.5
"""Seconds between two looks at the file."""


class LogScreen(Screen[None]):
    """The log of the engine, or of the screen. It stays at its end unless the reader scrolled up."""

    HELP = (
        "What the engine and the screen have logged: the end of a file each, whose path is shown. `l` shows the other "
        "log. The newest lines stay in view unless you scroll up; `end` or `f` goes back to them. `c` copies what is "
        "shown."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", "Close", key_display="esc", id="log.close"),
        Binding("l", "other", "Other log", id="log.other"),
        Binding("f,end", "follow", "Newest", key_display="f", id="log.newest"),
        Binding("c", "copy", "Copy", id="log.copy"),
        Binding(bound("help"), "app.help", "Help", id="log.help"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._log = LOGS[0]
        self._text = ""
        self._version = (-1, 0)

    def compose(self) -> ComposeResult:
        yield Static(classes="screen-title", markup=False)
        yield Static(id="log-path", markup=False)
        with VerticalScroll(id="log"):
            yield Static(id="log-lines", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#log").focus()
        self._show()
        self.set_interval(LOOK_S, self._look)

    def _look(self) -> None:
        if version(log_path(self._log)) != self._version:
            self._show()

    def _show(self) -> None:
        path = log_path(self._log)
        lines = self.query_one("#log", VerticalScroll)
        follows = lines.scroll_offset.y >= lines.max_scroll_y
        self._version, self._text = version(path), read_tail(path)
        self.query_one(".screen-title", Static).update(Content(f"Log of the {self._log}"))
        self.query_one("#log-path", Static).update(Content(str(path)))
        self.query_one("#log-lines", Static).update(Content(self._text.rstrip("\n") or "Nothing has been logged."))
        if follows:
            self.call_after_refresh(lines.scroll_end, animate=False)

    def action_other(self) -> None:
        self._log = LOGS[(LOGS.index(self._log) + 1) % len(LOGS)]
        self._show()
        self.action_follow()

    def action_follow(self) -> None:
        lines = self.query_one("#log", VerticalScroll)
        self.call_after_refresh(lines.scroll_end, animate=False)

    def action_copy(self) -> None:
        self.post_message(CopyRequested(self._text, "The log"))
