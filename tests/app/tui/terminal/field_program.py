"""A prompt on a real terminal, for tests that run it in tmux.

ctrl+y copies, ctrl+x opens the editor, ctrl+z suspends, ctrl+q ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from app.editor import edited
from app.tui.chat.prompt import Prompt
from app.tui.terminal.application import EDITOR, CopyRequested, TerminalApp


class FieldApp(TerminalApp):
    CSS = "Prompt { height: 6; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+y", "copy", priority=True),
        Binding("ctrl+q", "leave", priority=True),
        Binding("ctrl+z", "suspend_process"),
    ]

    drawn = 0

    def compose(self) -> ComposeResult:
        yield Prompt("prompt")
        yield Static()

    def on_mount(self) -> None:
        self.query_one(Prompt).placeholder = "Type here"
        self.query_one(Prompt).focus()

    def copies_file(self) -> Path:
        return Path(sys.argv[1])

    def action_copy(self) -> None:
        self.post_message(CopyRequested(self.query_one(Prompt).text, "The text"))

    @on(Prompt.EditorWanted)
    def _open_editor(self) -> None:
        self.run_worker(self._edit(), group=EDITOR)
        self.set_interval(0.01, self._draw)

    async def _edit(self) -> None:
        prompt = self.query_one(Prompt)
        prompt.put_edited(await edited(prompt.whole_text, self.suspend))

    def _draw(self) -> None:
        """Draw something, and leave in the file how often."""
        self.drawn += 1
        self.query_one(Static).update(f"drawn {self.drawn}")
        self.copies_file().write_text(str(self.drawn))
        print("printed")

    def action_leave(self) -> None:
        self.exit(0)

    async def keep(self) -> None:
        pass


class NoEngine:
    async def close(self) -> None:
        pass


if __name__ == "__main__":
    status = asyncio.run(FieldApp().run_to_end(NoEngine()))  # type: ignore[arg-type]
    assert sys.stdout is sys.__stdout__
    sys.exit(status)
