"""The questions that wait for the answer in progress, as lines above the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from app.chat.state import NewQuestion
from app.text_safety import one_line

_LONGEST = 300
"""Maximum characters of a question that are shown: more than a line of any terminal."""


class QueueView(OptionList):
    """A line for each question that waits. Not displayed while there is none."""

    HELP = (
        "Questions that wait for the answer in progress. `enter` or `e` takes one back to the prompt, `d` or "
        "`backspace` removes it, `esc` returns to the prompt. In the prompt, `esc` stops the answer and brings all "
        "of them back."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e,enter", "select", "Edit", id="queue.edit"),
        Binding("d,delete,backspace", "remove", "Remove", id="queue.remove"),
        Binding("escape,i", "leave", "Back", id="queue.leave"),
    ]

    class Taken(Message):
        """The person takes the question ``index`` back: to edit it, or to remove it."""

        def __init__(self, index: int, edit: bool) -> None:
            super().__init__()
            self.index = index
            self.edit = edit

    class Leave(Message):
        """The person returns to the prompt."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, compact=True, markup=False)
        self.display = False
        self.border_title, self.border_subtitle = "Queued", "up: edit or remove"

    def show(self, questions: Sequence[NewQuestion]) -> None:
        had_focus, highlighted = self.has_focus, self.highlighted
        self.clear_options()
        self.add_options(
            [
                Option(Content.assemble((f"{number}. ", "$foreground-muted"), one_line(question.text[:_LONGEST])))
                for number, question in enumerate(questions, start=1)
            ]
        )
        self.display = bool(questions)
        if not questions:
            if had_focus:
                self.post_message(self.Leave())
        elif had_focus and highlighted is not None:
            self.highlighted = min(highlighted, len(questions) - 1)

    def enter_from_below(self) -> bool:
        """Give the last question the focus. Returns False if none waits."""
        if not self.option_count:
            return False
        self.highlighted = self.option_count - 1
        self.focus()
        return True

    def action_cursor_down(self) -> None:
        if self.highlighted == self.option_count - 1:
            self.action_leave()
        else:
            super().action_cursor_down()

    def action_cursor_up(self) -> None:
        if self.highlighted != 0:
            super().action_cursor_up()

    def action_remove(self) -> None:
        if self.highlighted is not None:
            self.post_message(self.Taken(self.highlighted, edit=False))

    def action_leave(self) -> None:
        self.post_message(self.Leave())

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Taken(event.option_index, edit=True))
