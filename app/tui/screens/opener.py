"""The screens that the chat opens. Each is imported when it is first opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.machine import Machine
from app.tui.screens.command_host import CommandHost

if TYPE_CHECKING:
    from app.chat.first_run import FirstRun


class ScreenOpener:
    """Opens screens above the chat, and does what was chosen there. ``machine``: what this machine has, if known."""

    def __init__(self, chat: CommandHost, machine: Machine | None) -> None:
        self.first_run: FirstRun | None = None
        """Set if there was no model at the start."""
        self._chat = chat
        self._controller = chat.controller
        self._machine = machine

    def chats(self) -> None:
        """The list of chats, where there is no room for it beside the conversation."""
        from app.tui.screens.chat_browser import ConversationChosen
        from app.tui.screens.chats_side import ConversationsScreen

        def chosen(result: ConversationChosen | None) -> None:
            if result is not None:
                self._controller.open_conversation(result.conversation, result.message)
            self._chat.focus_prompt()

        self._chat.app.push_screen(ConversationsScreen(self._controller), chosen)

    def model(self, name: str = "") -> None:
        """Use the model ``name``; without one, let the person choose."""

        def chosen(model: str | None) -> None:
            if model is not None:
                self._use_model(model)
            self._chat.focus_prompt()

        if name:
            chosen(name)
            return
        from app.tui.screens.models import ModelsScreen

        self._chat.app.push_screen(ModelsScreen(self._controller), chosen)

    def _use_model(self, model: str) -> None:
        if model == self._controller.options.model and self._controller.is_saved("model"):
            self._controller.load_again(fetch=True)
            return
        problem = self._controller.change_settings({"model": model})
        if problem:
            self._chat.show_notice(problem, "error")

    def offer_models(self) -> None:
        """Nothing is downloaded unasked: show what can be chosen."""
        from app.chat.first_run import FirstRun
        from app.tui.screens.first_run import FirstRunScreen

        self._controller.link.may_fetch = False
        self.first_run = FirstRun(self._controller)

        def left(all_models: bool | None) -> None:
            if all_models:
                self.model()
            self._chat.focus_prompt()

        self._chat.app.push_screen(FirstRunScreen(self.first_run, self._machine), left)

    def settings(self) -> None:
        from app.tui.screens.settings import SettingsScreen

        def left(problem: str | None) -> None:
            if problem:
                self._chat.show_notice(problem, "error")
            self._chat.focus_prompt()

        self._chat.app.push_screen(SettingsScreen(self._controller, self._machine), left)

    def status(self) -> None:
        from app.chat.words import status_words
        from app.tui.screens.dialogues import Tell

        self._chat.app.push_screen(Tell("Status", "\n".join(status_words(self._controller.status))))

    def log(self) -> None:
        from app.tui.screens.log import LogScreen

        self._chat.app.push_screen(LogScreen(), lambda result: self._chat.focus_prompt())

    def keys(self) -> None:
        from app.tui.screens.keys import KeysScreen

        self._chat.app.push_screen(KeysScreen(), lambda result: self._chat.focus_prompt())

    def machines(self) -> None:
        from app.tui.screens.machines import MachinesScreen

        self._chat.app.push_screen(MachinesScreen(self._controller), lambda result: self._chat.focus_prompt())
