"""A prompt on a real terminal, for tests that run it in tmux. ctrl+y copies, ctrl+z suspends, ctrl+q ends."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from app.tui.chat.prompt import Prompt
from app.tui.terminal.application import CopyRequested, TerminalApp


class FieldApp(TerminalApp):
    CSS = "Prompt { height: 6; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+y", "copy", priority=True),
        Binding("ctrl+q", "leave", priority=True),
        Binding("ctrl+z", "suspend_process"),
    ]

    def compose(self) -> ComposeResult:
        yield Prompt("prompt")

    def on_mount(self) -> None:
        self.query_one(Prompt).placeholder = "Type here"
        self.query_one(Prompt).focus()

    def copies_file(self) -> Path:
        return Path(sys.argv[1])

    def action_copy(self) -> None:
        self.post_message(CopyRequested(self.query_one(Prompt).text, "The text"))

    def action_leave(self) -> None:
        self.exit(0)

    async def keep(self) -> None:
        pass


class NoEngine:
    async def close(self) -> None:
        pass


if __name__ == "__main__":
    asyncio.run(FieldApp().run_to_end(NoEngine()))  # type: ignore[arg-type]
