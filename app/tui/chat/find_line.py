"""The line in which the person finds a text in the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Static

from app.chat.finding import Hits, about, pattern_of
from app.tui.chat.message import MessageView
from app.tui.chat.reading_place import Place
from app.tui.chat.transcript import Transcript


class FindLine(Horizontal):
    """Stands in the prompt's place while the person looks for a text. The hits are found while they type."""

    HELP = (
        "Type the text to find in this chat. `enter` or `down` goes to the next hit, `up` to the previous one. `tab` "
        "stays at the message of the hit. `esc` returns to where you were."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,down", "step(1)", "Next", show=False, id="find.next"),
        Binding("up", "step(-1)", "Previous", show=False, id="find.previous"),
        Binding("tab", "stay", "Stay here", show=False, id="find.stay"),
        Binding("escape", "leave", "Back", show=False, id="find.leave"),
    ]

    class Closed(Message):
        """The line was closed. ``view``: the message to look at; None: the reader is where they were."""

        def __init__(self, view: MessageView | None = None) -> None:
            super().__init__()
            self.view = view

    def __init__(self, transcript: Transcript, id: str) -> None:
        super().__init__(id=id)
        self.display = False
        self.border_title = "Find in this chat"
        self.border_subtitle = "⏎ next · ↑ previous · esc back · tab stay"
        self._transcript = transcript
        self._hits = Hits()
        self._begun_at: Place | None = None
        self._wanted = 0
        self._going = asyncio.Lock()

    def compose(self) -> Iterable[Widget]:
        yield Input(id="find-text", select_on_focus=False)
        yield Static(id="find-count", markup=False)

    @property
    def field(self) -> Input:
        return self.query_one(Input)

    def open(self, text: str = "") -> None:
        """Look for ``text``, or for what was looked for last."""
        if not self.display:
            self.display = True
            self._begun_at = self._transcript.place
        if text:
            with self.prevent(Input.Changed):
                self.field.value = text
        self.field.focus()
        self.field.cursor_position = len(self.field.value)
        self._search()

    def close(self) -> None:
        """Close the line wherever the reader is: another conversation is shown."""
        if self.display:
            self._end()
            self.post_message(self.Closed())

    def look_again(self) -> None:
        """Messages came or changed: the hits are counted again, and the reader stays."""
        if self.display:
            place = self._hits.place
            self._count()
            self._hits.place = place
            if place is None or not self._hits.total:
                self._hits.begin(*self._transcript.in_sight)
            self._go(1, scroll=False)

    def _count(self) -> None:
        pattern = pattern_of(self.field.value)
        path = self._transcript.path
        self._hits = Hits([about(entry, pattern) for entry in path] if pattern is not None else [])

    @on(Input.Changed)
    def _search(self) -> None:
        self._count()
        self._hits.begin(*self._transcript.in_sight)
        self._go(1)

    @on(Input.Submitted)
    def _next(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_step(1)

    def action_step(self, offset: int) -> None:
        self._hits.step(offset)
        self._go(offset)

    @work(group="find")
    async def _go(self, offset: int, scroll: bool = True) -> None:
        """Show the hit that is looked at. A message that has none when it is drawn is passed by."""
        # Not cancelled by the next one: it may be in the middle of mounting messages.
        self._wanted += 1
        wanted = self._wanted
        async with self._going:
            if wanted == self._wanted and self.display:
                await self._show(offset, scroll)

    async def _show(self, offset: int, scroll: bool) -> None:
        pattern, hits, transcript = pattern_of(self.field.value), self._hits, self._transcript
        view: MessageView | None = None
        while pattern is not None and hits.place is not None:
            index = hits.place[0]
            view = await transcript.go_to(transcript.path[index])
            if view is None or hits.correct(index, view.count(pattern)):
                break
            hits.step(offset)
        transcript.mark(pattern, view, hits.place[1] if hits.place is not None else 0)
        if view is not None and hits.place is not None and scroll:
            transcript.show_hit(view, hits.place[1])
        self._tell()

    def _tell(self) -> None:
        words, hits = self.field.value.strip(), self._hits
        text = f"{hits.number} of {hits.total}" if hits.total else "not found" if words else ""
        style = "$text-warning" if words and not hits.total else "$foreground-muted"
        self.query_one("#find-count", Static).update(Content.styled(text, style))

    async def action_stay(self) -> None:
        place = self._hits.place
        self._end()
        async with self._going:
            view = await self._transcript.go_to(self._transcript.path[place[0]]) if place is not None else None
        self.post_message(self.Closed(view))

    async def action_leave(self) -> None:
        self._end()
        async with self._going:
            if self._begun_at is not None:
                await self._transcript.return_to(self._begun_at)
        self.post_message(self.Closed())

    def _end(self) -> None:
        self.display = False
        self._transcript.mark(None, None, 0)
