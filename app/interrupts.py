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
"""Exit status after ctrl-c: 128 plus the number of the signal, as in a shell."""


def leave_on_interrupt() -> None:
    """From now on ctrl-c ends the process at once.

    No exception is raised for it: one could surface in the middle of an import, a destructor or the event loop.
    """
    signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Make ctrl-c raise KeyboardInterrupt, for a program that must restore the terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def handled(first: Callable[[], None], last: Callable[[], None]) -> Iterator[None]:
    """Handles ctrl-c inside: the first one calls ``first``; a second one calls ``last`` and ends the process.

    Both run in the signal handler, so ``first`` should only schedule work (``loop.call_soon_threadsafe``).
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
