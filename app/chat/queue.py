"""Questions that were sent while an answer is being written. They can still be changed, and become messages one by one.

No Textual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.attachments.attachment import Attachment


@dataclass(frozen=True)
class NewQuestion:
    """A question that was sent: its text as the person typed it, and the files that were attached then."""

    text: str
    attachments: tuple[Attachment, ...] = ()


class QuestionQueue:
    """The questions that wait, oldest first. ``on_change`` is called after each change."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._items: list[NewQuestion] = []
        self.on_change = on_change

    @property
    def items(self) -> tuple[NewQuestion, ...]:
        return tuple(self._items)

    def add(self, question: NewQuestion) -> None:
        self._items.append(question)
        self.on_change()

    def take(self, index: int = 0) -> NewQuestion | None:
        """Remove a question and return it; None if there is none at ``index``."""
        if not 0 <= index < len(self._items):
            return None
        question = self._items.pop(index)
        self.on_change()
        return question

    def take_all(self) -> tuple[NewQuestion, ...]:
        """Remove all questions and return them."""
        taken = self.items
        if taken:
            self._items.clear()
            self.on_change()
        return taken
