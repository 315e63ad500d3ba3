"""The base class of both applications: it ends with its terminal, and copies to the machine's clipboard."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual import on, work
from textual.app import App
from textual.driver import Driver
from textual.filter import LineFilter
from textual.message import Message

from app.engine_client import Engine
from app.tui.terminal.driver import PATIENCE_S, TerminalDriver, end_at_last, ended_by_signals
from app.tui.terminal.output import with_safe_lines


class CopyRequested(Message):
    """``text`` is to be copied to the clipboard; ``what`` names it in the notice (``The answer``)."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__()
        self.text = text
        self.what = what


class TerminalApp(App[int]):
    """An application on a terminal that may be closed at any moment; its result is the exit status."""

    patience_s: ClassVar[float] = PATIENCE_S
    """Maximum seconds that an orderly end may take."""

    def __init__(self) -> None:
        super().__init__()
        self._ending: asyncio.Task[None] | None = None
        self._limited = False

    def get_driver_class(self) -> type[Driver]:
        return TerminalDriver

    def get_line_filters(self) -> Sequence[LineFilter]:
        return with_safe_lines(super().get_line_filters())

    @abstractmethod
    async def keep(self) -> None:
        """Save and close before the end what would be lost otherwise."""

    def end_soon(self, status: int) -> None:
        """End with ``status`` without asking: the terminal is gone, or a signal was received."""
        self.end_in_time(status)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(status), name="end")

    async def run_to_end(self, engine: Engine) -> int:
        """Run until the person leaves or the terminal ends, then close ``engine``; the exit status."""
        with ended_by_signals(self.end_soon, self.end_in_time):
            try:
                result = await self.run_async()
            finally:
                await engine.close()
        return result if result is not None else self.return_code or 0

    def end_in_time(self, status: int) -> None:
        """End the process some seconds from now if it has not ended by then. May be called in a signal handler."""
        if not self._limited:
            self._limited = True
            driver = self._driver
            end_at_last(
                status, driver.restore_now if isinstance(driver, TerminalDriver) else lambda: None, self.patience_s
            )

    async def _end(self, status: int) -> None:
        try:
            await self.keep()
        finally:
            self.exit(status)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy what was selected with the mouse. Not all terminals pass text on to the clipboard by themselves."""
        self._copy(text, "The selection")

    @on(CopyRequested)
    def _copy_requested(self, event: CopyRequested) -> None:
        self._copy(event.text, event.what)

    def _copy(self, text: str, what: str) -> None:
        """Copy ``text`` and notify that ``what`` was copied, or how to copy it by hand."""
        self._clipboard = text
        self._copy_in_background(text, what)

    @work(group="copy", exclusive=True)
    async def _copy_in_background(self, text: str, what: str) -> None:
        self.notify(await copy_text(text, what, super().copy_to_clipboard), markup=False, timeout=4)


_WAIT_S = 3.0


def clipboard_tools(environment: Mapping[str, str] = os.environ, system: str = sys.platform) -> list[list[str]]:
    """Commands that take the text on their standard input, best first, whether installed or not."""
    if system == "darwin":
        return [["pbcopy"]]
    found: list[list[str]] = []
    if environment.get("WAYLAND_DISPLAY"):
        found.append(["wl-copy"])
    if environment.get("DISPLAY"):
        found += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    if environment.get("WSL_DISTRO_NAME"):
        found.append(["clip.exe"])
    return found


async def copy_text(text: str, what: str, through_terminal: Callable[[str], None]) -> str:
    """Copy ``text``; returns the sentence to show.

    The machine's own tool is tried first. Over SSH only the terminal can reach the person's clipboard.
    """
    remote = bool(os.environ.get("SSH_CONNECTION"))
    if not remote:
        for command in clipboard_tools():
            if shutil.which(command[0]) and await _run(command, text):
                return f"{what} was copied."
    through_terminal(text)
    return "Sent to the terminal's clipboard. If pasting fails, select text with shift and the mouse."


def tool_environment(tool: str, environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The environment of ``tool``; None: that of this program. pbcopy decodes its input by the locale."""
    if tool != "pbcopy":
        return None
    return {key: value for key, value in environment.items() if key != "LC_ALL"} | {"LC_CTYPE": "UTF-8"}


async def _run(command: list[str], text: str) -> bool:
    """Did ``command`` take the text? A tool that keeps running to serve the clipboard does not block this."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=tool_environment(command[0]),
            start_new_session=True,
        )
    except OSError:
        return False
    try:
        await asyncio.wait_for(process.communicate(text.encode("utf-8", "replace")), _WAIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
    return process.returncode == 0
