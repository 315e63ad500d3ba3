"""The chat screen: the conversation, the prompt, the status line, panels at the side, and the screens it opens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.screen import Screen
from textual.worker import Worker, WorkerCancelled, WorkerState

from app.chat.commands.command import Command
from app.chat.commands.table import BY_NAME, COMMANDS, UnknownCommand, parse, unescaped, use_beams
from app.chat.controller import ChatController
from app.chat.state import (
    EntryAdded,
    EntryChanged,
    NewQuestion,
    PathChanged,
    QuestionsReturned,
    QueueChanged,
    Severity,
    StatusChanged,
    TitleChanged,
    Update,
    UserNotice,
)
from app.conversations.store import ConversationStore
from app.engine_client import Engine
from app.machine import Machine
from app.settings.file import SettingsFile
from app.text_safety import one_line
from app.tui.chat.attaching import Asking, AttachmentLine
from app.tui.chat.completion import CompletionPopup, QuestionSearch
from app.tui.chat.drafting import Drafting, Editing
from app.tui.chat.find_line import FindLine
from app.tui.chat.message import MessageView
from app.tui.chat.prompt import Prompt
from app.tui.chat.queue_view import QueueView
from app.tui.chat.status import Heading, NoticeLine, StatusLine, Welcome, terminal_title
from app.tui.chat.transcript import Transcript
from app.tui.keymap import bound, key
from app.tui.panels.chat_panels import ChatPanels
from app.tui.ranking import remember
from app.tui.render.highlighting import Highlighter
from app.tui.render.key_footer import KeyFooter
from app.tui.render.thumbnails import Thumbnails
from app.tui.screens.chats_side import ChatsSide
from app.tui.screens.front import ScreenFront
from app.tui.screens.slash_completion import slash_commands
from app.tui.screens.updates import Updated, UpdatedScreen
from app.tui.terminal.application import EDITOR, TerminalApp

if TYPE_CHECKING:
    from app.tui.screens.chat_browser import ChatBrowser

SETTLED_S = 0.15
"""Seconds after which the end of an answer has been laid out."""


def _command_bindings() -> list[Binding]:
    """The keys of commands that come before the focused widget's."""
    return [
        Binding(
            bound(command.name),
            f"command('{command.name}')",
            command.shortcut.label or command.title,
            show=command.shortcut.shown,
            id=command.shortcut.id,
            priority=True,
        )
        for command in COMMANDS
        if command.shortcut is not None
        and command.shortcut.id.startswith("chat.")
        and command.name not in ("help", "stop")
    ]


