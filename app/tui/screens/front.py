"""What commands do on the chat screen, and the screens that they open. Each is imported when it is first opened."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, TypeVar

from app.chat.commands.table import use_model, use_persona
from app.chat.state import Entry, Severity
from app.chat.thread import Copying
from app.machine import Machine
from app.tui.terminal.application import CopyRequested

if TYPE_CHECKING:
    from app.chat.first_run import FirstRun
    from app.tui.screens.chat import ChatScreen
    from app.tui.screens.chat_browser import ConversationChosen
    from app.tui.screens.personas import Chosen

Result = TypeVar("Result")


class ScreenFront:
    """The chat screen as commands see it. ``machine``: what this machine has, if known."""

    def __init__(self, chat: ChatScreen, machine: Machine | None) -> None:
        self.first_run: FirstRun | None = None
        """Set if there was no model at the start."""
        self.controller = chat.controller
        self.copying = Copying(
            lambda: self.controller.thread,
            lambda text, what: chat.post_message(CopyRequested(text, what)),
            lambda problem: self.say(problem, "warning"),
        )
        self._chat = chat
        self._machine = machine

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        return function(*arguments)

    def run(self, work: Coroutine[None, None, None]) -> None:
        self.controller.run_in_background(work)

    # --- words ------------------------------------------------------------------------------------------------------

    def say(self, text: str, severity: Severity = "information", *, in_lines: str | None = None) -> None:
        if text:
            self._chat.show_notice(text, severity)

    def tell(self, title: str, lines: Sequence[str]) -> None:
        from app.tui.screens.dialogues import Tell

        self._chat.app.push_screen(Tell(title, "\n".join(lines)))

    def ask(self, question: str, then: Callable[[str], object], *, text: str = "", in_lines: str = "") -> None:
        from app.tui.screens.dialogues import AskText

        def answered(answer: str | None) -> None:
            if answer:
                then(answer)

        self._chat.app.push_screen(AskText(question, text), answered)

    def change(self, title: str, text: str, hint: str, then: Callable[[str], object], *, in_lines: str) -> None:
        from app.tui.screens.dialogues import EditText

        def edited(result: str | None) -> None:
            if result is not None and result != text:
                then(result)
            self.to_prompt()

        self._chat.app.push_screen(EditText(title, text, hint), edited)

    def hide_notice(self) -> None:
        self._chat.notice.hide()

    def to_prompt(self, *, end: bool = False) -> None:
        if end:
            self._chat.transcript.follow()
        self._chat.prompt.focus()

    def write_answer(self) -> None:
        pass

    # --- screens ----------------------------------------------------------------------------------------------------

    def help(self) -> None:
        self._run_app("help")

    def keys(self) -> None:
        from app.tui.screens.keys import KeysScreen

        self._chat.app.push_screen(KeysScreen(), self._left)

    def chats(self) -> None:
        self._chat.chats.toggle()

    def open_chats(self) -> None:
        """Open the list of chats as a screen: there is no room for it beside the conversation."""
        from app.tui.screens.chats_side import ConversationsScreen

        def chosen(result: ConversationChosen | None) -> None:
            if result is not None:
                self.controller.open_conversation(result.conversation, result.message)
            self.to_prompt()

        self._chat.app.push_screen(ConversationsScreen(self.controller), chosen)

    def models(self) -> None:
        from app.tui.screens.models import ModelsScreen

        def chosen(model: str | None) -> None:
            if model is not None:
                use_model(self, model)
            self.to_prompt()

        self._chat.app.push_screen(ModelsScreen(self.controller), chosen)

    def offer_models(self) -> None:
        """Nothing is downloaded unasked: show what can be chosen."""
        from app.chat.first_run import FirstRun
        from app.tui.screens.first_run import FirstRunScreen

        self.controller.link.may_fetch = False
        self.first_run = FirstRun(self.controller)

        def left(all_models: bool | None) -> None:
            if all_models:
                self.models()
            self.to_prompt()

        self._chat.app.push_screen(FirstRunScreen(self.first_run, self._machine), left)

    def machines(self) -> None:
        from app.tui.screens.machines import MachinesScreen

        self._chat.app.push_screen(MachinesScreen(self.controller), self._left)

    def settings(self) -> None:
        from app.tui.screens.settings import SettingsScreen

        def left(problem: str | None) -> None:
            self.say(problem or "", "error")
            self.to_prompt()

        self._chat.app.push_screen(SettingsScreen(self.controller, self._machine), left)

    def personas(self) -> None:
        from app.settings.personas import open_personas
        from app.tui.screens.personas import PersonasScreen

        def chosen(result: Chosen | None) -> None:
            if result is not None:
                use_persona(self, result.persona)
            self.to_prompt()

        self._chat.app.push_screen(PersonasScreen(self.controller, open_personas()), chosen)

    def sampling(self, used: str = "") -> None:
        if used:
            self.say(f"The sampling of this chat is {used}.")
            return
        from app.tui.screens.sampling import SamplingScreen

        self._chat.app.push_screen(SamplingScreen(self.controller), self._left)

    def beams(self) -> None:
        self._chat.panels.toggle("beams")

    def several(self) -> None:
        from app.tui.screens.several import SeveralScreen

        turn = self.controller.answers.several
        if turn is None:
            self.say("Nothing was asked several times at once yet: /n 4 QUESTION asks four times.")
            return

        def left(picked: int | None) -> None:
            if picked is not None:
                self.controller.pick_answer(picked)
            self.to_prompt(end=True)

        self._chat.app.push_screen(SeveralScreen(self.controller, turn, self._chat.highlighter), left)

    def timing(self) -> None:
        self._chat.panels.toggle("timing")

    def log(self) -> None:
        from app.tui.screens.log import LogScreen

        self._chat.app.push_screen(LogScreen(), self._left)

    # --- the conversation and the prompt ----------------------------------------------------------------------------

    def thoughts(self) -> None:
        if self._chat.transcript.toggle_thoughts():
            self._tell_thoughts()
        else:
            self.say("No answer here has thoughts.")

    def _tell_thoughts(self) -> None:
        """Say that thoughts were opened or folded where nothing on the screen shows it."""
        transcript = self._chat.transcript
        if not transcript.thoughts_in_sight:
            are = "open" if any(view.thoughts_open for view in transcript.views) else "folded"
            self._chat.notice.whisper(f"The thoughts are {are} now, above, where the answer begins.")

    def edit(self, question: Entry) -> None:
        self._chat.editing.begin(question)

    def history(self, words: str) -> None:
        self._chat.drafting.history(words)

    def editor(self) -> None:
        self._chat.open_editor()

    def find(self, text: str) -> None:
        """Find ``text`` in the conversation, or what is typed then."""
        if not self.controller.thread.path:
            self.say("There is nothing to find in yet.", "warning")
            return
        self._chat.prompt.display = False
        self._chat.find_line.open(text)

    def message(self, entry: Entry, what: str) -> None:
        """Do with the message ``entry`` what its key asks for."""
        match what:
            case "copy":
                view = self._chat.transcript.view_of(entry)
                self.copying.message(entry, with_thoughts=view is not None and view.thoughts_open)
            case "code":
                self.copying.next_code(entry)
            case "edit":
                self.edit(entry)
            case "again":
                self.controller.regenerate(entry)
                self.to_prompt()
            case "find":
                self.find("")
            case "thoughts":
                self._tell_thoughts()
            case "continue":
                self.hide_notice()
                self.controller.continue_answer(entry)
                self.to_prompt(end=True)
            case "delete" | "delete_all":
                self.controller.deletions.message(entry, alternatives=what == "delete_all")
            case "undo":
                self.controller.deletions.undo()
            case "previous" | "next":
                self.controller.switch(entry, -1 if what == "previous" else 1)
            case _:
                self.to_prompt()

    def stop(self) -> None:
        self.controller.stop()
        self.to_prompt()

    def suspend(self) -> None:
        self._run_app("suspend_process")

    def quit(self) -> None:
        self._run_app("quit_chat")

    def _run_app(self, action: str) -> None:
        self._chat.app.run_worker(self._chat.app.run_action(f"app.{action}"), exit_on_error=True)

    def _left(self, _: object) -> None:
        self.to_prompt()
