"""A dialogue for a text of several lines."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from app.tui.render.key_footer import KeyFooter
from app.tui.render.text_field import TextField


class EditText(ModalScreen[str | None]):
    """Asks for a text of several lines. The result is None if the person left without saving.

    ``hint`` is a line below the title.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True, id="text.save"),
        Binding("escape", "leave", "Cancel", id="text.leave"),
    ]

    def __init__(self, title: str, text: str, hint: str = "") -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._hint = hint
        self._warned = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialogue text-dialogue"):
            yield Static(self._title, markup=False, classes="dialogue-title")
            yield Static(self._hint, markup=False, classes="dialogue-hint")
            yield TextField(self._text, compact=True, highlight_cursor_line=False, tab_behavior="focus")
        yield KeyFooter()

    def on_mount(self) -> None:
        area = self.query_one(TextField)
        area.move_cursor(area.document.end)
        area.focus()

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextField).text)

    def action_leave(self) -> None:
        text = self.query_one(TextField).text
        if text not in (self._text, self._warned):
            self._warned = text
            self.notify("Not saved. Esc again discards the changes.", severity="warning")
            return
        self.dismiss(None)
