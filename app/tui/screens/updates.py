"""What the controller changed, on its way to the screens, and whether a screen can still show it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from textual.message import Message
from textual.screen import Screen

from app.chat.state import Update


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


def is_open(screen: Screen[Any]) -> bool:
    """Whether ``screen`` still has its widgets, which are gone as soon as it begins to close."""
    return screen.is_attached and screen in screen.app.screen_stack
