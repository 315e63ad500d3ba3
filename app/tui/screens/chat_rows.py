"""The list of conversations, of which only the lines on the screen are made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual

from app.conversations.groups import local_date
from app.conversations.records import Conversation
from app.conversations.searching import HIT_END, HIT_START
from app.text_safety import one_line

_MUTED = "$foreground-muted"
_ROW = "row"
"""Name under which a drawn line carries the number of its row, for the mouse."""
ONE_LINE_FROM = 60
"""Columns from which on a row's facts stand beside its title instead of below it."""


@dataclass(frozen=True)
class ChatRow:
    """A conversation of the list, and the message in it that a search found, with its surroundings.

    ``hits``: the number of its messages that the search found.
    """

    conversation: Conversation
    message: int | None = None
    snippet: str = ""
    hits: int = 0


Group = tuple[str, Sequence[ChatRow]]
"""A title, empty for none, and the rows below it."""


def when(seconds: float, now: float) -> str:
    """A time of the past, in seconds since the epoch, in few words: ``5 min ago``, ``yesterday``, ``03 May``."""
    age = now - seconds
    if age < 60:
        return "just now"
    if age < 3600:
        return f"{int(age // 60)} min ago"
    date, here = local_date(seconds), local_date(now)
    if date is None or here is None:
        return ""
    if date == here:
        return time.strftime("%H:%M", time.localtime(seconds))
    if (here - date).days == 1:
        return "yesterday"
    return date.strftime("%d %b" if date.year == here.year else "%d %b %Y")


def marked_snippet(snippet: str, *, on_bar: bool = False) -> Content:
    """A snippet of the search with the hits highlighted. ``on_bar``: on the line of the marked row, where colours would
    be hard to read."""
    hit_style, rest_style = ("bold underline", "") if on_bar else ("bold $text-accent", _MUTED)
    parts: list[tuple[str, str]] = []
    for index, piece in enumerate(one_line(snippet).split(HIT_START)):
        hit, _, rest = piece.partition(HIT_END) if index else ("", "", piece)
        parts += [(hit, hit_style), (rest, rest_style)]
    return Content.assemble(*[part for part in parts if part[0]])


def around_hit(snippet: str, width: int) -> str:
    """``snippet`` with its beginning left out, if its first hit would not be within ``width`` columns."""
    end = snippet.find(HIT_END)
    if end < 0 or cell_len(snippet[:end].replace(HIT_START, "")) <= width:
        return snippet
    hit = start = snippet.find(HIT_START)
    room = max(0, width - 1 - cell_len(snippet[hit + 1 : end])) // 2
    while start > 0 and cell_len(snippet[start - 1 : hit]) <= room:
        start -= 1
    return "…" + snippet[start:].lstrip()


