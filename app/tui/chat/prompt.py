"""The prompt: the field where the person types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.binding import Binding, BindingType
from textual.document._document import EditResult, Location
from textual.document._edit import Edit
from textual.message import Message
from textual.widgets import TextArea

from app.attachments.references import pasted_pictures
from app.chat.drafts import QuestionHistory
from app.conversations.drafts import Draft
from app.tui.chat.completion import Completer, Completion, CompletionPopup, FileReferences
from app.tui.keymap import bound
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
        """Put ``pasted`` in the place of what is selected, folded if it is large. The path of a picture becomes a
        reference to it."""
        text = pasted_pictures(pasted) or self.folds.fold(pasted, self.text)
        result = self._replace_via_keyboard(text, *self.selection)
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


class Prompt(FoldingArea):
    """A field for several lines. Enter sends them; enter with a modifier breaks the line.

    Not every terminal tells a modified enter from enter: ctrl+j works in all of them.
    """

    HELP = (
        "Type a question and press {send} to send it. {newline} starts a new line. Pasted text keeps its lines; "
        "a long paste is folded to a label and sent whole, and `tab` beside the label shows it. `@` and a file, a "
        "folder or a pattern attaches text files; a picture is attached in the same way, or by pasting its path. "
        "`up` recalls earlier questions that begin with what is typed. "
        "{editor} opens the draft in your own editor. `alt+z` undoes what was typed, `alt+shift+z` does it again; "
        "`ctrl+z` goes back to the shell, and `fg` there continues. "
        "{messages} goes to the messages. `/help` lists the commands."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", show=False, id="prompt.send"),
        Binding("tab", "complete", "Complete", id="prompt.complete"),
        Binding("tab", "unfold", "Show the paste", show=False, id="prompt.unfold"),
        Binding(bound("newline"), "break_line", "New line", show=False, id="prompt.newline"),
        Binding(bound("editor"), "cut_or_edit", "Editor", show=False, id="prompt.editor"),
        Binding(bound("messages"), "leave_up", "Messages", show=False, id="prompt.messages"),
        Binding("escape", "close_completions", "Close", id="prompt.close_completions"),
    ]

    class LeftUpwards(Message):
        """The person goes to the messages above."""

    class EditorWanted(Message):
        """The person wants to write the draft in their own editor."""

    class Scrolled(Message):
        """The person scrolls the transcript by ``pages``."""

        def __init__(self, pages: int) -> None:
            super().__init__()
            self.pages = pages

    def __init__(self, id: str) -> None:
        super().__init__(id=id, soft_wrap=True, compact=True, highlight_cursor_line=False, tab_behavior="focus")
        self.folds = Folds()
        self.earlier = QuestionHistory()
        self._folded: dict[str, str] = {}
        self.leave_upwards_first: Callable[[], bool] = lambda: False
        """Called for ``up`` in an empty field, before an earlier question is recalled. Returns True if it went
        somewhere else."""
        self.send: Callable[[str, str], None] = lambda text, draft: None
        """Called with what the person sends, and with the same with its large pastes folded. It empties the field, or
        leaves the text there.

        A message would reach the screen only after keys that were typed just behind enter, which would then stand
        behind the text that is being sent.
        """
        self.completer = Completer()
        self.popup: CompletionPopup | None = None
        """The list that shows candidates. Without it nothing is completed."""

    @property
    def draft(self) -> Draft:
        """The field's content, with its folded pastes."""
        return Draft(self.text, self.folds.used(self.text))

    def restore(self, draft: Draft) -> None:
        """Put ``draft`` into the field in place of what is there."""
        self.folds.restore(draft.pastes)
        self.earlier.leave()
        self.fill(draft.text)

    def put_before(self, texts: Sequence[str]) -> None:
        """Put ``texts`` before what is in the field, as paragraphs."""
        self.fill(self.joined(texts, self.text).text)

    def joined(self, texts: Sequence[str], draft: str) -> Draft:
        """``texts``, with their large pastes folded again, and ``draft``, as paragraphs of one draft."""
        parts = [*map(self._with_labels, texts), draft]
        text = "\n\n".join(part for part in parts if part.strip())
        return Draft(text, self.folds.used(text))

    def _with_labels(self, text: str) -> str:
        """``text`` with its large pastes folded as they were when it was sent, if the labels still stand for them."""
        folded = self._folded.get(text, text)
        return folded if self.folds.expand(folded).strip("\n") == text else text

    def fill(self, text: str) -> None:
        """Put ``text`` into the field, with the cursor after it."""
        self.text = text
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        # TextArea takes enter as a character before it looks at bindings, and other bindings would take effect
        # only after the characters that were typed just behind them: the library offers a key to all widgets around
        # the field first.
        at = None if event.is_printable else self.screen.active_bindings.get(event.key)
        # An action may leave its key to others: ctrl+c copies only where something is selected.
        if at and at.node is self and at.enabled and await self.app.run_action(at.binding.action, self):
            event.stop()
            event.prevent_default()
            return
        await super()._on_key(event)

    # --- completion -----------------------------------------------------------------------------------------------

    @property
    def completion(self) -> Completion | None:
        """The completion at the cursor, or None."""
        if self.popup is None or not self.selection.is_empty:
            return None
        start, cursor, end = self.document.start, self.cursor_location, self.document.end
        return self.completer.at(self.get_text_range(start, cursor), self.get_text_range(cursor, end))

    def show_completions(self) -> None:
        """Bring the popup up to date."""
        if self.popup is None:
            return
        completion = self.completion if self.has_focus else None
        opened = completion is not None
        if opened != self.popup.display:
            self.call_next(self.refresh_bindings)
        self.popup.show(completion, self.completer.marked)

    def file_references(self) -> FileReferences:
        """The source of completions for ``@file``."""

        def listed() -> None:
            self.completer.forget()
            self.show_completions()

        return FileReferences(lambda work: self.run_worker(work, group="files", exit_on_error=True), listed)

    @on(TextArea.Changed)
    @on(TextArea.SelectionChanged)
    def _text_or_cursor_moved(self) -> None:
        self.show_completions()

    def on_blur(self) -> None:
        self.show_completions()

    def on_focus(self) -> None:
        self.show_completions()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("complete", "close_completions"):
            return self.completion is not None
        return super().check_action(action, parameters)

    def action_complete(self) -> None:
        """Put the marked candidate into the text."""
        self._take(self.completer.marked or 0)

    def action_close_completions(self) -> None:
        self.completer.close()
        self.show_completions()

    def pick(self, index: int) -> None:
        """Do with the candidate ``index`` what enter does."""
        self.completer.mark(index)
        self.action_send()

    def _take(self, index: int) -> bool:
        """Put the candidate ``index`` into the text. Does enter send it?"""
        completion = self.completion
        if completion is None:
            return False
        candidate = completion.candidates[index]
        lines = self.text[: completion.start].split("\n")
        start = (len(lines) - 1, len(lines[-1]))
        self._replace_via_keyboard(candidate.replacement, start, self.cursor_location)
        return candidate.sends

    def _move_mark(self, offset: int) -> bool:
        if self.completion is None:
            return False
        self.completer.move(offset)
        self.show_completions()
        return True

    # --- sending --------------------------------------------------------------------------------------------------

    def action_send(self) -> None:
        if self.completion is not None and self.completer.marked is not None:
            if not self._take(self.completer.marked):
                return
            self.text = self.text.rstrip()
        text = self.whole_text.strip("\n")
        if not text.strip():
            return
        if text != self.text:
            self._folded[text] = self.text
        self.send(text, self.text)

    def sent(self, text: str) -> None:
        """``text`` was accepted: empty the field and remember the text."""
        self.earlier.sent(text)
        self.done()

    def done(self) -> None:
        """Empty the field after its content was used, so that nothing is left to undo."""
        self.clear()
        self.history.clear()

    def action_break_line(self) -> None:
        self._replace_via_keyboard("\n", *self.selection)

    def action_unfold(self) -> None:
        """Show the folded paste at the cursor; without one, go to the next widget."""
        if not self.unfold():
            self.screen.focus_next()

    def action_cut_or_edit(self) -> None:
        """Cut what is selected; with nothing selected, open the editor."""
        if self.selection.is_empty:
            self.post_message(self.EditorWanted())
        else:
            self.action_cut()

    def put_edited(self, text: str) -> None:
        """Replace what is in the field by ``text``. Large pastes that were not changed are folded again."""
        for label, paste in self.folds.used(self.text).items():
            text = text.replace(paste, label, 1)
        self.fill(text)

    def action_leave_up(self) -> None:
        self.post_message(self.LeftUpwards())

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and not self.text and self.leave_upwards_first():
            return
        if not select and (self._move_mark(-1) or self._recall_earlier()):
            return
        super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and (self._move_mark(1) or self._recall_later()):
            return
        super().action_cursor_down(select)

    def action_cursor_page_up(self) -> None:
        self.post_message(self.Scrolled(-1))

    def action_cursor_page_down(self) -> None:
        self.post_message(self.Scrolled(1))

    def _recalled(self) -> bool:
        """Whether the field contains an earlier question, unchanged."""
        recalled = self.earlier.recalled
        return recalled is not None and self.text == self._with_labels(recalled)

    def _recall_earlier(self) -> bool:
        """Replace what is typed by an earlier question that begins with it. Returns False if the cursor is to move.

        What is typed must be on one line with the cursor at its end, because up moves the cursor otherwise.
        """
        if self.cursor_location != self.document.end:
            return False
        if not self._recalled():
            if self.wrapped_document.height > 1:
                return False
            self.earlier.leave()
        question = self.earlier.back(self.text)
        if question is None:
            # At the oldest question the cursor stays.
            return self.earlier.recalled is not None or not self.text
        self.fill(self._with_labels(question))
        return True

    def _recall_later(self) -> bool:
        if not self._recalled() or self.cursor_location != self.document.end:
            return False
        question = self.earlier.forward()
        self.fill(self._with_labels(question))
        return True


