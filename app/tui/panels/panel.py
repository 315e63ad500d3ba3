"""What the panels have in common: they stand at the side of the chat, or fill a screen where that is too narrow."""

from __future__ import annotations

from typing import ClassVar

from textual.containers import VerticalScroll

from app.tui.chat.state import Update


class Panel(VerticalScroll):
    PANEL: ClassVar[str] = ""
    """Which one it is."""
    TITLE: ClassVar[str] = ""
    HINT: ClassVar[str] = ""
    """How to come here from the field, said below a panel at the side."""

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self.covers = False
        """It has the screen for itself: there is no place to ask."""

    def hear(self, update: Update) -> None:
        """The controller changed something."""

    def loaded(self) -> None:
        """A model was loaded."""

    def focus_first(self) -> None:
        self.focus()

    def opened(self) -> None:
        """The panel is on the screen."""

    def closed(self) -> None:
        """The panel is gone."""
