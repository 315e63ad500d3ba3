"""Conversations to search, open, pin, rename, archive, delete and export. A screen, or a panel beside the chat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from app.chat.controller import ChatController
from app.chat.deletions import chat_named
from app.chat.saving import unlocked
from app.conversations.groups import grouped
from app.conversations.records import Conversation
from app.conversations.store import ConversationStore, StoreError
from app.text_safety import one_line, sanitize, visible
from app.tui.keymap import key
from app.tui.screens.chat_rows import ChatRow, ChatRows, Group

_MOST = 10_000
"""Largest number of conversations that are listed; a search looks through all of them."""


@dataclass(frozen=True)
class ConversationChosen:
    """The conversation to show, and the message in it that the search found, if any."""

    conversation: int
    message: int | None = None


class _SearchField(Input, inherit_bindings=False):
    """A field without the keys that act on the list. Were they shadowed only, they would stand first in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(binding for binding in Input.BINDINGS if isinstance(binding, Binding) and "ctrl+d" not in binding.key),
        Binding("delete", "delete_right", "Delete character right", show=False),
    ]


class ChatBrowser(Vertical):
    """The list of conversations below a field in which typing searches. The field always has the focus.

    ``dense``: for a place of few columns.
    """

    HELP = (
        "Type to search titles and messages; `up` and `down` choose a chat and `enter` opens it. `ctrl+t` pins a chat "
        "to the top, `ctrl+r` renames it, `ctrl+y` archives or restores it, `ctrl+d` deletes it, and `ctrl+z` brings "
        "back what was deleted last. `ctrl+s` exports a chat, `ctrl+l` shows the archived chats, and `ctrl+g` imports "
        "chats of privatellm, ChatGPT, Claude, Open WebUI and llm. `●` is the open chat."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close", key_display="esc", priority=True, id="chats.close"),
        Binding("enter", "open", "Open", show=False, priority=True, id="chats.open"),
        Binding("up", "move(-1)", "Up", show=False, priority=True, id="chats.up"),
        Binding("down", "move(1)", "Down", show=False, priority=True, id="chats.down"),
        Binding("pageup,ctrl+b", "turn(-1)", "Page up", show=False, priority=True, id="chats.page_up"),
        Binding("pagedown,ctrl+f", "turn(1)", "Page down", show=False, priority=True, id="chats.page_down"),
        Binding("ctrl+t", "pin", "Pin", priority=True, id="chats.pin"),
        Binding("ctrl+r", "rename", "Rename", priority=True, id="chats.rename"),
        Binding("ctrl+y", "archive", "Archive", priority=True, id="chats.archive"),
        Binding("ctrl+d", "delete", "Delete", priority=True, id="chats.delete"),
        Binding("ctrl+z", "undo", "Undo", show=False, priority=True, id="chats.undo"),
        Binding("ctrl+s", "export", "Export", priority=True, id="chats.export"),
        Binding("ctrl+g", "import", "Import", show=False, priority=True, id="chats.import"),
        Binding("ctrl+l", "archived", "Archived", priority=True, id="chats.archived"),
    ]

    class Chosen(Message):
        """A conversation is to be shown."""

        def __init__(self, chosen: ConversationChosen) -> None:
            super().__init__()
            self.chosen = chosen

    class Left(Message):
        """The person has finished with the list."""

    class ArchivedShown(Message):
        """The list shows the archived conversations, or no longer."""

        def __init__(self, archived: bool) -> None:
            super().__init__()
            self.archived = archived

    def __init__(self, controller: ChatController, *, dense: bool = False) -> None:
        super().__init__(classes="chat-browser")
        self._controller = controller
        self._store = controller.store
        self._archived = False
        self._found: list[Conversation] | None = None
        self._focus_first = False
        hint = f"search chats ({key('chats')})" if dense else "search titles and messages"
        self.search_field = _SearchField(placeholder=hint, classes="chat-search")
        self.rows = ChatRows(dense=dense)
        self._problem = Static("", classes="chats-problem", markup=False)
        self._preview = None if dense else ChatPreview(self._store)

    def compose(self) -> ComposeResult:
        yield self.search_field
        yield self.rows
        yield self._problem
        if self._preview is not None:
            yield self._preview

    def on_mount(self) -> None:
        self.fill()
        if self._preview is not None:
            self.watch(self.rows, "marked", self._show_marked)
        if self._focus_first:
            self.search_field.focus()

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Takes its keys from the screen and the application, whose bindings have priority, too."""
        return key in self._bindings.key_to_bindings

    def on_descendant_focus(self) -> None:
        self.rows.add_class("-active")

    def on_descendant_blur(self) -> None:
        self.rows.remove_class("-active")

    def focus_search(self) -> None:
        """Give the field the focus, now or when it is on the screen."""
        self._focus_first = True
        if self.search_field.is_mounted:
            self.search_field.focus()

    # --- the list -------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        event.stop()
        self._found = None
        self.fill(marked=0)

    def fill(self, marked: int | None = None) -> None:
        """Show what there is now. ``marked``: the row to mark (default: the same conversation as before)."""
        words = self.search_field.value.strip()
        try:
            groups = self._hits(words) if words else self._listed()
        except StoreError as error:
            groups = []
            self._show_problem(str(error))
        else:
            empty = "There are no archived chats." if self._archived else "There are no chats yet."
            self._show_problem("" if groups else "No chat matches." if words else empty)
        self.show_current()
        # Without rows the sentence that says so is right below the field.
        self.rows.display = bool(groups)
        place = self._place_of_marked(groups) if marked is None else marked
        self.rows.show(groups, time.time(), place)
        self._show_marked()

    def _show_marked(self) -> None:
        if self._preview is not None and self._preview.is_mounted:
            found = self.marked_chat
            self._preview.show(None if found is None else found.id)

    def show_current(self) -> None:
        """Mark the conversation that is shown in the chat. Costs nothing if it is marked already."""
        self.rows.show_current(self._shown, self._controller.answering, frozenset(self._controller.unread))

    @property
    def _shown(self) -> int | None:
        """The conversation that is shown in the chat, unless it is a temporary one, which no list has."""
        thread = self._controller.thread
        return thread.conversation if thread.memory is None else None

    def look_again(self) -> None:
        """Show what has changed on disk. The screen is only touched if something has."""
        self.show_current()
        if self.search_field.value.strip():
            return
        try:
            found = self._store.conversations(archived=self._archived, limit=_MOST)
        except StoreError:
            return  # the next change looks again
        if found != self._found:
            self.fill()

    def _listed(self) -> list[Group]:
        self._found = self._store.conversations(archived=self._archived, limit=_MOST)
        return [(title, [ChatRow(chat) for chat in chats]) for title, chats in grouped(self._found, time.time())]

    def _hits(self, words: str) -> list[Group]:
        hits = self._store.search(words)
        rows = [ChatRow(hit.conversation, hit.message, hit.snippet, hit.messages) for hit in hits]
        return [("", rows)] if rows else []

    def _place_of_marked(self, groups: list[Group]) -> int:
        before, rows = self.marked_chat, [row for _, found in groups for row in found]
        wanted = before.id if before is not None else self._shown
        there = next((place for place, row in enumerate(rows) if row.conversation.id == wanted), None)
        return self.rows.marked if there is None else there

    @property
    def marked_chat(self) -> Conversation | None:
        """The conversation that the keys act on."""
        rows = self.rows
        return rows.rows[rows.marked].conversation if rows.marked < len(rows.rows) else None

    def _show_problem(self, text: str) -> None:
        self._problem.update(Content(one_line(text)))
        self._problem.display = bool(text)

    # --- keys and mouse -------------------------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.focus_search()

    @on(ChatRows.Picked)
    def _picked(self, event: ChatRows.Picked) -> None:
        event.stop()
        self.action_open()

    def action_open(self) -> None:
        rows = self.rows
        if rows.marked < len(rows.rows):
            row = rows.rows[rows.marked]
            self.post_message(self.Chosen(ConversationChosen(row.conversation.id, row.message)))

    def action_leave(self) -> None:
        if self.search_field.value:
            self.search_field.value = ""
        elif self._archived:
            self.action_archived()
        else:
            self.post_message(self.Left())

    def action_move(self, rows: int) -> None:
        self.rows.move(rows)

    def action_turn(self, pages: int) -> None:
        self.rows.move(pages * self.rows.page)

    # --- what can be done -----------------------------------------------------------------------------------------

    def action_archived(self) -> None:
        self._archived = not self._archived
        self.post_message(self.ArchivedShown(self._archived))
        self.fill(marked=0)

    def action_pin(self) -> None:
        found = self.marked_chat
        if found is not None:
            self._try(lambda: self._store.change(found.id, pinned=not found.pinned))

    def action_archive(self) -> None:
        chat = self.marked_chat
        if chat is None:
            return
        title = one_line(chat.title) or "the chat without a title"
        said = f"Restored {title}." if chat.archived else f"Archived {title}. ctrl+l shows the archived chats."
        self._try(lambda: self._store.change(chat.id, archived=not chat.archived), said)

    def action_delete(self) -> None:
        found = self.marked_chat
        if found is not None:
            self._controller.deletions.conversations([found.id], chat_named(found.title), self._filled_again)

    def action_undo(self) -> None:
        self._controller.deletions.undo(self._filled_again)

    def action_rename(self) -> None:
        from app.tui.screens.dialogues import AskText

        chat = self.marked_chat
        if chat is None:
            return

        def renamed(title: str | None) -> None:
            if not title:
                return
            if chat.id == self._shown:
                self._controller.rename(title, self._filled_again)
            else:
                self._try(lambda: self._store.change(chat.id, title=title))

        self.app.push_screen(AskText("Title of the chat", chat.title), renamed)

    def action_export(self) -> None:
        from app.conversations.exporting import export_form, export_problem, suggested_path, write_export
        from app.tui.screens.dialogues import AskText

        chat = self.marked_chat
        if chat is None:
            return

        def named(path: str | None) -> None:
            if not path:
                return
            target = Path(path).expanduser()
            try:
                written = write_export(target, self._store.export(chat.id, export_form(target)))
            except (OSError, StoreError) as error:
                self._show_problem(export_problem(Path(path), error))
            else:
                self.notify(f"Exported to {written}.", markup=False)

        self.app.push_screen(AskText("Export to file (.md or .json)", str(suggested_path(chat.title))), named)

    def action_import(self) -> None:
        from app.chat.saving import import_file
        from app.tui.screens.dialogues import AskText

        def named(file: str | None) -> None:
            if file:
                self._controller.run_in_background(import_file(self._controller, file, self._filled_again))

        self.app.push_screen(AskText("Import chats from file (JSON, ZIP, or logs.db of llm)"), named)

    def _filled_again(self) -> None:
        if self.is_mounted:
            self.fill()

    @work(group="changes")
    async def _try(self, change: Callable[[], object], message: str = "") -> None:
        """Do ``change``, show what there is then, and say ``message``."""
        try:
            await unlocked(change)
        except StoreError as error:
            self._show_problem(str(error))
            return
        self.fill()
        if message:
            self.notify(message, markup=False)


# --- preview of the marked conversation ------------------------------------------------------------------------------


PAUSE_S = 0.15
"""Seconds that the same conversation is marked before it is read."""
LEAST_COLUMNS, LEAST_ROWS = 60, 28
"""Size of the terminal from which on there is room."""
_LONGEST = 2_000
_LINES = 4


class ChatPreview(Static):
    """Hidden while there is nothing to show, or no room for it."""

    def __init__(self, store: ConversationStore) -> None:
        super().__init__(classes="chat-preview", markup=False)
        self._store = store
        self.display = False

    @work(group="preview", exclusive=True)
    async def show(self, conversation: int | None) -> None:
        """Show ``conversation``. It is read beside the screen; another call before that replaces this one."""
        size = self.app.size
        if conversation is None or size.width < LEAST_COLUMNS or size.height < LEAST_ROWS:
            self.display = False
            return
        await asyncio.sleep(PAUSE_S)
        try:
            path = await asyncio.to_thread(self._store.shown, conversation)
        except StoreError:
            path = []
        lines = [one_line(path[0].content[:_LONGEST])] if path else []
        if len(path) > 1:
            end = visible(sanitize(path[-1].content[-_LONGEST:]))
            lines += [line for line in end.splitlines() if line.strip()][-_LINES:]
        width = max(1, size.width - 6)
        shown = [Content(line.expandtabs(4)).truncate(width, ellipsis=True) for line in lines]
        self.update(Content("\n").join([shown[0].stylize("bold"), *shown[1:]]) if shown else Content())
        self.display = bool(shown)
