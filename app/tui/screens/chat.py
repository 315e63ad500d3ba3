"""The chat screen: the conversation, the prompt, the status line, panels at the side, and the screens it opens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import Worker, WorkerCancelled, WorkerState

from app.chat.controller import ChatController
from app.chat.queue import NewQuestion
from app.chat.setup import setup_line
from app.chat.state import (
    Entry,
    EntryAdded,
    EntryChanged,
    PathChanged,
    QuestionsReturned,
    QueueChanged,
    Severity,
    StatusChanged,
    Update,
    UserNotice,
)
from app.conversations.exporting import quoted
from app.conversations.store import ConversationStore
from app.engine_client import Engine
from app.machine import Machine
from app.settings.file import SettingsFile
from app.text_safety import one_line
from app.tui.chat.attaching import Asking, AttachmentLine
from app.tui.chat.completion import CompletionPopup
from app.tui.chat.drafting import Drafting
from app.tui.chat.find_line import FindLine
from app.tui.chat.message import MessageView
from app.tui.chat.notice import NoticeLine
from app.tui.chat.prompt import Prompt
from app.tui.chat.question_search import COMMAND, QuestionSearch
from app.tui.chat.queue_view import QueueView
from app.tui.chat.status import StatusLine, Welcome
from app.tui.chat.transcript import Transcript
from app.tui.keymap import ChatCommand, UnknownCommand, bound, key, parse
from app.tui.panels.panel import Panel, PanelSlot
from app.tui.render.highlighting import Highlighter
from app.tui.render.key_footer import KeyFooter
from app.tui.screens.arguments import slash_commands
from app.tui.screens.chat_setup import SetupCommands
from app.tui.screens.chats_side import ChatsSide
from app.tui.screens.conversation_commands import ConversationCommands
from app.tui.terminal.application import CopyRequested, TerminalApp

if TYPE_CHECKING:
    from app.chat.first_run import FirstRun
    from app.tui.screens.chat_browser import ChatBrowser

_LONGEST_TITLE = 60
"""Maximum characters of a chat's title in the title of the window."""
SETTLED_S = 0.15
"""Seconds after which the end of an answer has been laid out."""

TEMPORARY = "◌ Temporary chat: nothing is saved"
"""Title of a conversation that is kept in memory only, before the title made from its first question."""


