"""The start of the chat: with the latest conversation, another model, or a persona. No Textual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.chat.state import UserNotice
from app.conversations.store import StoreError
from app.settings.file import SettingsFile
from app.settings.personas import Persona

if TYPE_CHECKING:
    from app.chat.controller import ChatController


@dataclass(frozen=True)
class Start:
    """The choices of the command line.

    ``model`` (empty: that of the persona or the settings) is used until another one is chosen or the program ends. The
    settings file keeps its own.
    """

    latest: bool = False
    """True to go on with the conversation that was changed last."""
    model: str = ""
    persona: Persona | None = None

    def choose_model(self, settings: SettingsFile) -> None:
        """Make ``settings`` name the wanted model before any is loaded. Raises SettingError."""
        model = self.model or (self.persona.model if self.persona is not None else "")
        if model:
            settings.use("model", model)

    def begin(self, controller: ChatController) -> None:
        """Show what was asked for. Called once, in the controller's event loop."""
        if self.latest:
            self._open_latest(controller)
        if self.persona is not None:
            controller.setup.use_persona(replace(self.persona, model=self.model or self.persona.model))

    def _open_latest(self, controller: ChatController) -> None:
        try:
            conversations = controller.store.conversations()
        except StoreError as error:
            controller.tell(UserNotice(str(error), "error"))
            return
        if conversations:
            controller.open_conversation(max(conversations, key=lambda conversation: conversation.updated).id)
        else:
            controller.tell(UserNotice("There is no earlier chat to continue: this is a new one."))
