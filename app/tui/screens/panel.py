"""A panel that fills the screen, where it would not fit beside the conversation."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Static

from app.tui.panels.panel import Panel
from app.tui.shortcuts import bound


class PanelScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape," + bound("beams", "timing"), "close_panel", "Close", show=False, id="panel.back"),
        Binding(bound("help"), "app.help", "Help", id="panel.help"),
    ]

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self._panel = panel
        panel.covers = True

    def compose(self) -> ComposeResult:
        yield Static(self._panel.TITLE, classes="screen-title", markup=False)
        yield self._panel
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self._panel.focus_first()
        self._panel.opened()

    def action_close_panel(self) -> None:
        self._panel.closed()
        self.dismiss(None)