class ChatRows(ScrollView, can_focus=False):
    """Conversations below the titles of their groups.

    ``dense``: a row is its title only. The search field beside the list has the focus; the list itself takes the mouse.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "chat-rows--row", "chat-rows--group", "chat-rows--marked", "chat-rows--hover",
    }  # fmt: skip
    marked: reactive[int] = reactive(0)
    """Number of the row that the keys act on."""
    _hovered: reactive[int | None] = reactive(None)

    class Picked(Message):
        """A row was clicked."""

        def __init__(self, row: int) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, dense: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: list[ChatRow] = []
        self.current: int | None = None
        """The conversation that is shown in the chat."""
        self.answering: frozenset[int] = frozenset()
        """The conversations of which a question is being answered or waits."""
        self.unread: frozenset[int] = frozenset()
        """The conversations with an answer that nobody has seen yet."""
        self._dense = dense
        self._groups: Sequence[Group] = ()
        self._lines: list[tuple[int, int | str]] = []
        """For each line its row and its number within the row, or the title of the group that begins with the row."""
        self._now = 0.0

    def show(self, groups: Sequence[Group], now: float, marked: int) -> None:
        """Show ``groups`` as seen at ``now``, in seconds since the epoch, with the row ``marked``."""
        self._groups, self._now = groups, now
        self.rows = [row for _, rows in groups for row in rows]
        self.marked = marked
        self._lay_out()
        self.refresh()

    def show_current(self, conversation: int | None, answering: frozenset[int], unread: frozenset[int]) -> None:
        """Mark the conversation that is shown in the chat, those being answered, and those with an unseen answer."""
        marks = conversation, answering, unread
        if marks != (self.current, self.answering, self.unread):
            self.current, self.answering, self.unread = marks
            self.refresh()

    def validate_marked(self, marked: int) -> int:
        return max(0, min(marked, len(self.rows) - 1))

    def watch_marked(self) -> None:
        self._scroll_to_marked()

    def move(self, rows: int) -> None:
        """Mark the row that many places below, or above if negative."""
        self.marked += rows

    @property
    def page(self) -> int:
        """Number of rows that fit on the screen."""
        return max(1, self.scrollable_content_region.height // self._height(0) - 1) if self.rows else 1

    def on_resize(self) -> None:
        self._lay_out()

    # --- lines ----------------------------------------------------------------------------------------------------

    @property
    def _narrow(self) -> bool:
        return self.scrollable_content_region.width < ONE_LINE_FROM

    def _height(self, row: int) -> int:
        """Lines of a row: where it is narrow, a second one with the facts, or with what the search found."""
        return 1 + bool(self.rows[row].snippet or (self._narrow and not self._dense))

    def _lay_out(self) -> None:
        self._lines = []
        number = 0
        for title, rows in self._groups:
            if title:
                self._lines += [(number, "")] if self._lines else []
                self._lines.append((number, title))
            for _ in rows:
                self._lines += [(number, line) for line in range(self._height(number))]
                number += 1
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._lines))
        self._scroll_to_marked()

    def _scroll_to_marked(self) -> None:
        if not self.rows or not self.is_mounted:
            return
        lines = [place for place, (row, _) in enumerate(self._lines) if row == self.marked]
        width, height = self.scrollable_content_region.size
        if lines and height:
            region = Region(0, lines[0], width, min(height, len(lines)))
            self.scroll_to_region(region, force=True, animate=False, immediate=True)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        place = self.scroll_offset.y + y
        if place >= len(self._lines):
            return Strip.blank(width, self.get_visual_style("chat-rows--row").rich_style)
        row, line = self._lines[place]
        if isinstance(line, str):
            style = self.get_visual_style("chat-rows--group")
            return self._strip(Content(f" {line}"), width, style)
        kind = (
            "marked" if row == self.marked and self.has_class("-active") else "hover" if row == self._hovered else "row"
        )
        content = self._content(self.rows[row], line, width, on_bar=kind == "marked")
        strip = self._strip(content, width, self.get_visual_style("chat-rows--row", f"chat-rows--{kind}"))
        return strip.apply_meta({_ROW: row})

    def _strip(self, content: Content, width: int, style: object) -> Strip:
        drawn = content.truncate(width, ellipsis=True, pad=True)
        strips = Visual.to_strips(self, drawn, width, 1, style)  # type: ignore[arg-type]
        return strips[0] if strips else Strip.blank(width)

    def _content(self, row: ChatRow, line: int, width: int, *, on_bar: bool) -> Content:
        muted = "" if on_bar else _MUTED
        if line == 0:
            return self._title(row, width, muted)
        if row.snippet:
            shown = around_hit(one_line(row.snippet), width - 4)
            return Content.assemble("   ", marked_snippet(shown, on_bar=on_bar))
        return Content.styled(f"   {self._facts(row.conversation)}", muted)

    def _title(self, row: ChatRow, width: int, muted: str) -> Content:
        conversation = row.conversation
        current = conversation.id == self.current
        mark = (self._mark(conversation.id), "$text-success")
        title = one_line(conversation.title) or "(no title)"
        line = Content.assemble(" ", mark, (title, "bold" if current or not self._dense else ""))
        hits = f"{row.hits} hits" if row.hits > 1 else ""
        facts = "" if self._dense or self._narrow else self._facts(conversation)
        aside = "  ".join(filter(None, (hits, facts)))
        if not aside:
            return line
        room = width - cell_len(aside) - 3
        return Content.assemble(line.truncate(room, ellipsis=True, pad=True), (f"  {aside}", muted))

    def _mark(self, conversation: int) -> str:
        if conversation in self.answering:
            return "◍ "
        if conversation in self.unread:
            return "✓ "
        return "● " if conversation == self.current else "  "

    def _facts(self, found: Conversation) -> str:
        parts = [when(found.updated, self._now), one_line(found.model)[:24], "archived" if found.archived else ""]
        return "  ".join(filter(None, parts))

    # --- mouse ----------------------------------------------------------------------------------------------------

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._hovered = event.style.meta.get(_ROW)

    def on_leave(self) -> None:
        self._hovered = None

    def on_click(self, event: events.Click) -> None:
        row = event.style.meta.get(_ROW)
        if row is not None and row < len(self.rows):
            event.stop()
            self.marked = row
            self.post_message(self.Picked(row))
