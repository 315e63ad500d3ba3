"""The conversations: resume, search, rename, archive, delete, export."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from app.chat.controller import ChatController
from app.chat.saving import unlocked
from app.conversations.store import Conversation, StoreError
from app.text_safety import one_line
from app.tui.keymap import bound

_MUTED = "$foreground-muted"
_HIT_START, _HIT_END = "\ue000", "\ue001"
_DAY_S = 86_400


@dataclass(frozen=True)
class ConversationChosen:
    """The conversation to show, and the message in it that the search found, if any."""

    conversation: int
    message: int | None = None


@dataclass(frozen=True)
class _Row:
    conversation: Conversation
    message: int | None = None
    snippet: str = ""


def when(seconds: float, now: float) -> str:
    """A time of the past, in seconds since the epoch, in few words: ``5 min ago``, ``yesterday``, ``03 May``."""
    age = now - seconds
    if age < 60:
        return "just now"
    if age < 3600:
        return f"{int(age // 60)} min ago"
    there, here = time.localtime(seconds), time.localtime(now)
    if age < _DAY_S and there.tm_yday == here.tm_yday:
        return time.strftime("%H:%M", there)
    if age < 2 * _DAY_S and time.localtime(now - _DAY_S).tm_yday == there.tm_yday:
        return "yesterday"
    return time.strftime("%d %b" if there.tm_year == here.tm_year else "%d %b %Y", there)


def marked_snippet(snippet: str) -> Content:
    """A snippet of the search with the hits highlighted."""
    parts: list[tuple[str, str]] = []
    for index, piece in enumerate(one_line(snippet).split(_HIT_START)):
        hit, _, rest = piece.partition(_HIT_END) if index else ("", "", piece)
        parts += [(hit, "bold $text-accent"), (rest, _MUTED)]
    return Content.assemble(*[part for part in parts if part[0]])


_MARGINS = 8
"""Columns of the list that hold no text: margins, padding and the scroll bar."""


class ConversationsScreen(Screen[ConversationChosen | None]):
    HELP = (
        "Type to search titles and messages. `enter` opens a chat. In the list, `r` renames a chat, `a` archives "
        "or restores it, `d` deletes it after asking, and `e` exports it. `v` shows the archived chats."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape," + bound("chats"), "leave", "Close", key_display="esc", id="chats.close"),
        Binding("enter", "open", "Open", show=False, id="chats.open"),
        Binding("r", "rename", "Rename", id="chats.rename"),
        Binding("a", "archive", "Archive", id="chats.archive"),
        Binding("d,delete", "delete", "Delete", key_display="d", id="chats.delete"),
        Binding("e", "export", "Export", id="chats.export"),
        Binding("v", "archived", "Archived", id="chats.archived"),
        Binding(bound("help"), "app.help", "Help", id="chats.help"),
        Binding("down", "to_list", "List", show=False, id="chats.list"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._store = controller.store
        self._rows: list[_Row] = []
        self._archived = False

    def compose(self) -> ComposeResult:
        yield Static("Chats", classes="screen-title", markup=False)
        yield Input(placeholder="search titles and messages", id="search")
        yield OptionList(id="conversations")
        yield Static("", id="chats-problem", classes="problem", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self._fill()
        self.query_one(OptionList if self._rows else Input).focus()

    # --- the list -------------------------------------------------------------------------------------------------

    @on(Input.Changed, "#search")
    def _search(self) -> None:
        self._fill()

    @on(Input.Submitted, "#search")
    def _search_done(self) -> None:
        if self._rows:
            self._open(0)

    def _fill(self) -> None:
        words = self.query_one("#search", Input).value.strip()
        chats = self.query_one(OptionList)
        marked = chats.highlighted or 0
        try:
            if words:
                hits = self._store.search(words)
                self._rows = [_Row(hit.conversation, hit.message, hit.snippet) for hit in hits]
            else:
                self._rows = [_Row(found) for found in self._store.conversations(archived=self._archived)]
        except StoreError as error:
            self._rows = []
            self._show_problem(str(error))
        else:
            empty = "There are no archived chats." if self._archived else "There are no chats yet."
            self._show_problem("" if self._rows else "No chat matches." if words else empty)
        self._draw(marked)
        title = "Archived chats" if self._archived else "Chats"
        self.query_one(".screen-title", Static).update(Content(title))

    def on_resize(self) -> None:
        self._draw(self.query_one(OptionList).highlighted or 0)

    def _draw(self, marked: int) -> None:
        chats = self.query_one(OptionList)
        now, room = time.time(), max(20, self.app.size.width - _MARGINS)
        chats.set_options([Option(self._prompt(row, now, room)) for row in self._rows])
        if self._rows:
            chats.highlighted = min(marked, len(self._rows) - 1)

    def _prompt(self, row: _Row, now: float, room: int) -> Content:
        found = row.conversation
        dot = ("● ", "$text-success") if found.id == self._controller.thread.conversation else ("  ", "")
        title = one_line(found.title) or "(no title)"
        facts = "  ".join(
            filter(None, [when(found.updated, now), one_line(found.model), "archived" if found.archived else ""])
        )
        line = Content.assemble(dot, (title, "bold"))
        if line.cell_length + 2 + len(facts) <= room:
            lines = [Content.assemble(line, (f"  {facts}", _MUTED))]
        else:
            lines = [line.truncate(room, ellipsis=True), Content.styled(f"  {facts}", _MUTED)]
        if row.snippet:
            lines.append(Content.assemble("  ", marked_snippet(row.snippet)))
        return Content("\n").join(lines)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._open(event.option_index)

    def _open(self, index: int) -> None:
        row = self._rows[index]
        self.dismiss(ConversationChosen(row.conversation.id, row.message))

    @property
    def _marked(self) -> Conversation | None:
        index = self.query_one(OptionList).highlighted
        return self._rows[index].conversation if index is not None and index < len(self._rows) else None

    def _show_problem(self, text: str) -> None:
        self.query_one("#chats-problem", Static).update(Content(one_line(text)))

    # --- what can be done -----------------------------------------------------------------------------------------

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_leave(self) -> None:
        search = self.query_one("#search", Input)
        if search.value:
            search.value = ""
        else:
            self.dismiss(None)

    def action_archived(self) -> None:
        self._archived = not self._archived
        self._fill()

    def action_archive(self) -> None:
        found = self._marked
        if found is not None:
            self._try(lambda: self._store.change(found.id, archived=not found.archived))

    def action_rename(self) -> None:
        from app.tui.screens.dialogues import AskText

        found = self._marked
        if found is None:
            return

        def renamed(title: str | None) -> None:
            if not title:
                return
            if self._controller.thread.conversation == found.id:
                self._controller.rename(title, self._filled_again)
            else:
                self._try(lambda: self._store.change(found.id, title=title))

        self.app.push_screen(AskText("Title of the chat", found.title), renamed)

    def action_delete(self) -> None:
        from app.tui.screens.dialogues import Confirm

        found = self._marked
        if found is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._controller.forget_conversation(found.id)
                self._try(lambda: self._store.delete(found.id))

        title = one_line(found.title) or "(no title)"
        detail = "All its branches are deleted for good. To only hide it, archive it (a)."
        self.app.push_screen(Confirm(f"Delete “{title}”?", detail), answered)

    def action_export(self) -> None:
        from app.conversations.exporting import export_form, export_problem, suggested_path, write_export
        from app.tui.screens.dialogues import AskText

        found = self._marked
        if found is None:
            return

        def named(path: str | None) -> None:
            if not path:
                return
            target = Path(path).expanduser()
            try:
                written = write_export(target, self._store.export(found.id, export_form(target)))
            except (OSError, StoreError) as error:
                self._show_problem(export_problem(Path(path), error))
            else:
                self.notify(f"Exported to {written}.", markup=False)

        self.app.push_screen(AskText("Export to file (.md or .json)", str(suggested_path(found.title))), named)

    def _filled_again(self) -> None:
        if self.is_mounted:
            self._fill()

    @work(group="changes")
    async def _try(self, change: Callable[[], object]) -> None:
        try:
            await unlocked(change)
        except StoreError as error:
            self._show_problem(str(error))
            return
        self._fill()