# --- labels of large pastes ------------------------------------------------------------------------------------------


LINES = 10
"""Maximum lines of a paste that is shown as it is. No more of them fit in the prompt."""
CHARACTERS = 2000
"""Maximum characters of a paste that is shown as it is."""


class Folds:
    """The folded pastes of a draft, by their labels (``[Pasted 214 lines]``), which stand in its text.

    Labels are not forgotten when they are deleted, so that an undone deletion brings the paste back.
    """

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts: dict[str, str] = {}
        self._pattern = re.compile("(?!)")
        self._know(texts or {})

    def fold(self, pasted: str, draft: str = "") -> str:
        """A new label for ``pasted``, or ``pasted`` itself if it is short. The label is not part of ``draft`` yet."""
        lines = pasted.count("\n") + (not pasted.endswith("\n"))
        if lines <= LINES and len(pasted) <= CHARACTERS:
            return pasted
        what = f"{lines:,} lines" if lines > LINES else f"{len(pasted):,} characters"
        label, number = f"[Pasted {what}]", 1
        while self._texts.get(label, pasted) != pasted or (label not in self._texts and label in draft):
            number += 1
            label = f"[Pasted {what}, {number}]"
        self._know({label: pasted})
        return label

    def expand(self, draft: str) -> str:
        """``draft`` with every label replaced by its paste."""
        return self._pattern.sub(lambda found: self._texts[found.group()], draft)

    def used(self, draft: str) -> dict[str, str]:
        """The pastes whose labels stand in ``draft``, by their labels."""
        return {label: self._texts[label] for label in self._pattern.findall(draft)}

    def restore(self, texts: Mapping[str, str]) -> None:
        """Know the pastes of a draft that was kept, besides those known already."""
        self._know(texts)

    def spans(self, line: str) -> Iterator[tuple[int, int]]:
        """Start and end of each label in ``line``."""
        return (found.span() for found in self._pattern.finditer(line))

    def around(self, line: str, column: int, *, touching: bool = False) -> tuple[int, int] | None:
        """Start and end of the label that ``column`` is inside of, or ``touching``; None if there is none."""
        reach = 1 if touching else 0
        spans = self.spans(line)
        return next(((start, end) for start, end in spans if start - reach < column < end + reach), None)

    def _know(self, texts: Mapping[str, str]) -> None:
        if not texts:
            return
        self._texts.update(texts)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._texts, key=len, reverse=True))))
