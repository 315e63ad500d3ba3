"""Preventing idle sleep during long tasks: a long answer, a download, lending.

The system's own program prevents idle sleep while it runs, and ends with this process in any case. A laptop sleeps when
its lid is closed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

AFTER_S = 20.0
"""Seconds after which a task prevents sleep. No system sleeps sooner after a key was pressed."""


def holding_command(pid: int, platform: str = sys.platform, systemd: Path = Path("/run/systemd/system")) -> list[str]:
    """The program that keeps this system awake until process ``pid`` ends; empty where there is none.

    On a Mac ``-s`` counts only while it is on mains, ``-i`` always.
    """
    if platform == "darwin":
        return ["/usr/bin/caffeinate", "-i", "-s", "-w", str(pid)]
    inhibit, tail = shutil.which("systemd-inhibit"), shutil.which("tail")
    if platform != "linux" or inhibit is None or tail is None or not systemd.is_dir():
        return []
    why = ["--who=privatellm", "--why=answering, fetching or lending", "--what=idle:sleep", "--mode=block"]
    return [inhibit, *why, tail, f"--pid={pid}", "-f", os.devnull]


class Awake:
    """Keeps the system awake while it is held, after ``after_s`` seconds. Thread-safe."""

    def __init__(self, command: Sequence[str], after_s: float = AFTER_S) -> None:
        self._command = list(command)
        self._after_s = after_s
        self._lock = threading.Lock()
        self._holders = 0
        self._timer: threading.Timer | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The program, while it runs."""
        return self._process

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Prevent idle sleep until the end of the context."""
        with self._lock:
            self._holders += 1
            if self._command and self._holders == 1:
                self._timer = threading.Timer(self._after_s, self._start)
                self._timer.daemon = True
                self._timer.start()
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._stop()

    def _start(self) -> None:
        with self._lock:
            if not self._holders or self._process is not None:
                return
            # A system that refuses falls asleep as it would without.
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        process, self._process = self._process, None
        if timer is not None:
            timer.cancel()
        if process is not None:
            process.terminate()
            process.wait()


AWAKE = Awake(holding_command(os.getpid()))
"""The instance of this process."""
