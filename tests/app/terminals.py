"""A program on a real terminal: a pseudo terminal whose other side the test holds."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any

import psutil

from app.tui.terminal.driver import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 600.0
_PROGRAM = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignore_hangup} else signal.SIG_DFL)
from app import engine_process
from app.tui.terminal.application import TerminalApp
TerminalApp.patience_s = {patience_s!r}
if {script!r}:
    engine_process.host_command = lambda: (sys.executable, {script!r}, "")
from app.cli import main
sys.exit(main())
"""


class Terminal:
    """``privatellm`` with ``arguments`` as the leader of a session on a terminal of 80 by 24.

    ``scripted``: the engine process is ``script``. ``ignore_hangup``: it is started with SIGHUP ignored, as make,
    nohup and some shells do. ``patience_s``: seconds that an orderly end may take. ``wrap`` changes the command.
    """

    def __init__(
        self,
        home: Path,
        *arguments: str,
        scripted: bool = True,
        ignore_hangup: bool = False,
        script: str = "scripted_engine.py",
        patience_s: float = PATIENCE_S,
        term: str = "xterm-256color",
        wrap: Callable[..., list[str]] = lambda *command: list(command),
    ) -> None:
        self.master, self.slave = os.openpty()
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes: list[Any] = termios.tcgetattr(self.slave)
        engine = str(Path(__file__).with_name(script)) if scripted else ""
        program = _PROGRAM.format(script=engine, ignore_hangup=ignore_hangup, patience_s=patience_s)
        self.process = subprocess.Popen(
            wrap(sys.executable, "-P", "-c", program, *arguments),
            stdin=self.slave, stdout=self.slave, stderr=self.slave, cwd=ROOT, start_new_session=True,
            env={**os.environ, "PRIVATELLM_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                 "TERM": term,
                 "TEXTUAL_ANIMATIONS": "none"},
        )  # fmt: skip
        self.drawn = b""
        self._idle_looks = 0
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closing.is_set():
                if select.select([self.master], [], [], 0.05)[0]:
                    self.drawn += os.read(self.master, 65536)
                    self._idle_looks = 0
                else:
                    self._idle_looks += 1

    def until(self, holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end and self.process.poll() is None, f"never: {what}\n{self.drawn[-3000:]!r}"
            time.sleep(0.02)

    def until_drawn(self, text: str) -> None:
        self.until(lambda: text.encode() in self.drawn, text)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def press(self, keys: bytes, text: str) -> None:
        """Type ``keys``, whereupon ``text`` is drawn."""
        before = len(self.drawn)
        self.type(keys)
        self.until(lambda: text.encode() in self.drawn[before:], f"{text} after {keys!r}")

    @property
    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def hang_up(self) -> None:
        """Close the terminal, as its window does."""
        # A descriptor that a thread reads from is closed only once that read returns.
        self._closing.set()
        self._reader.join()
        os.close(self.slave)
        master, self.slave, self.master = self.master, -1, -1
        os.close(master)

    def end(self) -> int:
        """The exit status; the process must end by itself, and all that it drew has been read."""
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"it never ended\n{self.drawn[-3000:]!r}") from late
        if self.master >= 0:
            self.until_quiet()
        return status

    def until_quiet(self) -> None:
        """Nothing more is there to be read: the second look in a row began after this call."""
        self._idle_looks = 0
        while self._idle_looks < 2 and self._reader.is_alive():
            time.sleep(0.02)

    def close(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
        self._closing.set()
        self._reader.join()
        for descriptor in (self.slave, self.master):
            if descriptor >= 0:
                os.close(descriptor)
