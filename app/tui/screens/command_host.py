"""What the commands of the chat screen need of it."""

from __future__ import annotations

from typing import Any, Protocol

from textual.app import App

from app.chat.controller import ChatController
from app.chat.state import Severity


class CommandHost(Protocol):
    """The chat screen as its commands see it."""

    controller: ChatController

    @property
    def app(self) -> App[Any]:
        """The application, on which a command opens its own screens."""
        ...

    def show_notice(self, text: str, severity: Severity = "information", *, beside: bool = False) -> None:
        """Show one line to the person."""
        ...

    def focus_prompt(self) -> None:
        """Go back to typing."""
        ...
