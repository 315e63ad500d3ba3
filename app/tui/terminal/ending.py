"""The end from outside: a signal, or a terminal that is closed. Whatever happens then, the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HUNG_UP = 128 + signal.SIGHUP
"""The exit status when the terminal was closed, as a shell says it."""

_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 10.0
"""Seconds for an orderly end: saving through another program's lock, leaving a ring, ending the engine."""


def end_at_last(status: int, before: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
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
    """Within, SIGHUP, SIGTERM and SIGINT call ``end_soon`` with the exit status, in the running event loop, and before
    it ``in_time``, at once, wherever the main thread is. SIGHUP too where it was ignored (nohup): a screen without its
    terminal is of no use.
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
            # From here to the end of the process a further signal may do what it did before.
            signal.signal(number, handler)
