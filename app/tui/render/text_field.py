"""A field for text of several lines."""

from __future__ import annotations

from textual.geometry import Offset
from textual.widgets import TextArea


class TextField(TextArea):
    """A TextArea in which an edit that made it scroll can be undone.

    Textual removes the lines before it moves the cursor. If a scrollbar goes meanwhile, Textual looks for the cursor
    where no line is left, and the program would end.
    """

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)