class Updated(Message):
    """The controller changed something."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update = update


@runtime_checkable
class UpdatedScreen(Protocol):
    """A screen above the chat that shows some of its state."""

    def handle_update(self, update: Update) -> None:
        """The controller changed something."""
        ...


class ChatScreen(Screen[None]):
    """The conversation and the prompt. Other screens are imported when they are first opened."""

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(bound("help"), "app.help", "Help", id="chat.help", priority=True),
        Binding("ctrl+p", "app.command_palette", "Menu", id="chat.menu", priority=True),
        Binding(bound("chats"), "chats", "Chats", id="chat.conversations", priority=True),
        Binding(bound("model"), "model", "Model", id="chat.model", priority=True),
        Binding(bound("beams"), "beams", "Beams", id="chat.beams", priority=True),
        Binding(bound("timing"), "timing", "Timing", id="chat.timing", priority=True),
        Binding(bound("machines"), "machines", "Machines", id="chat.machines", priority=True),
        Binding(bound("thoughts"), "thoughts", "Thoughts", show=False, id="chat.thoughts", priority=True),
        Binding(bound("sampling"), "sampling", "Sampling", show=False, id="chat.sampling", priority=True),
        Binding("ctrl+s", "settings", "Settings", id="chat.settings", priority=True),
        Binding("ctrl+n", "new", "New", show=False, id="chat.new", priority=True),
        Binding("ctrl+r", "again", "Regenerate", show=False, id="chat.again", priority=True),
        Binding("escape", "stop", "Stop", show=False, id="chat.stop"),
        Binding(bound("newest"), "end", "To the end", show=False, id="chat.end"),
    ]

    def __init__(
        self,
        engine: Engine,
        store: ConversationStore,
        settings: SettingsFile,
        is_missing: Callable[[str], bool],
        highlighter: Highlighter,
        machine: Machine | None,
    ) -> None:
        super().__init__()
        self.controller = ChatController(engine, store, settings, self._post_update, is_missing=is_missing)
        self.prompt = Prompt(id="prompt")
        self.drafting = Drafting(self.prompt, self.controller)
        self.first_run: FirstRun | None = None
        """Set if there was no model at the start."""
        self.panels = PanelSlot(self, self._make_panel, self.focus_prompt, self.prompt.paste)
        self.setup = SetupCommands(self)
        self.conversations = ConversationCommands(self)
        self.chats = ChatsSide(
            self, self.controller, lambda: self.panels.beside, self._open_chats_screen, self.focus_prompt
        )
        self.panels.on_moved = self.chats.fit
        self.warned_unsaved = False
        self._is_missing = is_missing
        self._highlighter = highlighter
        self._machine = machine
        self._runner: Worker[None] | None = None
        self._editing: Entry | None = None
        self._asking = Asking(
            self.controller, lambda work: self.run_worker(work, group="asking", exit_on_error=True), self._give_back
        )
        self.drafting.being_read = lambda: self._asking.being_read
        self._code_copied: dict[int, int] = {}
        self._title = "", ""

    # --- layout ---------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield Container(id="chats-side")
            with Vertical(id="chat"):
                with Horizontal(id="heading"):
                    yield Static(id="title", markup=False)
                    yield Static(id="setup", markup=False)
                yield Welcome(id="welcome")
                transcript = Transcript(self._highlighter, id="transcript")
                yield transcript
                yield NoticeLine(id="notice")
                yield QueueView(id="queue")
                yield AttachmentLine(
                    "attachments", self.controller.status, self.controller.link.count_tokens, self._show_figures
                )
                yield CompletionPopup(id="completions")
                yield FindLine(transcript, id="find")
                yield self.prompt
            yield Container(id="side")
        yield StatusLine(self.controller.status, id="status")
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#transcript").display = self.query_one("#heading").display = False
        self.query_one("#side").display = self.query_one("#chats-side").display = False
        self.prompt.popup = self.query_one(CompletionPopup)
        self.prompt.completer.sources += [
            slash_commands(self.prompt),
            QuestionSearch(self.drafting.questions),
            self.prompt.file_references(),
        ]
        self.prompt.focus()
        self.drafting.shown()
        self.prompt.send = self._send
        self.prompt.leave_upwards_first = self.query_one(QueueView).enter_from_below
        self._show_placeholder()
        if self._is_missing(self.controller.options.model):
            self._offer_models()
        self._runner = self.run_worker(self.controller.run, name="controller", group="controller", exit_on_error=True)
        self.show_looks()
        if self.controller.options.show_timing:
            self.call_after_refresh(self.action_timing)
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
                self._leave_editing()
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
            case QueueChanged():
                self.query_one(QueueView).show(self.controller.queue.items)
                self.drafting.changed()
            case QuestionsReturned(questions):
                self.drafting.bring_back(questions)
            case UserNotice(text, severity, beside):
                self.show_notice(text, severity, beside=beside)
        if self.first_run is not None:
            self.first_run.handle_update(event.update)
        if self.panels.panel is not None:
            self.panels.panel.handle_update(event.update)
        self.chats.handle_update(event.update)
        for screen in self.app.screen_stack:
            if isinstance(screen, UpdatedScreen) and screen.is_mounted:
                screen.handle_update(event.update)

    def _draw_again(self) -> None:
        """Repaint the screen without a layout.

        With Textual 8.2.8 a widget's last repaint can be lost if a layout happens at the same moment. At the end of an
        answer the tail disappears, and a panel then kept showing its last step but one.
        """
        self.refresh()
        panel = self.panels.panel
        if panel is not None and panel.is_mounted:
            for widget in panel.children:
                widget.refresh()

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
        """The title of a temporary chat stays within it."""
        thread = self.controller.thread
        title = one_line(thread.title) if thread.path and thread.memory is None else ""
        if isinstance(self.app, TerminalApp):
            named = f"{title[:_LONGEST_TITLE]} – privatellm" if title else "privatellm"
            self.app.show_terminal_title(named if self.controller.options.terminal_title else "")

    def _show_title(self) -> None:
        thread = self.controller.thread
        title = one_line(thread.title) if thread.path else ""
        if thread.memory is not None:
            title = f"{TEMPORARY} · {title}" if title else TEMPORARY
        self._show_placeholder()
        shown = title, one_line(setup_line(thread, self.controller.options))
        # Updating a line lays out the whole screen.
        if shown != self._title:
            self._title = shown
            self._show_terminal_title()
            for name, text in zip(("#title", "#setup"), shown, strict=True):
                line = self.query_one(name, Static)
                line.update(Content(text))
                line.display = bool(text)
            heading = self.query_one("#heading")
            heading.display = any(shown)
            heading.set_class(not shown[0], "-untitled")

    def _show_placeholder(self) -> None:
        temporary = self.controller.thread.memory is not None
        self.prompt.set_class(temporary, "-temporary")
        if self._editing is not None:
            question = self._editing.role == "user"
            self.prompt.border_title = f"Editing {'an earlier question' if question else 'an answer'}"
            self.prompt.placeholder = f"Edit the {'question' if question else 'answer'}. Esc cancels."
        else:
            self.prompt.border_title = "◌ temporary" if temporary else ""
            self.prompt.placeholder = "Ask something"

    # --- typing ---------------------------------------------------------------------------------------------------

    def _send(self, text: str, draft: str) -> None:
        try:
            call = parse(text) if self._editing is None else None
        except UnknownCommand as unknown:
            self.show_notice(str(unknown), "warning")
            return
        self.notice.hide()
        if call is not None:
            self.prompt.done()
            self.run_command(call.command, call.argument)
            return
        entry = self._editing
        if entry is not None and entry.role == "assistant":
            self.prompt.done()
            self._leave_editing()
            self.controller.edit(entry, text)
            return
        if entry is None and text.startswith("//"):
            text = text[1:]
        self.prompt.sent(text)
        self._leave_editing()
        self._asking.ask(text, draft, entry)

    def _show_figures(self) -> None:
        self.query_one(StatusLine).update()

    def _give_back(self, text: str, problem: str) -> None:
        self.drafting.bring_back([NewQuestion(text)])
        self.show_notice(problem, "warning")

    @on(Prompt.Changed)
    def _draft_changed(self) -> None:
        kept = self._editing.attachments if self._editing is not None else ()
        self.drafting.changed()
        self.query_one(AttachmentLine).draft_changed(self.prompt.text, self.prompt.whole_text, kept)

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

    @on(Transcript.FollowingChanged)
    def _following(self, event: Transcript.FollowingChanged) -> None:
        self.query_one("#prompt").set_class(not event.following, "-elsewhere")
        self.prompt.border_subtitle = "" if event.following else f"▼ {key('newest')}: newest text"

    # --- commands -------------------------------------------------------------------------------------------------

    def run_command(self, command: ChatCommand, argument: str = "") -> None:
        """Do what ``command`` says, whether it came from a key, the palette or a slash command."""
        if command.action.startswith("app."):
            self.app.run_worker(self.app.run_action(command.action), exit_on_error=True)
            return
        action = getattr(self, f"action_{command.action}")
        if argument:
            action(argument)
        else:
            action()

    def action_stop(self) -> None:
        if self._editing is not None:
            self._leave_editing()
        elif not self.controller.stop():
            self.notice.hide()
        self.prompt.focus()

    def action_end(self) -> None:
        self.transcript.follow()

    def action_new(self) -> None:
        self.notice.hide()
        self.controller.new_conversation()
        self.prompt.focus()

    def action_thoughts(self) -> None:
        if not self.transcript.toggle_thoughts():
            self.show_notice("No answer here has thoughts.")

    def action_again(self) -> None:
        self.notice.hide()
        self.controller.regenerate()

    def action_history(self, words: str = "") -> None:
        """Offer earlier questions; with ``words`` none was found."""
        if words:
            self.show_notice(f"No earlier question has the words {words}.", "warning")
        else:
            self.prompt.fill(COMMAND)
            self.prompt.focus()

    @on(Prompt.EditorWanted)
    def action_editor(self) -> None:
        """Open the draft in the person's editor. An answer in progress waits until it is closed."""
        from app.tui.terminal.editor import EditorProblem, edited

        try:
            text = edited(self.prompt.whole_text, self.app.suspend)
        except EditorProblem as problem:
            self.show_notice(str(problem), "warning")
        else:
            self.prompt.put_edited(text)
        self.prompt.focus()

    def action_edit_last(self) -> None:
        questions = [entry for entry in self.controller.thread.path if entry.role == "user"]
        if questions:
            self._edit(questions[-1])
        else:
            self.show_notice("There is no question to edit yet.", "warning")

    def action_find(self, text: str = "") -> None:
        """Find ``text`` in the conversation, or what is typed then."""
        if not self.controller.thread.path:
            self.show_notice("There is nothing to find in yet.", "warning")
            return
        self.prompt.display = False
        self.find_line.open(text)

    @on(FindLine.Closed)
    def _found(self, event: FindLine.Closed) -> None:
        self.prompt.display = True
        (event.view or self.prompt).focus()

    def action_continue_last(self) -> None:
        self._continue(None)

    def _continue(self, entry: Entry | None) -> None:
        self.notice.hide()
        self.controller.continue_answer(entry)
        self.transcript.follow()
        self.prompt.focus()

    def action_delete_last(self) -> None:
        path = self.controller.thread.path
        if path:
            self.controller.deletions.message(path[-1])
        else:
            self.show_notice("There is no message to delete.", "warning")

    def action_undo(self) -> None:
        """Bring back what was deleted last."""
        self.controller.deletions.undo()

    def action_temporary(self) -> None:
        """Begin a conversation that is kept in memory only."""
        self.notice.hide()
        self.controller.new_conversation(temporary=True)
        self.prompt.focus()

    def action_copy_last(self) -> None:
        answers = [entry for entry in self.controller.thread.path if entry.role == "assistant" and entry.content]
        if answers:
            self._copy(answers[-1].content, "The answer")
        else:
            self.show_notice("There is no answer to copy yet.", "warning")

    def action_copy_code(self) -> None:
        from app.tui.render.markdown import code_blocks

        for entry in reversed(self.controller.thread.path):
            blocks = code_blocks(entry.content)
            if blocks:
                self._copy(blocks[-1], "The code")
                return
        self.show_notice("There is no code block to copy.", "warning")

    @on(MessageView.Asked)
    def _on_asked(self, event: MessageView.Asked) -> None:
        event.stop()
        entry = event.entry
        match event.what:
            case "copy":
                view = self.transcript.view_of(entry)
                thoughts = quoted(entry.thoughts.text) + "\n\n" if view is not None and view.thoughts_open else ""
                self._copy(thoughts + entry.content, "The message")
            case "code":
                self._copy_next_code(entry)
            case "edit":
                self._edit(entry)
            case "again":
                self.controller.regenerate(entry)
                self.prompt.focus()
            case "find":
                self.action_find()
            case "continue":
                self._continue(entry)
            case "delete" | "delete_all":
                self.controller.deletions.message(entry, alternatives=event.what == "delete_all")
            case "undo":
                self.action_undo()
            case "previous" | "next":
                self.controller.switch(entry, -1 if event.what == "previous" else 1)
            case _:
                self.prompt.focus()

    def _edit(self, entry: Entry) -> None:
        self._editing = entry
        self.drafting.begin_editing(entry.content)
        self._show_placeholder()
        self.prompt.focus()

    def _leave_editing(self) -> None:
        self._editing = None
        self.drafting.end_editing()
        self._show_placeholder()

    def _copy_next_code(self, entry: Entry) -> None:
        from app.tui.render.markdown import code_blocks

        blocks = code_blocks(entry.content)
        if not blocks:
            self.show_notice("This message has no code block.", "warning")
            return
        index = self._code_copied.get(entry.key, -1) + 1
        self._code_copied[entry.key] = index
        number = f"Block {index % len(blocks) + 1} of {len(blocks)}" if len(blocks) > 1 else "The code"
        self._copy(blocks[index % len(blocks)], number)

    def _copy(self, text: str, what: str) -> None:
        self.post_message(CopyRequested(text, what))

    # --- panels ---------------------------------------------------------------------------------------------------

    def action_timing(self) -> None:
        self.panels.toggle("timing")

    def action_beams(self, width: str = "") -> None:
        if not width:
            self.panels.toggle("beams")
            return
        number = int(width) if width.isdecimal() else 0
        if not 1 <= number <= 16:
            self.show_notice(f"The beam width must be a number from 1 to 16, not {one_line(width)}.", "warning")
            return
        self._apply_beams(number)

    def action_close_panel(self) -> None:
        self.panels.close()

    def _make_panel(self, kind: str) -> Panel:
        if kind == "timing":
            from app.tui.panels.timing_panel import TimingPanel

            return TimingPanel(self.controller)
        from app.tui.panels.beam_panel import BeamPanel

        return BeamPanel(self.controller, self._apply_beams)

    def _apply_beams(self, width: int) -> None:
        """Use beams of this ``width`` in the shown chat and go back to typing."""
        self.controller.setup.change({"beams": width})
        if self.panels.covers:
            self.panels.close()
        else:
            self.focus_prompt()
        self.show_notice(f"This chat's next question uses {width} beam{'' if width == 1 else 's'}.")

    # --- this chat's setup ----------------------------------------------------------------------------------------

    def action_system(self, text: str = "") -> None:
        self.setup.system(text)

    def action_set_value(self, argument: str = "") -> None:
        self.setup.set_value(argument)

    def action_sampling(self, preset: str = "") -> None:
        self.setup.sampling(preset)

    def action_persona(self, name: str = "") -> None:
        self.setup.persona(name)

    # --- screens --------------------------------------------------------------------------------------------------

    def action_chats(self) -> None:
        self.chats.toggle()

    def on_chat_browser_chosen(self, event: ChatBrowser.Chosen) -> None:
        self.controller.open_conversation(event.chosen.conversation, event.chosen.message)
        self.focus_prompt()

    def on_chat_browser_left(self) -> None:
        self.focus_prompt()

    def _open_chats_screen(self) -> None:
        from app.tui.screens.chat_browser import ConversationChosen
        from app.tui.screens.conversations import ConversationsScreen

        def chosen(result: ConversationChosen | None) -> None:
            if result is not None:
                self.controller.open_conversation(result.conversation, result.message)
            self.focus_prompt()

        self.app.push_screen(ConversationsScreen(self.controller), chosen)

    def action_model(self, name: str = "") -> None:
        def chosen(model: str | None) -> None:
            if model is not None:
                self._use_model(model)
            self.focus_prompt()

        if name:
            chosen(name)
            return
        from app.tui.screens.models import ModelsScreen

        self.app.push_screen(ModelsScreen(self.controller), chosen)

    def _offer_models(self) -> None:
        """Nothing is downloaded unasked: show what can be chosen."""
        from app.chat.first_run import FirstRun
        from app.tui.screens.first_run import FirstRunScreen

        self.controller.link.may_fetch = False
        self.first_run = FirstRun(self.controller)

        def left(all_models: bool | None) -> None:
            if all_models:
                self.action_model()
            self.focus_prompt()

        self.app.push_screen(FirstRunScreen(self.first_run, self._machine), left)

    def _use_model(self, model: str) -> None:
        if model == self.controller.options.model and self.controller.is_saved("model"):
            self.controller.load_again(fetch=True)
            return
        problem = self.controller.change_settings({"model": model})
        if problem:
            self.show_notice(problem, "error")

    def action_settings(self) -> None:
        from app.tui.screens.settings import SettingsScreen

        def left(problem: str | None) -> None:
            if problem:
                self.show_notice(problem, "error")
            self.focus_prompt()

        self.app.push_screen(SettingsScreen(self.controller, self._machine), left)

    def action_status(self) -> None:
        from app.chat.words import status_words
        from app.tui.screens.dialogues import Tell

        self.app.push_screen(Tell("Status", "\n".join(status_words(self.controller.status))))

    def action_log(self) -> None:
        from app.tui.screens.log import LogScreen

        self.app.push_screen(LogScreen(), lambda result: self.focus_prompt())

    def action_keys(self) -> None:
        from app.tui.screens.keys import KeysScreen

        self.app.push_screen(KeysScreen(), lambda result: self.focus_prompt())

    def action_machines(self) -> None:
        from app.tui.screens.machines import MachinesScreen

        self.app.push_screen(MachinesScreen(self.controller), lambda result: self.focus_prompt())

    def action_rename(self, title: str = "") -> None:
        self.conversations.rename(title)

    def action_pin(self) -> None:
        self.conversations.pin()

    def action_archive(self) -> None:
        self.conversations.archive()

    def action_export(self, argument: str = "") -> None:
        self.conversations.export(argument)

    def action_import(self, file: str = "") -> None:
        self.conversations.take_in(file)
