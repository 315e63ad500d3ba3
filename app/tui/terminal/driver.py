"""Reading from and drawing on the terminal, and its end: a signal, or a terminal that is closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import termios
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from app.text_safety import one_line
from app.tui.terminal.drawn_pictures import SixelTable
from app.tui.terminal.graphics import PATIENCE_S as REPORTS_S
from app.tui.terminal.graphics import CellSize, cell_of
from app.tui.terminal.keys import KeyParser
from app.tui.terminal.output import kept_in_place

if TYPE_CHECKING:
    from textual.app import App


_LOOK_S = 0.1
"""Seconds between two checks of the reading thread whether it is to end."""
_READ_BYTES = 4096
_GIVEN_BACK = "\x1b[?2004l\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l"
"""Sequences that restore the terminal: no bracketed paste, wrapping lines, no mouse reports, plain keys, the main
screen, a visible cursor, no focus reports."""


_KEEP_TITLE, _OLD_TITLE = "\x1b[22;2t", "\x1b]2;\x07\x1b[23;2t"
"""Sequences that have the terminal remember the title of its window, and restore it. A terminal that remembers none
shows its own after an empty one."""


class DrivenApp(Protocol):
    """The part of the application that the driver needs."""

    sixels: SixelTable
    """The pictures that are sent in the places of their cells."""

    def end_soon(self, status: int) -> None:
        """End with the exit status ``status``, without asking the person."""
        ...


class TerminalDriver(LinuxDriver):
    """Textual's driver for Linux and macOS, made to end when the terminal is closed. Textual's would read for ever.

    Its application is a :class:`DrivenApp`.
    """

    def __init__(
        self, app: App[object], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        assert self._file is not None
        self._file = cast(Any, _Output(self._file, self._gone))
        self.sequences: dict[str, str] = {}
        """The sequence that the terminal last sent for each key, by the key's name."""
        self._title = ""
        self._title_before_stop = ""
        self._given_away = False
        self._reports_until = 0.0

    def ask(self, questions: str) -> None:
        """Send the terminal ``questions``, which it may answer, if it is one."""
        if questions and cast(_Output, self._file).isatty():
            self._reports_until = time.monotonic() + REPORTS_S
            self.write(questions)

    @property
    def cell(self) -> CellSize | None:
        """The pixels of a cell, if the system knows them."""
        return cell_of(cast(_Output, self._file).fileno())

    def run_input_thread(self) -> None:
        """Read until the application ends, or the terminal does."""
        parser = self._parser()
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                wait = _LOOK_S if parser.due is None else max(0.0, min(_LOOK_S, parser.due - time.monotonic()))
                if not selector.select(wait):
                    # A key is complete only when there is nothing left to read, however long this thread waited.
                    parser = self._hand_on(parser, parser.tick)
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
                    parser = self._hand_on(parser, partial(parser.feed, text))

    def _hand_on(self, parser: KeyParser, parse: Callable[[], Iterable[Message]]) -> KeyParser:
        """Hand on the events that ``parse`` gives. After an error, which is told, a new parser goes on."""
        try:
            for event in parse():
                self.process_message(event)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._app._handle_exception, error)
            return self._parser()
        return parser

    def _parser(self) -> KeyParser:
        return KeyParser(self._debug, self.sequences, awaits_reports=lambda: time.monotonic() < self._reports_until)

    def _sigtstp_application(self, *_: object) -> None:
        """Restore the terminal, then stop the whole job, as the shell waits for all of it: make may be between.

        The others must not stop before: the shell would have the terminal while it is still set for this program.
        """
        if self._auto_restart:
            self.suspend_application_mode()
            self._must_signal_resume = True
        os.killpg(os.getpgrp(), signal.SIGSTOP)

    def set_title(self, title: str) -> None:
        """Give the terminal's window ``title``. An empty one restores the title that it had before."""
        if self._given_away:
            self._title_before_stop = title
            return
        if title:
            self.write(f"{'' if self._title else _KEEP_TITLE}\x1b]2;{one_line(title)}\x07")
        elif self._title:
            self.write(_OLD_TITLE)
        self._title = title

    def write(self, data: str) -> None:
        """Draw, unless another program has the terminal now."""
        if not self._given_away:
            super().write(cast(DrivenApp, self._app).sixels.drawn(kept_in_place(data)))

    def suspend_application_mode(self) -> None:
        """Give the terminal to another program. What is drawn from now on is dropped."""
        super().suspend_application_mode()
        self._given_away = True

    def start_application_mode(self) -> None:
        self._given_away = False
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self.set_title(self._title_before_stop)

    def stop_application_mode(self) -> None:
        if not self._given_away:
            self._title_before_stop = self._title
            self.set_title("")
        super().stop_application_mode()

    def restore_now(self) -> None:
        """Restore the terminal from a process that is about to be ended. Blocks if the terminal accepts nothing."""
        with contextlib.suppress(termios.error, OSError):
            if self.attrs_before is not None:
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)
            title = _OLD_TITLE if self._title else ""
            os.write(cast(_Output, self._file).fileno(), (title + _GIVEN_BACK).encode())

    def _gone(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(cast(DrivenApp, self._app).end_soon, HUNG_UP)


class _Output:
    """The terminal as a file whose writes never fail, even when the terminal is gone.

    The thread that writes must not die: the application would wait for it for ever.
    """

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


HUNG_UP = 128 + signal.SIGHUP
"""Exit status when the terminal was closed: 128 plus the number of the signal, as in a shell."""

_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 10.0
"""Seconds for an orderly end: saving through another program's lock, leaving a ring, ending the engine."""


def end_at_last(status: int, before: Callable[[], None], patience_s: float) -> None:
    """End the process with ``status`` after ``patience_s`` if it still runs then.

    ``before`` is called first, and not waited for if it blocks.
    """

    def end() -> None:
        last = threading.Thread(target=before, daemon=True)
        last.start()
        last.join(patience_s / 10)
        os._exit(status)

    timer = threading.Timer(patience_s, end)
    timer.daemon = True
    timer.start()


@contextmanager
def ended_by_signals(end_soon: Callable[[int], None], in_time: Callable[[int], None]) -> Iterator[None]:
    """Handles signals inside: SIGHUP, SIGTERM and SIGINT call ``in_time`` at once and ``end_soon`` in the running event
    loop.

    Both get the exit status. SIGHUP counts even if it was ignored before (nohup): a screen is useless without its
    terminal.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        in_time(128 + number)
        loop.call_soon_threadsafe(end_soon, 128 + number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # The program is ending: from here on a signal may do what it did before.
            signal.signal(number, handler)
