"""The transcript: a window of the conversation's messages, and the tail of the answer in progress."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events, on
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Region, Size, clamp
from textual.layout import DockArrangeResult
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from app.attachments.attachment import pictures_of
from app.chat.state import Entry
from app.tui.chat.message import LiveTail, MessageView
from app.tui.chat.reading_place import Drawn, Place
from app.tui.render.formatting import Stamp, stamp
from app.tui.render.highlighting import Highlighter
from app.tui.render.streaming import PacedDrawing
from app.tui.render.thumbnails import Thumbnails

UPDATE_S = 0.08
"""Minimum seconds between two drawings of the tail. A dozen a second look continuous."""
SLOWEST_S = 0.25
"""Maximum seconds between two drawings of the tail, however much drawing costs."""


FIRST_MESSAGES = 30
"""Messages mounted when a conversation is opened."""
MORE_MESSAGES = 20
"""Messages mounted by one request for older or newer ones."""
MOST_MESSAGES = 90
"""Maximum messages mounted at once; beyond it those at the far end are unmounted."""


@dataclass(frozen=True)
class Window:
    """The part of a long conversation that is mounted: the messages ``start <= index < end`` of ``total``. Pure."""

    start: int
    end: int
    total: int

    @classmethod
    def newest(cls, total: int) -> Window:
        """The window that a conversation of ``total`` messages is opened with."""
        return cls(max(0, total - FIRST_MESSAGES), total, total)

    @classmethod
    def around(cls, index: int, total: int) -> Window:
        """A window that holds message ``index`` and some of what follows it."""
        end = min(total, max(index + 1 + FIRST_MESSAGES // 2, min(FIRST_MESSAGES, total)))
        return cls(max(0, min(index, end - FIRST_MESSAGES)), end, total)

    @property
    def older(self) -> int:
        """Number of messages before the window."""
        return self.start

    @property
    def newer(self) -> int:
        """Number of messages after the window."""
        return self.total - self.end

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.end

    def with_older(self) -> Window:
        """Older messages are added; the newest leave if there would be too many."""
        start = max(0, self.start - MORE_MESSAGES)
        return Window(start, min(self.end, start + MOST_MESSAGES), self.total)

    def with_newer(self) -> Window:
        """Newer messages are added; the oldest leave if there would be too many."""
        end = min(self.total, self.end + MORE_MESSAGES)
        return Window(max(self.start, end - MOST_MESSAGES), end, self.total)

    def appended(self) -> Window:
        """The conversation got one more message. It is mounted if the window was at the end, and stays out while the
        reader is further up."""
        total = self.total + 1
        if self.newer:
            return Window(self.start, self.end, total)
        return Window(max(self.start, total - MOST_MESSAGES), total, total)


class Elsewhere(Static, can_focus=True):
    """Shows how many messages are not mounted. Enter or a click mounts some of them."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "more", "Show more", id="transcript.more")]

    class More(Message):
        def __init__(self, older: bool) -> None:
            super().__init__()
            self.older = older

    def __init__(self, older: bool) -> None:
        super().__init__(classes="elsewhere")
        self.older = older

    def show_count(self, count: int) -> None:
        arrow, word = ("▲", "older") if self.older else ("▼", "newer")
        self.display = count > 0
        self.update(Content(f"{arrow} {count} {word} message{'' if count == 1 else 's'}"))

    def action_more(self) -> None:
        self.post_message(self.More(self.older))

    def on_click(self) -> None:
        self.action_more()


