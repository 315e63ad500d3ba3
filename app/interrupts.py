"""Ctrl-c at any moment: exit status 130, no traceback. Imports next to nothing, so that it is in force early."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

INTERRUPTED = 130
"""The exit status: 128 and the number of the signal, as a shell says it."""


def leave_on_interrupt() -> None:
    """From now on ctrl-c ends the process at once.

    No exception is raised for it: one could surface in the middle of an import, a destructor or the event loop.
    """
    signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Python's own way (KeyboardInterrupt), for a program that must give the terminal back."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def handled(first: Callable[[], None], last: Callable[[], None]) -> Iterator[None]:
    """Within, the first ctrl-c calls ``first``; a further one calls ``last`` and ends the process.

    Both are called in the middle of anything: ``first`` should only schedule (``loop.call_soon_threadsafe``).
    """
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            last()
            _leave(number, frame)
        seen = True
        first()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
