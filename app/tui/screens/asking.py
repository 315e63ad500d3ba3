"""Small dialogues: one line of text, or yes and no."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static


class AskText(ModalScreen[str | None]):
    """Gives the text, or None if the person left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", id="asking.leave")]

    def __init__(self, label: str, text: str = "") -> None:
        super().__init__()
        self._label = label
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialogue"):
            yield Static(self._label, markup=False, classes="dialogue-title")
            yield Input(self._text, select_on_focus=True)
        yield Footer(compact=True, show_command_palette=False)

    @on(Input.Submitted)
    def _done(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip() or None)


class Confirm(ModalScreen[bool]):
    """Asks before something that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes", id="confirm.yes"),
        Binding("n,escape", "dismiss(False)", "No", id="confirm.no"),
    ]

    def __init__(self, question: str, detail: str = "") -> None:
        super().__init__()
        self._question = question
        self._detail = detail

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialogue"):
            yield Static(self._question, markup=False, classes="dialogue-title")
            if self._detail:
                yield Static(self._detail, markup=False)
        yield Footer(compact=True, show_command_palette=False)
