"""The lines above the prompt: warnings and errors that stay until the next question."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from app.chat.state import Severity
from app.text_safety import one_line

_MOST_LINES = 3
"""Maximum number of lines shown. The oldest leave first."""

_MARKS: dict[Severity, str] = {"information": "·", "warning": "!", "error": "✗"}
"""What begins a line, so that it is not told by its colour alone."""


class NoticeLine(Static):
    """Warnings and errors, one a line. Not displayed while there is none."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, markup=False)
        self.display = False
        self._lines: list[tuple[str, str]] = []
        self._until_saved = False

    def tell(self, text: str, severity: Severity, *, beside: bool = False, until_saved: bool = False) -> None:
        """Show ``text``.

        ``beside``: it is added to the lines there instead of replacing them. ``until_saved``: :meth:`saved` hides it.
        """
        text = one_line(text)
        before = [line for line in self._lines if line[1] != text] if beside and self.display else []
        self._lines = [*before, (_MARKS[severity], text)][-_MOST_LINES:]
        self.update(Content("\n").join([Content.assemble((f"{mark} ", "bold"), line) for mark, line in self._lines]))
        self.set_class(severity == "error", "error")
        self._until_saved = until_saved
        self.display = True

    def saved(self) -> None:
        """Everything is on disk: hide what was shown while it was not."""
        if self._until_saved:
            self.hide()

    def hide(self) -> None:
        self._until_saved = False
        self.display = False
