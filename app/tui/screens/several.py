"""Several answers to one question side by side, while they are written and afterwards, of which one is picked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from app.chat.answering import ChatTurn
from app.chat.controller import ChatController
from app.chat.state import Entry, EntryChanged, Update
from app.chat.words import rate
from app.text_safety import one_line
from app.tui.keymap import bound
from app.tui.render.formatting import footing, thoughts_line
from app.tui.render.highlighting import Highlighter
from app.tui.render.key_footer import KeyFooter
from app.tui.render.rendered import Written
from app.tui.render.streaming import GrowingText, PacedDrawing, joined
from app.tui.screens.updates import is_open

NARROWEST = 38
"""Cells that an answer needs beside others."""
UPDATE_S, SLOWEST_S = 0.15, 1.0
"""Seconds between two drawings of the answers, at least and at most."""


def columns_shown(count: int, chosen: int, first: int, width: int) -> range:
    """The answers of ``count`` that fit side by side into ``width`` cells: ``chosen`` and its neighbours.

    ``first``: the first one that was shown before, which stays if it can. At least one is shown.
    """
    fit = min(count, max(1, width // NARROWEST))
    first = min(max(first, chosen - fit + 1), chosen, count - fit)
    return range(first, first + fit)


class AnswerText(Written):
    """One of the answers. Of one in progress, the finished parts are rendered once for each width."""

    def __init__(self, number: int, answer: Entry, temperature: float, highlighter: Highlighter) -> None:
        super().__init__(highlighter)
        self.answer = answer
        self._number = number
        self._temperature = temperature
        self._growing = GrowingText()
        self._parts: dict[tuple[int, str], Content] = {}

    def written(self, width: int) -> Content:
        answer, live = self.answer, self.answer.state == "writing"
        figures = [f"temperature {self._temperature:g}"]
        if answer.tokens:
            figures += [f"{answer.tokens:,} token{'' if answer.tokens == 1 else 's'}", rate(answer.tokens_per_s)]
        about = " · ".join(filter(None, figures))
        parts = [Content.assemble((f"{self._number}", "bold $text-secondary"), (f"  {about}", "$foreground-muted"))]
        if answer.thoughts.text:
            parts.append(thoughts_line(answer.thoughts, False, live and not answer.content))
        if live:
            parts.append(self._tail(width))
        elif answer.content:
            self._parts.clear()
            parts.append(self.markdown(answer.content, width))
        foot = footing(answer)
        return Content("\n").join(parts if foot is None else [*parts, foot])

    def _tail(self, width: int) -> Content:
        self._growing.update(self.answer.content)
        frozen = {part.source for part in self._growing.frozen}

        def render(source: str) -> Content:
            if source not in frozen:
                return self.markdown(source, width)
            if (width, source) not in self._parts:
                self._parts[width, source] = self.markdown(source, width)
            return self._parts[width, source]

        tail = [self._growing.tail] if self._growing.tail.source else []
        return joined([*self._growing.frozen, *tail], render) + Content.styled("▍", "$text-accent")


class AnswerColumn(VerticalScroll):
    """An answer that scrolls by itself, and follows its end until the reader scrolled up."""

    def __init__(self, text: AnswerText) -> None:
        super().__init__(classes="answer")
        self.text = text
        self._changed = True

    def compose(self) -> Iterable[AnswerText]:
        yield self.text

    def change(self) -> None:
        """The answer changed."""
        self._changed = True

    def draw(self) -> None:
        """Draw the answer if it changed."""
        if not self._changed or not self.display:
            return
        self._changed = False
        follows = self.scroll_offset.y >= self.max_scroll_y
        self.text.remake()
        if follows:
            self.call_after_refresh(self.scroll_end, animate=False)


class SeveralScreen(Screen[int | None]):
    """The answers of ``turn``. The result is the index of the one that was picked."""

    HELP = (
        "Several answers to one question, at rising temperatures. They are written at the same time, which takes "
        "little more than one. `left` and `right` choose one, or its number does; `up` and `down` scroll it. `enter` "
        "goes on with it; the others stay as its alternatives, which `left` and `right` show in the messages. `x` "
        "stops all of them and keeps their text. `esc` leaves them as they are; /n shows them again."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "pick", "Go on with it", id="several.pick", priority=True),
        Binding("right,l", "choose(1)", "Choose", key_display="← →", id="several.next", priority=True),
        Binding("left,h", "choose(-1)", "Answer before", show=False, id="several.before", priority=True),
        *(
            Binding(str(number), f"take({number - 1})", f"Answer {number}", show=False, id=f"several.take_{number}")
            for number in range(1, 9)
        ),
        Binding("x", "stop", "Stop all", id="several.stop"),
        Binding("escape", "dismiss(None)", "Back", id="several.close"),
        Binding(bound("help"), "app.help", "Help", id="several.help"),
    ]

    def __init__(self, controller: ChatController, turn: ChatTurn, highlighter: Highlighter) -> None:
        super().__init__()
        self._controller = controller
        self._turn = turn
        pairs = zip(turn.answers, turn.temperatures, strict=True)
        self._columns = [
            AnswerColumn(AnswerText(number, answer, temperature, highlighter))
            for number, (answer, temperature) in enumerate(pairs, start=1)
        ]
        self._chosen = next(index for index, answer in enumerate(turn.answers) if answer is turn.shown)
        self._shown = range(0)
        self._drawing = PacedDrawing(self, self._draw, UPDATE_S, SLOWEST_S)

    def compose(self) -> ComposeResult:
        yield Static(classes="screen-title", markup=False)
        with Horizontal(id="several"):
            yield from self._columns
        yield KeyFooter()

    def on_mount(self) -> None:
        self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def _arrange(self) -> None:
        """Show the chosen answer, with as many others as fit."""
        self._shown = columns_shown(len(self._columns), self._chosen, self._shown.start, self.size.width)
        for index, column in enumerate(self._columns):
            column.display = index in self._shown
            column.can_focus = index == self._chosen
            column.set_class(index == self._chosen, "-chosen")
        some = "" if len(self._shown) == len(self._columns) else f" · {self._chosen + 1} of {len(self._columns)}"
        question = one_line(self._turn.path[-1].content)
        title = f"{len(self._columns)} answers{some}: {question}"
        self.query_one(".screen-title", Static).update(
            Content(title).truncate(max(1, self.size.width - 4), ellipsis=True)
        )
        self._columns[self._chosen].focus()
        self._draw()

    def handle_update(self, update: Update) -> None:
        if not isinstance(update, EntryChanged) or not is_open(self):
            return
        for column in self._columns:
            if column.text.answer is update.entry:
                column.change()
        if update.live:
            self._drawing.want()
        else:
            self._draw()

    def _draw(self) -> None:
        self._drawing.drawn()
        for column in self._columns:
            column.draw()

    def action_choose(self, offset: int) -> None:
        self.action_take((self._chosen + offset) % len(self._columns))

    def action_take(self, index: int) -> None:
        if index < len(self._columns):
            self._chosen = index
            self._arrange()

    def action_pick(self) -> None:
        self.dismiss(self._chosen)

    def action_stop(self) -> None:
        self._controller.answers.stop(self._turn.thread)
