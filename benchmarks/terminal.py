"""A program in a pseudo-terminal: what is typed to it, and when what it draws arrives."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path


class TerminalError(Exception):
    """The program in the terminal did not do what was waited for; the text says what."""


class Terminal:
    """A terminal of ``columns`` by ``rows`` with ``command`` in it. A thread reads all that is drawn."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path, columns: int, rows: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        try:
            self._process = subprocess.Popen(
                command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=folder, start_new_session=True
            )
        finally:
            os.close(slave)
        self._changed = threading.Condition()
        self._drawn = bytearray()
        self._last = time.monotonic()
        self._left = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the program has left its terminal
                data = b""
            with self._changed:
                self._drawn += data
                self._last = time.monotonic()
                self._left = not data
                self._changed.notify_all()
            if not data:
                return

    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, data: bytes) -> None:
        os.write(self._master, data)

    def wait_for(self, text: bytes, timeout: float) -> float:
        """Until ``text`` was drawn in one piece: when the last piece arrived. Raises TerminalError."""
        with self._changed:
            self._changed.wait_for(lambda: text in self._drawn or self._left, timeout)
            if text not in self._drawn:
                why = "the program ended" if self._left else f"{timeout:.0f} s have passed"
                raise TerminalError(f"{text.decode()!r} was not drawn: {why}.")
            return self._last

    def echo(self, typed: bytes, timeout: float) -> float:
        """Write ``typed`` and wait until it is drawn: the seconds in between. Raises TerminalError."""
        with self._changed:
            self._drawn.clear()
            start = time.monotonic()
            self.write(typed)
        return self.wait_for(typed, timeout) - start

    def close(self, leave: bytes, timeout: float = 10.0) -> None:
        """Type ``leave`` and wait for the program's end; then end what is left of it."""
        if self.alive():
            self.write(leave)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        os.close(self._master)
        self._reader.join(timeout)
