"""The line above a conversation: its title, and what its answers are asked with."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from app.chat.setup import setup_line
from app.chat.thread import Thread
from app.settings.schema import Settings
from app.text_safety import one_line

TEMPORARY = "◌ Temporary chat: nothing is saved"
"""Title of a conversation that is kept in memory only, before the title made from its first question."""

_LONGEST_TITLE = 60
"""Maximum characters of a chat's title in the title of the window."""


def terminal_title(thread: Thread, *, ended: bool = False) -> str:
    """The title of the window while ``thread`` is shown. That of a temporary chat stays within it.

    ``ended``: an answer has ended that the person has not seen.
    """
    title = one_line(thread.title) if thread.path and thread.memory is None else ""
    name = f"{title[:_LONGEST_TITLE]} – privatellm" if title else "privatellm"
    return f"✓ {name}" if ended else name


class Heading(Horizontal):
    """Hidden while there is nothing to say."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.shown = "", ""
        """The title and the setup that are shown."""
        self.display = False

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield Static(id="setup", markup=False)

    def show(self, thread: Thread, options: Settings) -> bool:
        """Show those of ``thread``. Returns whether they are others than before."""
        title = one_line(thread.title) if thread.path else ""
        if thread.memory is not None:
            title = f"{TEMPORARY} · {title}" if title else TEMPORARY
        shown = title, one_line(setup_line(thread, options))
        # Updating a line lays out the whole screen.
        if shown == self.shown:
            return False
        self.shown = shown
        for name, text in zip(("#title", "#setup"), shown, strict=True):
            line = self.query_one(name, Static)
            line.update(Content(text))
            line.display = bool(text)
        self.display = any(shown)
        self.set_class(not shown[0], "-untitled")
        return True
