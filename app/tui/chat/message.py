"""One message of the transcript, and the tail of the answer in progress."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.strip import Strip

from app.attachments.figures import texts_of
from app.chat.finding import about
from app.chat.state import Entry
from app.chat.thread import why_not
from app.tui.keymap import bound
from app.tui.render.attachments import attached
from app.tui.render.formatting import Stamp, fold, footing, heading, thoughts_line
from app.tui.render.highlighting import Highlighter
from app.tui.render.markdown import FENCE, fences, render_plain
from app.tui.render.rendered import Written
from app.tui.render.streaming import AnswerPart, GrowingText, Joint, joined
from app.tui.render.thumbnails import PictureBlock, Thumbnails
from app.tui.terminal.application import CopyRequested

_CURSOR = "▍"
FAST = 25.0
"""Tokens per second from which on the tail grows by :data:`STEP` lines at a time, as each growth lays out and draws the
whole screen."""
STEP = 6
"""Lines that the tail of a fast answer grows by. Those not yet written are empty."""


HIT = "underline $text-warning on $warning-muted"
CURRENT_HIT = "bold reverse $text-warning"
"""Style of the hit that is looked at. It differs from the others by its shape, too."""
LIVE_THOUGHTS = 4_000
"""Maximum characters of thoughts that are shown while the model is thinking, as each piece draws all of them."""


class MessageView(Written, can_focus=True):
    """A message: its speaker, its text, its state. Of a message in progress, the finished blocks."""

    HELP = (
        "A message of the conversation. `up` and `down` go to the previous and the next message, `g` and `G` to the "
        "first and the last, `{` and `}` to the previous and the next question; `u` and `d` scroll. `c` copies the "
        "message, `b` its next code block. `t` opens and folds what the model thought before its answer (while it is "
        "open, `c` copies it too), or the files attached to a question and a long question itself. `e` edits the "
        "message; the old text stays as an alternative. `r` regenerates the answer, and `m` lets the model go on from "
        "its end. `left` and `right` switch between alternatives. `x` deletes the message and what follows it, `X` "
        "its alternatives too; `z` brings back what was deleted. `/` finds a text in the chat. `esc` returns to the "
        "prompt."
    )
    # The words are short, as all of them stand in one line; their tooltips say more.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,left_square_bracket", "act('previous')", "Version", key_display="← →",
                tooltip="Previous version", id="message.previous"),
        Binding("right,right_square_bracket", "act('next')", "Next version", show=False, id="message.next"),
        Binding("c", "act('copy')", "Copy", id="message.copy"),
        Binding("b", "act('code')", "Code", tooltip="Copy code", id="message.copy_code"),
        Binding("t", "thoughts", "Thoughts", id="message.thoughts"),
        Binding("t", "files", "Unfold", id="message.files"),
        Binding("e", "act('edit')", "Edit", id="message.edit"),
        Binding("r", "act('again')", "Again", tooltip="Regenerate", id="message.again"),
        Binding("m", "act('continue')", "More", tooltip="Continue", id="message.continue"),
        Binding("x,delete", "act('delete')", "Delete", key_display="x", id="message.delete"),
        Binding("slash", "act('find')", "Find", key_display="/", id="message.find"),
        Binding("g,home", "edge(False)", "Go", key_display="g G u d", tooltip="First message", id="message.first"),
        Binding("G,end", "edge(True)", "Last message", show=False, id="message.last"),
        Binding(bound("page_up"), "screen.scroll(-1)", "Page up", show=False, id="message.page_up"),
        Binding(bound("page_down"), "screen.scroll(1)", "Page down", show=False, id="message.page_down"),
        Binding("up,k", "neighbour(-1)", "Message above", show=False, id="message.up"),
        Binding("down,j", "neighbour(1)", "Message below", show=False, id="message.down"),
        Binding("left_curly_bracket", "question(-1)", "Previous question", show=False, id="message.question_before"),
        Binding("right_curly_bracket", "question(1)", "Next question", show=False, id="message.question_after"),
        Binding("X", "act('delete_all')", "Delete all versions", show=False, id="message.delete_all"),
        Binding("z", "act('undo')", "Undo deletion", show=False, id="message.undo"),
        Binding("escape,i", "act('leave')", "Back", id="message.leave"),
    ]  # fmt: skip

    class Asked(Message):
        """The person asked for ``what`` to be done with ``entry``."""

        def __init__(self, entry: Entry, what: str) -> None:
            super().__init__()
            self.entry = entry
            self.what = what

    class Edge(Message):
        """The person goes to the ``last`` message of the conversation, or to the first."""

        def __init__(self, last: bool) -> None:
            super().__init__()
            self.last = last

    class Question(Message):
        """The person goes from ``view`` to the next question (``offset`` 1) or the previous one (-1)."""

        def __init__(self, view: MessageView, offset: int) -> None:
            super().__init__()
            self.view = view
            self.offset = offset

    class Neighbour(Message):
        def __init__(self, view: MessageView, offset: int) -> None:
            super().__init__()
            self.view = view
            self.offset = offset

    def __init__(
        self, entry: Entry, highlighter: Highlighter, thumbnails: Thumbnails, thoughts_open: bool = False
    ) -> None:
        super().__init__(highlighter, classes=f"message {entry.role}")
        self.entry = entry
        self._thumbnails = thumbnails
        self._pictures: tuple[int, int, PictureBlock] | None = None
        """The width for which pictures were placed, the line where they begin, and them."""
        self._parts: list[AnswerPart] | None = None
        self._thoughts_open = thoughts_open
        self._open = False
        """Whether files and a long question are shown whole."""
        self._stamp: Stamp | None = None
        self._unmarked = Content()
        self._body = 0, 0
        """The part of the content that is the message's text."""
        self._left_out = 0, 0
        """The line in it that stands for what is folded."""
        self._marks: tuple[re.Pattern[str] | None, int | None] = None, None

    @property
    def thoughts_open(self) -> bool:
        """Whether the model's thoughts are shown."""
        return self._thoughts_open and bool(self.entry.thoughts.text)

    def open_thoughts(self, wanted: bool) -> None:
        """Show the model's thoughts, or fold them."""
        if wanted != self._thoughts_open:
            self._thoughts_open = wanted
            self.remake()

    def stamped(self, stamp: Stamp | None) -> None:
        """Show when the message was written, or do not."""
        if stamp != self._stamp:
            self._stamp = stamp
            self.remake()

    def _day(self, width: int) -> list[Content]:
        """The line where a new day begins."""
        if self._stamp is None or not self._stamp.day:
            return []
        day = f"── {self._stamp.day} "
        return [Content.styled(day.ljust(width, "─")[:width], "$foreground-muted")]

    def make(self, width: int) -> Content:
        self._unmarked = super().make(width)
        return self._with_marks(self._unmarked)

    def written(self, width: int) -> Content:
        parts = [*self._day(width), heading(self.entry, self._stamp.time if self._stamp else ""), *self._thoughts()]
        self._body = self._left_out = 0, 0
        if self._parts is not None:
            body = joined(self._parts, lambda source: self.markdown(source, width))
            return Content("\n").join([*parts, body] if self._parts else parts)
        if self.entry.content:
            start = sum(len(part) + 1 for part in parts)
            body = self._question(start) if self.entry.role == "user" else self._answer(width)
            self._body = start, start + len(body)
            parts.append(body)
        parts += attached(self.entry.attachments, self._open)
        block = self._thumbnails.block(self.entry.attachments, width, self)
        self._pictures = None
        if block is not None:
            self._pictures = width, Content("\n").join(parts).get_height({}, width), block
            parts += [Content(" ")] * block.rows
        foot = footing(self.entry)
        if foot is not None:
            parts.append(foot)
        return Content("\n").join(parts)

    def render_line(self, y: int) -> Strip:
        line = super().render_line(y)
        if self._pictures is None:
            return line
        width, first, block = self._pictures
        shown = width == self.size.width and first <= y < first + block.rows
        return block.over(y - first, line) if shown else line

    def _answer(self, width: int) -> Content:
        return self.markdown(self.entry.content, width, marked=self.entry.state != "writing")

    def _question(self, start: int) -> Content:
        """The question from the character ``start`` on. Only the ends of a long one are laid out."""
        text = self.entry.content
        folded = fold(text)
        if folded is None:
            return render_plain(text)
        line = folded.line(self._open)
        if self._open:
            self._left_out = start, start + len(line)
            return Content("\n").join([line, render_plain(text)])
        beginning, end = render_plain(folded.beginning), render_plain(folded.end)
        self._left_out = start + len(beginning) + 1, start + len(beginning) + 1 + len(line)
        return Content("\n").join([beginning, line, end])

    # --- what is found in it --------------------------------------------------------------------------------------

    def mark(self, pattern: re.Pattern[str] | None, current: int | None = None) -> None:
        """Highlight what ``pattern`` finds, the hit ``current`` more than the others."""
        if (pattern, current) == self._marks:
            return
        self._marks = pattern, current
        if self._made is not None:
            self._made = self._made[0], self._with_marks(self._unmarked)
            self.refresh()

    def count(self, pattern: re.Pattern[str]) -> int:
        """The number of hits in the text as it is drawn. A long question is opened if it has more."""
        self._content(self.size.width)
        found = len(self._found(pattern))
        if self._left_out[1] and not self._open and found < about(self.entry, pattern):
            self.action_files()
            found = len(self._found(pattern))
        return found

    def line_of(self, hit: int) -> int:
        """The line of the message, from 0, in which the hit of :meth:`mark` with this index ends."""
        content = self._content(self.size.width)
        found = self._found(self._marks[0]) if self._marks[0] is not None else []
        if hit >= len(found):
            return 0
        return content[: found[hit][1]].get_height({}, self.size.width) - 1

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
        start, end = self._body
        spans = (match.span() for match in pattern.finditer(self._unmarked.plain, start, end))
        return [(start, end) for start, end in spans if end <= self._left_out[0] or start >= self._left_out[1]]

    def _with_marks(self, content: Content) -> Content:
        pattern, current = self._marks
        for index, (start, end) in enumerate(self._found(pattern) if pattern is not None else []):
            content = content.stylize(CURRENT_HIT if index == current else HIT, start, end)
        return content

    def _thoughts(self) -> list[Content]:
        thoughts, live = self.entry.thoughts, self._parts is not None and not self.entry.content
        if not thoughts.text:
            return []
        line = thoughts_line(thoughts, self._thoughts_open, live)
        if not self._thoughts_open:
            return [line]
        text = thoughts.text
        if live and len(text) > LIVE_THOUGHTS:
            end = text[-LIVE_THOUGHTS:]
            text = "…" + (end.partition("\n")[2] or end)
        return [line, Content.styled(text, "italic $foreground-muted")]

    def changed(self) -> None:
        """The entry is complete, or changed in another way."""
        self._parts = None
        self.remove_class("-begun")
        self.remake()

    def growing(self, text: GrowingText) -> None:
        """Show the finished parts of an answer in progress. The rest is in the tail below."""
        self._parts = list(text.frozen)
        self.set_class(not text.frozen or text.tail.joint is not Joint.BLOCK, "-begun")
        self.remake()

    def on_click(self, event: events.Click) -> None:
        """Copy the code whose mark was clicked. A selection that ends at a mark is none."""
        number = event.style.meta.get(FENCE)
        if number is not None and not self.screen.selections:
            codes = fences(self.entry.content)
            what = f"Block {number + 1} of {len(codes)}" if len(codes) > 1 else "The code"
            self.post_message(CopyRequested(codes[number], what))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "act" and parameters:
            match parameters[0]:
                case "continue":
                    return not why_not(self.entry)
                case "code":
                    return "```" in self.entry.content or "~~~" in self.entry.content
                case "previous" | "next":
                    return self.entry.siblings > 1
        if action == "files":
            asked = self.entry.role == "user" and fold(self.entry.content) is not None
            return asked or bool(texts_of(self.entry.attachments))
        return bool(self.entry.thoughts.text) if action == "thoughts" else True

    def why_not(self, action: str, parameters: tuple[object, ...]) -> str:
        """Why a key does nothing with this message."""
        match action, parameters:
            case "act", ("continue",):
                return why_not(self.entry)
            case "act", ("code",):
                return "This message has no code block."
            case "act", ("previous" | "next",):
                return "This message has no other versions."
            case "thoughts" | "files", _ if self.entry.role == "user":
                return "This question has no files, and it is shown whole."
            case "thoughts" | "files", _:
                return "This answer has no thoughts."
        return ""

    def action_neighbour(self, offset: int) -> None:
        self.post_message(self.Neighbour(self, offset))

    def action_edge(self, last: bool) -> None:
        self.post_message(self.Edge(last))

    def action_question(self, offset: int) -> None:
        self.post_message(self.Question(self, offset))

    def action_thoughts(self) -> None:
        self.open_thoughts(not self._thoughts_open)
        self.action_act("thoughts")

    def action_files(self) -> None:
        """Show the texts of the attached files and the whole of a long question, or fold them."""
        self._open = not self._open
        self.remake()

    def action_act(self, what: str) -> None:
        self.post_message(self.Asked(self.entry, what))


class LiveTail(Written):
    """The end of the answer in progress: the part that changes with every piece of text."""

    def __init__(self, highlighter: Highlighter) -> None:
        super().__init__(highlighter, classes="tail")
        self.growing = GrowingText()
        self._note = ""
        self._step = 1

    def begin(self) -> None:
        self.growing = GrowingText()
        self._note = ""
        self._step = 1

    def show(self, entry: Entry) -> bool:
        """Draw the current text of ``entry``. Returns True if the finished blocks changed."""
        self._step = STEP if entry.tokens_per_s >= FAST else 1
        before = list(self.growing.frozen)
        self.growing.update(entry.content)
        self._note = "" if entry.content or entry.thoughts.text else entry.note
        self.remake()
        return self.growing.frozen != before

    def height_of(self, content: Content, width: int) -> int:
        lines = super().height_of(content, width)
        return -(-lines // self._step) * self._step

    def written(self, width: int) -> Content:
        if self._note:
            return Content.styled(self._note, "$text-warning italic")
        tail = AnswerPart(self.growing.tail.source.rstrip(), self.growing.tail.joint)
        cursor = Content.styled(_CURSOR, "$text-accent")
        return joined([tail], lambda source: self.markdown(source, width)) + cursor if tail.source else cursor
