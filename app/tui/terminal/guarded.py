"""An application that goes on after an error in one of its handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from textual._context import active_message_pump
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.dom import DOMNode, NoScreen
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.worker import WorkerFailed

from app.tui.terminal.output import log_error, screen_log

MOST_FAILURES = 100
"""Number of errors without a drawing between them after which the application ends: one leads to the next for ever."""


class GuardedApp(App[int]):
    """An application of which an error in a handler, an action, a worker or a timer is a sentence and a log entry.

    A screen that fails while it is built, or twice later, is closed. The application ends only where it cannot go on:
    when its main screen cannot be built, or when errors repeat for ever.
    """

    def __init__(self, *, ansi_color: bool | None = None) -> None:
        super().__init__(ansi_color=ansi_color)
        self.last_words = ""
        """Why the application ended by itself, as a sentence; empty if it did not."""
        self._serves = False
        self._failures = 0
        self._failed: set[Screen[Any]] = set()

    @property
    def log_words(self) -> str | Path:
        """The name of the log in messages while the application runs."""
        return screen_log()

    @property
    def main_screen(self) -> Screen[Any] | None:
        """The screen without which the application is of no use; None before there is one."""
        return self.screen_stack[0] if self.screen_stack else None

    @property
    def kept_words(self) -> str:
        """What is kept whatever goes wrong, in words; empty if nothing is."""
        return ""

    def end_soon(self, status: int) -> None:
        """End with the exit status ``status``, without asking the person."""
        self.exit(status)

    # --- where Textual would end the application --------------------------------------------------------------------

    def _register_child(self, parent: DOMNode, child: Widget, before: int | None, after: int | None) -> None:
        self._guard(child)
        super()._register_child(parent, child, before, after)

    def _start_widget(self, parent: Widget, widget: Widget) -> None:
        self._guard(widget)
        super()._start_widget(parent, widget)

    def _guard(self, widget: Widget) -> None:
        """Let ``widget`` go on after an error in one of its handlers.

        Textual would end the message loop of the widget and remove it. Its own widgets cannot be given another base, so
        each one is given another method before it starts.
        """
        if "_dispatch_message" in vars(widget):
            return
        dispatch = widget._dispatch_message

        async def guarded(message: Message) -> None:
            try:
                await dispatch(message)
            except Exception as error:
                self._handle_exception(error)
                # A widget with an error for each message would leave no turn to anything else.
                await asyncio.sleep(0)

        widget._dispatch_message = guarded  # type: ignore[method-assign]
        if isinstance(widget, Screen):
            self._dismiss_once(widget)

    def _dismiss_once(self, screen: Screen[Any]) -> None:
        """Let ``screen`` be dismissed only while it is the one on top.

        Textual would close whichever is on top: a second key in the moment in which a screen closes would close the
        main screen.
        """
        dismiss: Callable[[Any], AwaitComplete] = screen.dismiss

        def dismiss_if_on_top(result: Any = None) -> AwaitComplete:
            on_top = screen is self.screen and screen in self._closable
            return dismiss(result) if on_top else AwaitComplete()

        screen.dismiss = dismiss_if_on_top  # type: ignore[method-assign]

    async def _dispatch_message(self, message: Message) -> None:
        if not self._serves:
            # Without what happens before the first message there is no application.
            await super()._dispatch_message(message)
            return
        try:
            await super()._dispatch_message(message)
        except Exception as error:
            self._handle_exception(error)

    async def _process_messages_loop(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(self._task_failed)
        self._serves = True
        try:
            await super()._process_messages_loop()
        finally:
            self._serves = False
            loop.set_exception_handler(before)

    def _task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error of a task that nobody waits for, or of a callback."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._handle_exception(error)
        else:
            loop.default_exception_handler(context)

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        failures = self._failures
        super()._display(screen, renderable)
        if self._failures == failures:
            self._failures = 0

    # --- what happens instead ---------------------------------------------------------------------------------------

    def _handle_exception(self, error: Exception) -> None:
        if isinstance(error, WorkerFailed) and isinstance(error.error, Exception):
            error = error.error
        log_error(error)
        if self.last_words:
            return
        if self._exception is None:
            # Tests end with the first error.
            self._exception = error
            self._exception_event.set()
        self._failures += 1
        screen, built = self._where()
        main = self.main_screen
        if not self._serves or self._failures > MOST_FAILURES or (screen is main and not built):
            self._end_failed()
            return
        if screen is not None and screen in self._closable and (not built or screen in self._failed):
            self.call_later(self._close, screen)
        elif screen is not None:
            self._failed.add(screen)
        self._tell_failure()

    def _where(self) -> tuple[Screen[Any] | None, bool]:
        """The screen at which something is done now, and whether it, and what is being done in it, has been built."""
        pump = active_message_pump.get(None)
        if not isinstance(pump, DOMNode) or pump is self:
            return None, True
        try:
            screen = pump.screen
        except NoScreen:
            return None, True
        if screen is self.main_screen:
            return screen, screen._is_mounted
        return screen, pump._is_mounted

    @property
    def _closable(self) -> list[Screen[Any]]:
        """The screens above the main one."""
        stack, main = self.screen_stack, self.main_screen
        return stack[stack.index(main) + 1 :] if main in stack else []

    def _close(self, screen: Screen[Any]) -> None:
        self._failed.discard(screen)
        if screen in self._closable and self.screen is screen:
            screen.dismiss(None)

    def _tell_failure(self) -> None:
        words = self._failure_words("Go on as before", self.log_words)
        if all(notice.message != words for notice in self._notifications):
            self.notify(words, severity="error", markup=False, timeout=10)

    def _failure_words(self, next_step: str, log: str | Path) -> str:
        """The message about an error of this program, with the next step and the place of the details."""
        kept = self.kept_words and f"; {self.kept_words}"
        return f"Something went wrong{kept}. {next_step}; details are in {log}."

    def _end_failed(self) -> None:
        self.last_words = self._failure_words("Start the program again", screen_log())
        self._return_code = 1
        self.end_soon(1)
