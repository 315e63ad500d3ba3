"""A field for text of several lines."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Offset
from textual.widgets import TextArea


class TextField(TextArea):
    """A TextArea that leaves ctrl+z to the program, which is suspended by it as others in a terminal are, and in which
    alt+d deletes a word as in a shell.

    An edit that made it scroll can be undone:

    Textual removes the lines before it moves the cursor. If a scrollbar goes meanwhile, Textual looks for the cursor
    where no line is left, and the program would end.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("alt+z", "undo_typing", "Undo typing", show=False, id="field.undo"),
        Binding("ctrl+y,alt+shift+z", "redo", "Redo typing", show=False, id="field.redo"),
        Binding("alt+d,alt+delete", "delete_word_right", "Delete the word", show=False, id="field.delete_word"),
    ]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self._bindings.key_to_bindings["ctrl+z"]

    def action_undo_typing(self) -> None:
        self.undo()

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)
