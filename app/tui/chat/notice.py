"""The lines above the prompt: warnings and errors that stay until the next question."""

from __future__ import annotations

from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from app.chat.state import Severity
from app.text_safety import one_line

WHISPER_S = 4
"""Seconds that a line is shown about a key that does nothing."""
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
        self._whispered = ""
        self._timer: Timer | None = None
        self._until_saved = False

    def tell(self, text: str, severity: Severity, *, beside: bool = False, until_saved: bool = False) -> None:
        """Show ``text``.

        ``beside``: it is added to the lines there instead of replacing them. ``until_saved``: :meth:`saved` hides it.
        """
        text = one_line(text)
        before = [line for line in self._lines if line[1] != text] if beside and self.display else []
        self._lines = [*before, (_MARKS[severity], text)][-_MOST_LINES:]
        self.set_class(severity == "error", "error")
        self._until_saved = until_saved
        self._draw()

    def whisper(self, text: str) -> None:
        """Show one muted line below the others for some seconds."""
        self._whispered = one_line(text)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(WHISPER_S, self._end_whisper)
        if not self.display:
            self._lines = []
            self.remove_class("error")
        self._draw()

    def _end_whisper(self) -> None:
        self._whispered = ""
        if self._lines:
            self._draw()
        else:
            self.display = False

    def _draw(self) -> None:
        lines = [Content.assemble((f"{mark} ", "bold"), line) for mark, line in self._lines]
        if self._whispered:
            lines.append(Content.styled(self._whispered, "$foreground-muted"))
        self.update(Content("\n").join(lines))
        self.display = True

    def saved(self) -> None:
        """Everything is on disk: hide what was shown while it was not."""
        if self._until_saved:
            self.hide()

    def hide(self) -> None:
        self._until_saved = False
        self._lines = []
        self.display = False