class ChatScreen(Screen[None]):
    """The conversation and the prompt. Other screens are imported when they are first opened."""

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(bound("stop"), "command('stop')", "Stop", id="chat.stop"),
        Binding("escape", "back", "Back", show=False, id="chat.back"),
        Binding(bound("help"), "app.help", "Help", id="chat.help", priority=True),
        Binding(bound("menu"), "app.command_palette", "Menu", id="chat.menu", priority=True),
        *_command_bindings(),
        Binding(bound("newest"), "end", "To the end", show=False, id="chat.end"),
    ]

    def __init__(
        self,
        engine: Engine,
        store: ConversationStore,
        settings: SettingsFile,
        is_missing: Callable[[str], bool],
        highlighter: Highlighter,
        thumbnails: Thumbnails,
        machine: Machine | None,
    ) -> None:
        super().__init__()
        self.controller = ChatController(engine, store, settings, self._post_update, is_missing=is_missing)
        self.controller.deletions.undo_words = "z in the messages or /undo", "ctrl+z in the list of chats or /undo"
        self.prompt = Prompt(id="prompt")
        self.drafting = Drafting(self.prompt, self.controller)
        self.front = ScreenFront(self, machine)
        self.panels = ChatPanels(
            self, self.controller, self.focus_prompt, self.prompt.paste, partial(use_beams, self.front)
        )
        self.chats = ChatsSide(
            self, self.controller, lambda: self.panels.beside, self.front.open_chats, self.focus_prompt
        )
        self.panels.on_moved = self.chats.fit
        self.warned_unsaved = False
        self.ended_unseen = False
        self._stop_shown = False
        self._is_missing = is_missing
        self.highlighter = highlighter
        self._thumbnails = thumbnails
        self._runner: Worker[None] | None = None
        self.editing = Editing(self.prompt, self.drafting, self.controller)
        self._asking = Asking(
            self.controller, lambda work: self.run_worker(work, group="asking", exit_on_error=True), self._give_back
        )
        self.drafting.being_read = lambda: self._asking.being_read

    # --- layout ---------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield Container(id="chats-side")
            with Vertical(id="chat"):
                yield Heading(id="heading")
                yield Welcome(id="welcome")
                transcript = Transcript(self.highlighter, self._thumbnails, id="transcript")
                yield transcript
                yield NoticeLine(id="notice")
                yield QueueView(id="queue")
                yield AttachmentLine(
                    "attachments",
                    self.controller.status,
                    self.controller.link.count_tokens,
                    self._show_figures,
                    self._thumbnails,
                )
                yield CompletionPopup(id="completions")
                yield FindLine(transcript, id="find")
                yield self.prompt
            yield Container(id="side")
        yield StatusLine(self.controller.status, id="status")
        yield KeyFooter()

    def show_pictures(self) -> None:
        """Draw attached pictures as the terminal can, or no more."""
        self.query_one(Transcript).show_pictures()
        self.query_one(AttachmentLine).remake()

    def on_mount(self) -> None:
        self.query_one("#transcript").display = False
        self.query_one("#side").display = self.query_one("#chats-side").display = False
        self.prompt.popup = self.query_one(CompletionPopup)
        self.prompt.completer.sources += [
            slash_commands(self.prompt, self._recent),
            QuestionSearch(self.drafting.questions),
            self.prompt.file_references(),
        ]
        self.prompt.focus()
        self.drafting.shown()
        self.prompt.send = self._send
        self.prompt.leave_upwards_first = self.query_one(QueueView).enter_from_below
        self.editing.show()
        if self._is_missing(self.controller.options.model):
            self.front.offer_models()
        self._runner = self.run_worker(self.controller.run, name="controller", group="controller", exit_on_error=True)
        self.show_looks()
        if self.controller.options.show_timing:
            self.call_after_refresh(self.front.timing)
        if self.controller.options.show_chats:
            self.call_after_refresh(self.chats.fit)

    def focus_prompt(self) -> None:
        self.prompt.focus()

    @property
    def find_line(self) -> FindLine:
        return self.query_one(FindLine)

    @property
    def notice(self) -> NoticeLine:
        return self.query_one("#notice", NoticeLine)

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    async def close(self) -> None:
        """Stop the controller. A partial answer is saved, and so is what is typed."""
        self.drafting.write()
        if self._runner is not None and self._runner.state in (WorkerState.RUNNING, WorkerState.PENDING):
            self._runner.cancel()
            with suppress(WorkerCancelled):
                await self._runner.wait()

    # --- updates of the controller --------------------------------------------------------------------------------

    def _post_update(self, update: Update) -> None:
        self.post_message(Updated(update))

    @on(Updated)
    async def _show(self, event: Updated) -> None:
        match event.update:
            case StatusChanged():
                # A blinking cursor is drawn twice a second, and the engine's threads wait for what drawing takes.
                self.prompt.cursor_blink = not (self.controller.busy or self._still)
                self.query_one(StatusLine).update()
                self.query_one(Welcome).show(self.controller.status)
                if not self.controller.status.unsaved:
                    self.notice.saved()
                self._show_title()
                self._show_stop()
            case TitleChanged():
                self._show_title()
            case EntryChanged(entry, live):
                self.transcript.change(entry, live=live)
                if live:
                    self.query_one(StatusLine).grow()
                else:
                    self.set_timer(SETTLED_S, self._draw_again)
                    self.find_line.look_again()
            case EntryAdded(entry):
                self._reveal(True)
                await self.transcript.add(entry)
                self.find_line.look_again()
            case PathChanged(focus):
                self.editing.end()
                path = self.controller.thread.path
                self.find_line.close()
                among_messages = isinstance(self.focused, MessageView)
                self._reveal(bool(path))
                await self.transcript.show_path(path, focus)
                if among_messages:
                    view = self.transcript.view_of(focus) if focus is not None else None
                    (view or self.prompt).focus()
                self.drafting.shown()
                self._show_title()
            case QueueChanged(thread):
                self.query_one(QueueView).show(self.controller.queue.items)
                self.drafting.queue_changed(thread)
            case QuestionsReturned(questions, thread):
                self.drafting.bring_back(questions, thread)
            case UserNotice(text, severity, beside):
                self.show_notice(text, severity, beside=beside)
        if self.front.first_run is not None:
            self.front.first_run.handle_update(event.update)
        if self.panels.panel is not None:
            self.panels.panel.handle_update(event.update)
        self.chats.handle_update(event.update)
        for screen in self.app.screen_stack:
            if isinstance(screen, UpdatedScreen) and screen.is_mounted:
                screen.handle_update(event.update)

    def _show_stop(self) -> None:
        """Show in the line of keys whether there is something to stop."""
        if self._stoppable != self._stop_shown:
            self._stop_shown = self._stoppable
            self.refresh_bindings()

    def _draw_again(self) -> None:
        """Repaint the screen without a layout.

        With Textual 8.2.8 a widget's last repaint can be lost if a layout happens at the same moment. At the end of an
        answer the tail disappears, and a panel then kept showing its last step but one.
        """
        self.refresh()
        self.panels.draw_again()

    def show_notice(self, text: str, severity: Severity = "information", *, beside: bool = False) -> None:
        """Show one line. A warning or error stays above the prompt until the next question; information passes.

        ``beside``: it is added to the lines there instead of replacing them.
        """
        if severity == "information":
            self.notify(one_line(text), markup=False, timeout=4)
            return
        if not self.is_mounted:
            self.call_after_refresh(self.show_notice, text, severity, beside=beside)
            return
        if not self.is_current:
            self.notify(one_line(text), severity=severity, markup=False)
        self.notice.tell(text, severity, beside=beside, until_saved=bool(self.controller.status.unsaved))

    def _reveal(self, conversation: bool) -> None:
        welcome = self.query_one(Welcome)
        welcome.display = not conversation
        welcome.show(self.controller.status)
        self.transcript.display = conversation

    @property
    def _recent(self) -> list[str]:
        return self.app.recent_commands if isinstance(self.app, TerminalApp) else []

    @property
    def _still(self) -> bool:
        """Is nothing to blink or move?"""
        return isinstance(self.app, TerminalApp) and self.app.still

    def show_looks(self) -> None:
        """Follow the settings that say how the conversation is shown."""
        options = self.controller.options
        self.query_one("#chat").styles.max_width = options.reading_width or None
        self.transcript.show_stamps(options.time_stamps)
        self.prompt.cursor_blink = not (self.controller.busy or self._still)
        self._show_title()
        self._show_terminal_title()

    def _show_terminal_title(self) -> None:
        if isinstance(self.app, TerminalApp):
            wanted = self.controller.options.terminal_title
            title = terminal_title(self.controller.thread, ended=self.ended_unseen)
            self.app.show_terminal_title(title if wanted else "")

    def show_ended_unseen(self, unseen: bool) -> None:
        """Mark the window's title, or do not: an answer has ended while the window had no focus."""
        if unseen != self.ended_unseen:
            self.ended_unseen = unseen
            self._show_terminal_title()

    def _show_title(self) -> None:
        self.editing.show()
        if self.query_one(Heading).show(self.controller.thread, self.controller.options):
            self._show_terminal_title()

    # --- typing ---------------------------------------------------------------------------------------------------

    def _send(self, text: str, draft: str) -> None:
        try:
            call = parse(text) if self.editing.entry is None else None
        except UnknownCommand as unknown:
            self.show_notice(str(unknown), "warning")
            return
        self.notice.hide()
        if call is not None:
            self.prompt.done()
            self.run_command(call.command, call.argument)
            return
        entry = self.editing.entry
        if entry is not None and entry.role == "assistant":
            self.prompt.done()
            self.editing.end(sent=True)
            self.controller.edit(entry, text)
            return
        if entry is None:
            text = unescaped(text)
        self.prompt.sent(text)
        self.editing.end(sent=True)
        self._asking.ask(text, draft, entry)

    def _show_figures(self) -> None:
        self.query_one(StatusLine).update()

    def _give_back(self, text: str, problem: str) -> None:
        self.drafting.bring_back([NewQuestion(text)])
        self.show_notice(problem, "warning")

    @on(Prompt.Changed)
    def _draft_changed(self) -> None:
        kept = self.editing.entry.attachments if self.editing.entry is not None else ()
        self.drafting.changed()
        self.query_one(AttachmentLine).draft_changed(self.prompt.text, self.prompt.whole_text, kept)

    @on(events.DescendantFocus, "#prompt")
    def _back_in_prompt(self) -> None:
        self.query_one(AttachmentLine).look_again()

    @on(CompletionPopup.Picked)
    def _candidate_clicked(self, event: CompletionPopup.Picked) -> None:
        event.stop()
        self.prompt.pick(event.index)

    @on(Prompt.LeftUpwards)
    def _to_messages(self) -> None:
        views = self.transcript.views
        if views:
            views[-1].focus()

    @on(Prompt.Scrolled)
    def _scroll(self, event: Prompt.Scrolled) -> None:
        self.action_scroll(event.pages)

    def action_scroll(self, pages: int) -> None:
        if pages < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    @on(QueueView.Taken)
    def _take_from_queue(self, event: QueueView.Taken) -> None:
        question = self.controller.queue.take(event.index)
        if question is not None and event.edit:
            self.drafting.bring_back([question])
            self.prompt.focus()

    @on(QueueView.Leave)
    @on(Transcript.Leave)
    def _to_prompt(self) -> None:
        self.prompt.focus()

    @on(Transcript.EndMoved)
    def _end_moved(self, event: Transcript.EndMoved) -> None:
        self.prompt.set_class(not event.in_sight, "-elsewhere")
        self.prompt.border_subtitle = "" if event.in_sight else f"▼ {key('newest')}: newest text"

    # --- commands -------------------------------------------------------------------------------------------------

    def run_command(self, command: Command, argument: str = "") -> None:
        """Do what ``command`` says, which came from the palette or was typed."""
        remember(self._recent, command.title)
        command.run(self.front, argument)

    def action_command(self, name: str, argument: str = "") -> None:
        """Run the command ``name``, whose key was pressed."""
        BY_NAME[name].run(self.front, argument)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if (action, parameters) == ("command", ("stop",)):
            return self._stoppable
        return super().check_action(action, parameters)

    @property
    def _stoppable(self) -> bool:
        """Is the escape key what stops an answer?"""
        return self.editing.entry is None and self.controller.can_stop

    def action_back(self) -> None:
        """End an edit, or put away what is told, and go to the prompt."""
        if self.editing.entry is not None:
            self.editing.end()
            self.refresh_bindings()
        else:
            self.notice.hide()
        self.prompt.focus()

    def action_end(self) -> None:
        self.transcript.follow()

    @on(Prompt.EditorWanted)
    def open_editor(self) -> None:
        """Open the draft in the person's editor."""
        self.run_worker(self._edit_draft(), group=EDITOR)

    async def _edit_draft(self) -> None:
        await self.drafting.open_editor()
        self.query_one(AttachmentLine).look_again()

    @on(FindLine.Closed)
    def _found(self, event: FindLine.Closed) -> None:
        self.prompt.display = True
        (event.view or self.prompt).focus()

    @on(MessageView.Asked)
    def _asked(self, event: MessageView.Asked) -> None:
        event.stop()
        self.front.message(event.entry, event.what)

    # --- panels ---------------------------------------------------------------------------------------------------

    def action_close_panel(self) -> None:
        self.panels.close()

    # --- screens --------------------------------------------------------------------------------------------------

    def on_chat_browser_chosen(self, event: ChatBrowser.Chosen) -> None:
        self.controller.open_conversation(event.chosen.conversation, event.chosen.message)
        self.focus_prompt()

    def on_chat_browser_left(self) -> None:
        self.focus_prompt()
