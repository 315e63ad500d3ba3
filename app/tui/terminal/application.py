"""What both screens share: they end with their terminal, and copy to the clipboard of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from textual import work
from textual.app import App
from textual.driver import Driver
from textual.filter import LineFilter

from app.engine_client import Engine
from app.tui.clipboard import copy
from app.tui.terminal.driver import TerminalDriver
from app.tui.terminal.ending import end_at_last, ended_by_signals
from app.tui.terminal.safe_lines import with_safe_lines


class TerminalApp(App[int]):
    """An application on a terminal that may be closed at any moment; its result is the exit status."""

    def __init__(self) -> None:
        super().__init__()
        self._ending: asyncio.Task[None] | None = None
        self._limited = False

    def get_driver_class(self) -> type[Driver]:
        return TerminalDriver

    def get_line_filters(self) -> Sequence[LineFilter]:
        return with_safe_lines(super().get_line_filters())

    async def keep(self) -> None:
        """Bring to disk and close what must be, before the end."""
        raise NotImplementedError

    def end_soon(self, status: int) -> None:
        """End with ``status`` and without a question, from outside the application: its terminal is gone, or somebody
        sent a signal."""
        self.end_in_time(status)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(status), name="end")

    async def run_to_end(self, engine: Engine) -> int:
        """Run on this terminal until the person leaves or it ends, and close ``engine``; the exit status."""
        with ended_by_signals(self.end_soon, self.end_in_time):
            try:
                result = await self.run_async()
            finally:
                await engine.close()
        return result if result is not None else self.return_code or 0

    def end_in_time(self, status: int) -> None:
        """However it goes on, the process ends some time from now. For any moment: from a signal handler too."""
        if not self._limited:
            self._limited = True
            driver = self._driver
            end_at_last(status, driver.restore_now if isinstance(driver, TerminalDriver) else lambda: None)

    async def _end(self, status: int) -> None:
        try:
            await self.keep()
        finally:
            self.exit(status)

    def copy_to_clipboard(self, text: str) -> None:
        """Also what was selected with the mouse: terminals that pass text on to the clipboard are not all."""
        self.copy_out(text, "The selection")

    def copy_out(self, text: str, what: str) -> None:
        """Copy ``text`` and say that ``what`` was copied, or how to get at it."""
        self._clipboard = text
        self._copy(text, what)

    @work(group="copy", exclusive=True)
    async def _copy(self, text: str, what: str) -> None:
        self.notify(await copy(text, what, super().copy_to_clipboard), markup=False, timeout=4)
