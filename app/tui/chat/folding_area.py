"""A text field in which large pastes are folded to labels that are moved over, deleted and copied as a whole."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual import events
from textual.document._document import EditResult, Location
from textual.document._edit import Edit

from app.chat.folding import Folds
from app.tui.render.text_field import TextField

_LABEL = Style(italic=True, reverse=True)


class FoldingArea(TextField):
    """A field whose ``text`` has a label in the place of each large paste; ``whole_text`` has the pastes."""

    folds: Folds
    """The folded pastes of this draft."""

    @property
    def whole_text(self) -> str:
        return self.folds.expand(self.text)

    def edit(self, edit: Edit) -> EditResult:
        """Make ``edit``, which takes a label as a whole: it removes all of it, or comes after it."""
        (top_row, top), (bottom_row, bottom) = edit.top, edit.bottom
        first, last = self._label_around(edit.top), self._label_around(edit.bottom)
        if first is not None and edit.top == edit.bottom:
            top = bottom = first[1]
        else:
            top = first[0] if first is not None else top
            bottom = last[1] if last is not None else bottom
        if ((top_row, top), (bottom_row, bottom)) != (edit.top, edit.bottom):
            edit = Edit(edit.text, (top_row, top), (bottom_row, bottom), edit.maintain_selection_offset)
        return super().edit(edit)

    def paste(self, pasted: str) -> None:
        """Put ``pasted`` in the place of what is selected, folded if it is large."""
        result = self._replace_via_keyboard(self.folds.fold(pasted, self.text), *self.selection)
        if result is not None:
            self.move_cursor(result.end_location)
            self.focus()

    def unfold(self) -> bool:
        """Show the paste whose label the cursor is in or beside. Returns False if there is none."""
        row, column = self.cursor_location
        line = self.document.get_line(row)
        span = self.folds.around(line, column, touching=True)
        if span is None:
            return False
        start, end = span
        result = self.replace(
            self.folds.expand(line[start:end]), (row, start), (row, end), maintain_selection_offset=False
        )
        self.move_cursor(result.end_location)
        return True

    def get_line(self, line_index: int) -> Text:
        line = super().get_line(line_index)
        for start, end in self.folds.spans(line.plain):
            line.stylize(_LABEL, start, end)
        return line

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if not self.read_only:
            self.paste(event.text)

    def action_copy(self) -> None:
        if not self.selected_text:
            super().action_copy()
            return
        self.app.copy_to_clipboard(self.folds.expand(self._whole_selection()))

    def action_cut(self) -> None:
        if self.selection.is_empty:
            super().action_cut()
            return
        self.app.copy_to_clipboard(self.folds.expand(self._whole_selection()))
        self._delete_via_keyboard(*self.selection)

    def action_paste(self) -> None:
        if not self.read_only:
            self.paste(self.app.clipboard)

    def _whole_selection(self) -> str:
        """The selected text, with the whole of a label that is selected in part."""
        start, end = sorted(self.selection)
        return self.get_text_range(self._outside(start, 0), self._outside(end, 1))

    def _outside(self, location: Location, side: int) -> Location:
        span = self._label_around(location)
        return (location[0], span[side]) if span is not None else location

    def _label_around(self, location: Location) -> tuple[int, int] | None:
        row, column = location
        # Deleting the last line ends in the row after it, which does not exist.
        line = self.document.get_line(row) if row < self.document.line_count else ""
        return self.folds.around(line, column)
