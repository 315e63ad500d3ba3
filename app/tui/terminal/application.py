"""The base class of both applications: it ends with its terminal, and copies to the person's clipboard."""

from __future__ import annotations

import asyncio
import os
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from rich.console import Console
from textual import constants, events, on, work
from textual.app import SuspendNotSupported, SystemCommand
from textual.driver import Driver
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import Input, TextArea

from app.clipboard import Clipboard, copies_file
from app.engine_client import Engine
from app.text_safety import one_line
from app.tui.terminal.colours import legible
from app.tui.terminal.drawn_pictures import SixelTable
from app.tui.terminal.driver import PATIENCE_S, TerminalDriver, end_at_last, ended_by_signals
from app.tui.terminal.graphics import Graphics, TerminalReport, questions
from app.tui.terminal.guarded import GuardedApp
from app.tui.terminal.output import with_safe_lines

MOST_NOTICES = 3
"""Number of passing notices that are shown at once, the newest."""
EDITOR = "editor"
"""Group of the workers that wait for an editor to which the terminal was given."""


class CopyRequested(Message):
    """``text`` is to be copied to the clipboard; ``what`` names it in the notice (``The answer``)."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__()
        self.text = text
        self.what = what


class TerminalApp(GuardedApp):
    """An application on a terminal that may be closed at any moment; its result is the exit status."""

    patience_s: ClassVar[float] = PATIENCE_S
    """Maximum seconds that an orderly end may take."""

    def __init__(self) -> None:
        # As Textual does it, which needs the theme before it has done so.
        system: Any = constants.COLOR_SYSTEM
        self._few_colours = Console(color_system=system, force_terminal=True).color_system == "standard"
        # Without this, NO_COLOR would be shades of grey, which are colours to a terminal.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self._ending: asyncio.Task[None] | None = None
        self._limited = False
        self.graphics = Graphics()
        self.sixels = SixelTable()
        self.recent_commands: list[str] = []
        """Titles of the commands that were run last by their names, the last one first."""

    @property
    def still(self) -> bool:
        """Whether nothing must blink, slide or spin."""
        return self.animation_level == "none"

    @on(events.DescendantFocus)
    def _hold_cursor(self, event: events.DescendantFocus) -> None:
        if self.still and isinstance(event.widget, Input | TextArea):
            event.widget.cursor_blink = False

    def _refresh_notifications(self) -> None:
        # More of them would reach down to what is typed.
        for passed in list(self._notifications)[:-MOST_NOTICES]:
            self._unnotify(passed, refresh=False)
        super()._refresh_notifications()

    def ask_for_graphics(self) -> None:
        """Ask the terminal how it draws pictures. Nothing waits for the answer."""
        if isinstance(self._driver, TerminalDriver):
            self.graphics = Graphics(true_colours=self.console.color_system == "truecolor")
            self.graphics.cell = self._driver.cell
            self._driver.ask(questions(os.environ))

    @on(TerminalReport)
    def _take_report(self, event: TerminalReport) -> None:
        before = self.graphics.protocol
        more = self.graphics.take(event.sequence)
        if more and isinstance(self._driver, TerminalDriver):
            self._driver.ask(more)
        if self.graphics.protocol != before:
            self.show_graphics()

    @on(events.Resize)
    def _measure_cell(self) -> None:
        # The size of the letters may have changed with that of the window.
        cell = self._driver.cell if isinstance(self._driver, TerminalDriver) else None
        if cell is not None and cell != self.graphics.cell:
            self.graphics.cell = cell
            if self.graphics.protocol is not None:
                self.show_graphics()

    def show_graphics(self) -> None:
        """:attr:`graphics` has changed."""

    def show_terminal_title(self, title: str) -> None:
        """Give the terminal's window ``title``. An empty one restores the title that it had before."""
        if isinstance(self._driver, TerminalDriver):
            self._driver.set_title(title)

    def get_driver_class(self) -> type[Driver]:
        return TerminalDriver

    def get_theme(self, theme_name: str) -> Theme | None:
        """The theme of that name. A terminal with sixteen colours gets one that is made of them.

        The nearest of the sixteen to a colour need not be one that can be read.
        """
        found = super().get_theme(theme_name)
        if found is None or found.ansi or not self._few_colours:
            return found
        return super().get_theme("ansi-dark" if found.dark else "ansi-light")

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = legible(super().get_css_variables(), dark=self.current_theme.dark)
        return self.theme_variables

    def get_line_filters(self) -> Sequence[LineFilter]:
        return with_safe_lines(super().get_line_filters())

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)
        yield SystemCommand("Suspend", "Go back to the shell; fg continues", self.action_suspend_process)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Gives the terminal to another program inside. Nothing that this program draws or prints reaches it.

        Raises SuspendNotSupported if there is no terminal to give away.
        """
        # Textual's would send to the terminal what is printed, and restores the streams in an order that holds only
        # if the event loop does nothing else inside.
        if self._driver is None or not self._driver.can_suspend:
            raise SuspendNotSupported
        self.app_suspend_signal.publish(self)
        self._driver.suspend_application_mode()
        with self._driver.no_automatic_restart():
            yield
        self._driver.resume_application_mode()
        self.app_resume_signal.publish(self)
        self.refresh(layout=True)

    def action_suspend_process(self) -> None:
        """Stop this job, so that the shell is there again; its ``fg`` continues."""
        if self._driver is None or not self._driver.can_suspend:
            return
        if os.getpgrp() == os.getsid(0):
            # Nobody could continue it: no shell began this job, as in a terminal that was opened for this program.
            self.notify("There is no shell to go back to.", severity="warning", markup=False)
            return
        super().action_suspend_process()

    def sequence_of(self, key: str) -> str:
        """The sequence that the terminal last sent for ``key``; empty if it is not known."""
        return self._driver.sequences.get(key, "") if isinstance(self._driver, TerminalDriver) else ""

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
            except Exception as error:
                self._handle_exception(error)
                result = 1
            finally:
                await engine.close()
        if self.last_words:
            print(f"privatellm: {self.last_words}", file=sys.stderr)  # noqa: T201
        return result if result is not None else self.return_code or 0

    def end_in_time(self, status: int) -> None:
        """End the process some seconds from now if it has not ended by then. May be called in a signal handler."""
        if not self._limited:
            self._limited = True
            driver = self._driver
            end_at_last(
                status, driver.restore_now if isinstance(driver, TerminalDriver) else lambda: None, self.patience_s
            )

    def leave_in_time(self) -> None:
        """End the process some seconds from now, although something may wait for ever. Only on a terminal: an
        application in a larger program ends by itself."""
        if isinstance(self._driver, TerminalDriver):
            self.end_in_time(0)

    async def _end(self, status: int) -> None:
        try:
            await self.keep()
        finally:
            await self._end_editor()
            self.exit(status)

    async def _end_editor(self) -> None:
        """End the editor that is open, so that it does not stay on the terminal without this program."""
        open_ = [worker for worker in self.workers if worker.group == EDITOR]
        for worker in open_:
            worker.cancel()
        await asyncio.gather(*(worker.wait() for worker in open_), return_exceptions=True)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy what was selected with the mouse. Not all terminals pass text on to the clipboard by themselves."""
        self._copy(text, "The selection")

    @on(CopyRequested)
    def _copy_requested(self, event: CopyRequested) -> None:
        self._copy(event.text, event.what)

    def _copy(self, text: str, what: str) -> None:
        """Copy ``text`` and say what happened, or how to copy it by hand."""
        self._clipboard = text
        self._copy_in_background(text, what)

    @work(group="copy", exclusive=True)
    async def _copy_in_background(self, text: str, what: str) -> None:
        clipboard = Clipboard(self._write_sequences, copies_file if self.may_write_copies else None)
        self.notify(one_line(await clipboard.copy(text, what)), markup=False, timeout=6)

    @property
    def may_write_copies(self) -> bool:
        """Whether copied text may be written to a file if there is no clipboard."""
        return True

    def _write_sequences(self, sequences: str) -> None:
        if self._driver is not None:
            self._driver.write(sequences)
            self._driver.flush()
