"""The status line."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from app.tui.chat.state import Status
from app.tui.render.formatting import status_line


class StatusLine(Widget):
    """One line about model, engine, context and speed. It never changes its size, so showing it moves nothing."""

    def __init__(self, status: Status, id: str) -> None:
        super().__init__(id=id)
        self._status = status
        self._shown = ""

    def update(self) -> None:
        """Draw again if there is something new to say."""
        line = status_line(self._status, self.size.width).markup
        if line != self._shown:
            self._shown = line
            self.refresh()

    def render(self) -> Content:
        return status_line(self._status, self.size.width)
