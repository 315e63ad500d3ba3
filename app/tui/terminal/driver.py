"""Reads from and draws on the terminal, and notices when it is gone."""

from __future__ import annotations

import contextlib
import os
import selectors
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from textual.drivers.linux_driver import LinuxDriver

from app.tui.terminal.ending import HUNG_UP
from app.tui.terminal.keys import KeyParser

if TYPE_CHECKING:
    from textual.app import App

    from app.tui.terminal.application import TerminalApp

_LOOK_S = 0.1
"""How often the reading thread looks whether it is to end."""
_READ_BYTES = 4096
_GIVEN_BACK = "\x1b[?2004l\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l"
"""No pastes in brackets, lines that wrap, no mouse, plain keys, the first screen, a cursor, no word of the focus."""


class TerminalDriver(LinuxDriver):
    """Textual's driver for Linux and macOS, which would read for ever from a terminal that was closed."""

    def __init__(
        self, app: App[object], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        assert self._file is not None
        self._file = cast(Any, _Output(self._file, self._gone))

    def run_input_thread(self) -> None:
        """Read until the application ends, or the terminal does."""
        parser = KeyParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                wait = _LOOK_S if parser.due is None else max(0.0, min(_LOOK_S, parser.due - time.monotonic()))
                if not selector.select(wait):
                    # Only when there is nothing to read is a key over; that this thread had to wait means nothing.
                    for event in parser.tick():
                        self.process_message(event)
                    continue
                try:
                    data = os.read(self.fileno, _READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:  # EIO: this is no terminal of this session any more
                    data = b""
                if not data:
                    self._gone()
                    return
                if text := decode(data):
                    for event in parser.feed(text):
                        self.process_message(event)

    def restore_now(self) -> None:
        """Give the terminal back although nothing else works any more. May block if the terminal takes nothing."""
        with contextlib.suppress(termios.error, OSError):
            if self.attrs_before is not None:
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)
            os.write(cast(_Output, self._file).fileno(), _GIVEN_BACK.encode())

    def _gone(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(cast("TerminalApp", self._app).end_soon, HUNG_UP)


class _Output:
    """The terminal as a file that takes everything, also when it is gone: the thread that writes to it must not die,
    for the application would wait for it for ever."""

    def __init__(self, file: IO[str], on_gone: Callable[[], None]) -> None:
        self._file = file
        self._on_gone = on_gone
        self._is_gone = False

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            act()
        except OSError:
            self._is_gone = True
            self._on_gone()