class Transcript(VerticalScroll, can_focus=False):
    """Shows a path of entries. It follows the newest text until the reader scrolls up."""

    class EndMoved(Message):
        """The end of the conversation left the screen, or is ``in_sight`` again."""

        def __init__(self, in_sight: bool) -> None:
            super().__init__()
            self.in_sight = in_sight

    class Leave(Message):
        """The reader moved down from the last message."""

    def __init__(self, highlighter: Highlighter, thumbnails: Thumbnails, id: str) -> None:
        super().__init__(id=id)
        self._highlighter = highlighter
        self._thumbnails = thumbnails
        self.path: list[Entry] = []
        self.window = Window(0, 0, 0)
        self._older = Elsewhere(True)
        self._newer = Elsewhere(False)
        self._tail = LiveTail(highlighter)
        self._live: Entry | None = None
        self._pending: Entry | None = None
        self._drawing = PacedDrawing(self, self._draw_live, UPDATE_S, SLOWEST_S)
        self._following = True
        self._end_in_sight = True
        self._place = Place()
        """The place to which the reader went last. It stays the same when a new layout moves the text."""
        self._arranged: DockArrangeResult | None = None
        self._reaching = False
        self._mounting = asyncio.Lock()
        """Held while messages are mounted and unmounted, which takes several steps."""
        self._pattern: re.Pattern[str] | None = None
        self._thoughts_open = False
        self._stamps = False

    def compose(self) -> Iterable[Static | LiveTail]:
        yield self._older
        yield self._newer
        yield self._tail

    def on_mount(self) -> None:
        self._older.display = self._newer.display = self._tail.display = False

    @property
    def views(self) -> list[MessageView]:
        return list(self.query_children(MessageView))

    def view_of(self, entry: Entry) -> MessageView | None:
        return next((view for view in self.views if view.entry is entry), None)

    @property
    def following(self) -> bool:
        """Whether the end of the conversation is in view."""
        return self._following

    def toggle_thoughts(self) -> bool:
        """Show the thoughts before all answers, or fold them. Returns whether there are any in the conversation."""
        self._thoughts_open = not any(view.thoughts_open for view in self.views)
        for view in self.views:
            view.open_thoughts(self._thoughts_open)
        self.call_after_refresh(self._keep_end)
        return any(entry.thoughts.text for entry in self.path)

    @property
    def thoughts_in_sight(self) -> bool:
        """Whether an answer's thoughts begin on the screen."""
        bottom = self.scroll_y + self.container_size.height
        tops = [view.virtual_region.y for view in self.views if view.entry.thoughts.text]
        return any(self.scroll_y - 2 <= top < bottom - 2 for top in tops)

    def _made(self, entry: Entry) -> MessageView:
        view = MessageView(entry, self._highlighter, self._thumbnails, self._thoughts_open)
        view.mark(self._pattern)
        view.stamped(self._stamp(entry))
        return view

    def show_pictures(self) -> None:
        """Draw the pictures of the messages anew."""
        for view in self.views:
            if pictures_of(view.entry.attachments):
                view.remake()

    def show_stamps(self, wanted: bool) -> None:
        """Show when each message was written, or do not."""
        if wanted != self._stamps:
            self._stamps = wanted
            for view in self.views:
                view.stamped(self._stamp(view.entry))

    def _stamp(self, entry: Entry) -> Stamp | None:
        if not self._stamps or entry not in self.path:
            return None
        index = self.path.index(entry)
        return stamp(entry.created, self.path[index - 1].created if index else None)

    # --- finding --------------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """The place at which the reader is now."""
        return Place() if self._following else self._place

    async def return_to(self, place: Place) -> None:
        """Go to where the reader was."""
        view = await self.go_to(place.entry) if place.entry is not None else None
        line = self._line_of(place)
        if view is None or line is None:
            self.follow()
            return
        self.scroll_to(y=line, animate=False, immediate=True, force=True)
        if not self._following:
            self._place = place

    @property
    def in_sight(self) -> tuple[int, int]:
        """Indices in the path of the first and the last message on the screen."""
        bottom = self.scroll_y + self.container_size.height
        seen = [
            index
            for index, view in enumerate(self.views, self.window.start)
            if view.virtual_region.bottom > self.scroll_y and view.virtual_region.y < bottom
        ]
        return (seen[0], seen[-1]) if seen else (self.window.start, max(self.window.start, self.window.end - 1))

    def mark(self, pattern: re.Pattern[str] | None, current: MessageView | None, hit: int) -> None:
        """Highlight what ``pattern`` finds in all messages, and more than others ``hit`` of the message ``current``."""
        self._pattern = pattern
        for view in self.views:
            view.mark(pattern, hit if view is current else None)

    def show_hit(self, view: MessageView, hit: int) -> None:
        """Bring a hit of :meth:`mark` into sight, with some of what is around it."""
        line = view.line_of(hit)
        if line >= view.virtual_region.height:
            # The message was opened for it just now.
            self.screen._refresh_layout()
        line, height = line + view.virtual_region.y, self.container_size.height
        if not self.scroll_y + 1 <= line < self.scroll_y + height - 1:
            self.scroll_to(y=line - height // 2, animate=False, immediate=True, force=True)

    # --- updates ---------------------------------------------------------------------------------

    async def show_path(self, path: Sequence[Entry], focus: Entry | None = None) -> None:
        """Show another path. ``focus`` is brought into view, otherwise the end."""
        async with self._mounting:
            self.path = list(path)
            self._forget_live()
            total = len(self.path)
            index = self.path.index(focus) if focus in self.path else None
            self.window = Window.newest(total)
            if index is not None and index not in self.window:
                self.window = Window.around(index, total)
            await self._mount_window()
        live = next((entry for entry in self.path if entry.state == "writing" and entry.content), None)
        waiting = next((entry for entry in self.path if entry.state == "writing"), None)
        if live or waiting:
            self.change(live or waiting, live=True)  # type: ignore[arg-type]
        view = self.view_of(focus) if focus is not None else None
        if view is not None and index is not None and index < total - 1:
            self._stop_following()
            view.scroll_visible(animate=False, top=True)
        else:
            self.follow()

    async def add(self, entry: Entry) -> None:
        """Add a new message at the end."""
        if entry in self.path:
            return  # the path that was shown since then already had it
        self.path.append(entry)
        self.window = self.window.appended()
        async with self._mounting:
            if len(self.path) - 1 in self.window:
                view = self._made(entry)
                await self.mount(view, before=self._newer)
                views = self.views
                if len(views) > len(range(self.window.start, self.window.end)):
                    await views[0].remove()
        self._show_counts()
        if entry.role == "user":
            self.follow()
        if entry.state == "writing" and self._live is None:
            self.change(entry, live=True)

    def change(self, entry: Entry, *, live: bool) -> None:
        """``entry`` changed. ``live``: more of it is coming, and the tail shows its end."""
        if not live:
            if entry is self._live:
                self._forget_live()
            view = self.view_of(entry)
            if view is not None:
                view.changed()
            self.call_after_refresh(self._keep_end)
            return
        if entry not in self.path:
            return
        if entry is not self._live:
            self._forget_live()
            self._live = entry
            self._tail.begin()
            self._drawing.begin()
            self._draw_live()
            return
        self._pending = entry
        self._drawing.want()

    def follow(self) -> None:
        """Go to the end and stay there."""
        if self.window.newer:
            self.call_later(self._show_newest)
            return
        self._set_following(True)
        self.call_after_refresh(self._keep_end)

    def _stop_following(self) -> None:
        self.anchor(False)
        self._set_following(False)
        self._place = self._here()

    async def _show_newest(self) -> None:
        async with self._mounting:
            self.window = Window.newest(len(self.path))
            await self._mount_window()
        self.follow()

    def _keep_end(self) -> None:
        """Scroll to the end if the reader follows it."""
        if not self._following:
            return
        # Textual's anchor would move a conversation that is shorter than the screen to the bottom.
        overflows = self.virtual_size.height > self.container_size.height
        if overflows != self.is_anchored:
            self.anchor(overflows)
        if overflows:
            self.scroll_end(animate=False, immediate=True)
        else:
            self.scroll_to(y=0, animate=False, immediate=True, force=True, release_anchor=False)
            if self.window.older:
                self.call_later(self._reach)

    # --- the tail -------------------------------------------------------------------------------------------------

    def _draw_live(self) -> None:
        self._drawing.drop()
        self._pending = None
        entry = self._live
        view = self.view_of(entry) if entry is not None else None
        if entry is None or view is None:
            self._tail.display = False
            return
        self._drawing.drawn()
        if not self._following and self._tail.display and self.scroll_y < self.max_scroll_y - 1:
            # The reader looks at an earlier message: the tail is drawn when they come back.
            self._pending = entry
            return
        if not self._tail.display:
            self.move_child(self._tail, after=view)
            self._tail.display = True
        thinking = bool(entry.thoughts.text) and not entry.content
        if self._tail.show(entry) or not self._tail.growing.frozen or thinking:
            view.growing(self._tail.growing)
        if not self.is_anchored:
            self.call_after_refresh(self._keep_end)

    def _forget_live(self) -> None:
        self._drawing.drop()
        self._live = self._pending = None
        self._tail.display = False

    # --- the window -----------------------------------------------------------------------------------------------

    async def _mount_window(self) -> None:
        with self.app.batch_update():
            await self.remove_children(MessageView)
            entries = self.path[self.window.start : self.window.end]
            await self.mount_all([self._made(entry) for entry in entries], before=self._newer)
        self._show_counts()

    @on(Elsewhere.More)
    async def _show_more(self, event: Elsewhere.More) -> None:
        event.stop()
        await self.show_more(event.older)

    async def show_more(self, older: bool) -> None:
        """Mount more messages at one end. What the reader looks at stays in its place on the screen."""
        async with self._mounting:
            await self._mount_more(older)

    async def _mount_more(self, older: bool) -> None:
        before = self.window
        self.window = before.with_older() if older else before.with_newer()
        if self.window == before:
            return
        if self._following and self.window.newer:
            self._stop_following()
        wanted = self.path[self.window.start : self.window.end]
        keys = {entry.key for entry in wanted}
        views = {view.entry.key: view for view in self.views}
        fresh = [self._made(entry) for entry in wanted if entry.key not in views]
        gone = [view for key, view in views.items() if key not in keys]
        held = self.view_of(self._place.entry) if self._place.entry is not None else None
        if held is not None and held not in gone and self.screen.focused in gone:
            held.focus(scroll_visible=False)
        # Nothing is drawn before the new messages have their heights and the old ones are back in their places.
        with self.app.batch_update():
            await self.remove_children(gone)
            first = next(iter(self.views), None)
            await self.mount_all(fresh, before=first if older and first is not None else self._newer)
            self._show_counts()
            self.screen._refresh_layout()
            self._keep_end()
            self.screen._refresh_layout(scroll=True)

    async def go_to(self, entry: Entry) -> MessageView | None:
        """Mount ``entry`` and its surroundings. Returns its view; None if it is not in the path."""
        if entry not in self.path:
            return None
        async with self._mounting:
            index = self.path.index(entry)
            if index not in self.window:
                self.window = Window.around(index, len(self.path))
                with self.app.batch_update():
                    await self._mount_window()
                    # The new messages get their sizes now, so that the caller can scroll to a line of one.
                    self.screen._refresh_layout()
        self._stop_following()
        return self.view_of(entry)

    async def _reach(self) -> None:
        """Mount more messages if the reader comes near the end of those that are mounted."""
        if self._reaching:
            return
        self._reaching = True
        try:
            if self.window.older and self.scroll_y < self.container_size.height:
                await self.show_more(True)
            elif self.window.newer and self.max_scroll_y - self.scroll_y < self.container_size.height:
                await self.show_more(False)
        finally:
            self._reaching = False

    def _show_counts(self) -> None:
        self._older.show_count(self.window.older)
        self._newer.show_count(self.window.newer)

    # --- the reader's place ---------------------------------------------------------------------------------------

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Arrange the messages, and keep the reader's text at the top whatever became wider, narrower or longer."""
        arranged = super().arrange(size, optimal)
        if arranged is not self._arranged and not optimal:
            self._arranged = arranged
            line = None if self._following else self._line_of(self._place)
            if line is not None:
                # As Textual's anchor does it: before anything is drawn, and not as if the reader had scrolled.
                bottom = max(0, arranged.total_region.bottom - size.height)
                line = clamp(line, 0, bottom)
                # A wider or higher terminal shows the end to a reader who did not go there.
                self._tell_end(not self.window.newer and line >= bottom - 1)
                self.set_reactive(Widget.scroll_y, line)
                self.set_reactive(Widget.scroll_target_y, line)
                if self.show_vertical_scrollbar:
                    self.vertical_scrollbar.position = line
        return arranged

    def _here(self) -> Place:
        """The place that is at the top of the screen."""
        for view, region in self._drawn_views():
            if region.bottom > self.scroll_y:
                entry = view.entry if isinstance(view, MessageView) else self._live
                found = self._drawn(entry) if entry is not None else None
                if found is not None:
                    return Place(entry, round(self.scroll_y) - found[0], found[1])
        return Place()

    def _line_of(self, place: Place) -> int | None:
        """The line of the conversation that the reader's text is in; None if its message is not there."""
        found = self._drawn(place.entry) if place.entry is not None else None
        return found[0] + place.row_in(found[1]) if found is not None else None

    def _drawn(self, entry: Entry) -> tuple[int, Drawn] | None:
        """The line at which ``entry`` begins, and what was drawn of it."""
        views = [
            (view, region.shrink(view.gutter))
            for view, region in self._drawn_views()
            if (view.entry if isinstance(view, MessageView) else self._live) is entry
        ]
        if not views:
            return None
        (_, (_, top, width, _)), *_ = views
        return top, Drawn(tuple((region.y - top, view.text_at(width)) for view, region in views), width)

    def _drawn_views(self) -> list[tuple[MessageView | LiveTail, Region]]:
        """The messages and the tail in the order of the last layout, and where it put them."""
        placements = self._arranged.placements if self._arranged is not None else []
        return [
            (placement.widget, placement.region)
            for placement in placements
            if isinstance(placement.widget, MessageView | LiveTail)
        ]

    # --- moving ---------------------------------------------------------------------------------------------------

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        # Textual 8.2.8 compares a layout with what it was asked about last instead of with what is on the screen, so a
        # scroll just before the layout would not be drawn.
        self.refresh()
        at_end = not self.window.newer and new_value >= self.max_scroll_y - 1
        self._set_following(at_end)
        self._place = self._here()
        if at_end and not self.is_anchored:
            self.call_after_refresh(self._keep_end)
        if self.window.older or self.window.newer:
            self.call_later(self._reach)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._keep_end)
        if self.window.older or self.window.newer:
            self.call_later(self._reach)

    def _set_following(self, following: bool) -> None:
        if following == self._following:
            return
        self._following = following
        if following and self._pending is not None:
            self._draw_live()
        self._tell_end(following)

    def _tell_end(self, in_sight: bool) -> None:
        if in_sight != self._end_in_sight:
            self._end_in_sight = in_sight
            self.post_message(self.EndMoved(in_sight))

    @on(MessageView.Edge)
    async def _focus_edge(self, event: MessageView.Edge) -> None:
        event.stop()
        await self._look_at(self.path[-1 if event.last else 0])

    @on(MessageView.Question)
    async def _focus_question(self, event: MessageView.Question) -> None:
        event.stop()
        index = next((index for index, entry in enumerate(self.path) if entry is event.view.entry), 0)
        others = self.path[index + 1 :] if event.offset > 0 else self.path[:index][::-1]
        question = next((entry for entry in others if entry.role == "user"), None)
        if question is not None:
            await self._look_at(question)
        elif event.offset > 0:
            await self._look_at(self.path[-1])

    async def _look_at(self, entry: Entry) -> None:
        """Go to ``entry``, which gets the focus."""
        view = await self.go_to(entry)
        if view is not None:
            view.focus(scroll_visible=False)
            self.call_after_refresh(lambda: view.scroll_visible(animate=False, top=True, immediate=True))

    @on(MessageView.Neighbour)
    async def _move_focus(self, event: MessageView.Neighbour) -> None:
        event.stop()
        views = self.views
        index = views.index(event.view) + event.offset
        if index < 0 and self.window.older:
            await self.show_more(True)
            views = self.views
            index = views.index(event.view) - 1
        if index >= len(views) and self.window.newer:
            await self.show_more(False)
            views = self.views
            index = views.index(event.view) + 1
        if index >= len(views):
            self.follow()
            self.post_message(self.Leave())
        elif index >= 0:
            views[index].focus()
