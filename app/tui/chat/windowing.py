"""Which part of a long conversation is on screen. Pure: indices in, indices out."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 30
"""Messages shown when a conversation is opened."""
STEP = 20
"""Messages added by one "older messages"."""
MOST = 90
"""Messages mounted at once; more are given back at the far end."""


@dataclass(frozen=True)
class Window:
    """The messages ``start <= index < end`` of ``total`` are mounted."""

    start: int
    end: int
    total: int

    @property
    def older(self) -> int:
        """How many messages lie before the window."""
        return self.start

    @property
    def newer(self) -> int:
        """How many messages lie after the window."""
        return self.total - self.end

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.end


def tail(total: int, first: int = FIRST) -> Window:
    """The newest ``first`` of ``total`` messages."""
    return Window(max(0, total - first), total, total)


def show_older(window: Window, step: int = STEP, most: int = MOST) -> Window:
    """``step`` older messages come in; the newest leave if more than ``most`` would be mounted."""
    start = max(0, window.start - step)
    return Window(start, min(window.end, start + most), window.total)


def show_newer(window: Window, step: int = STEP, most: int = MOST) -> Window:
    """``step`` newer messages come in; the oldest leave if more than ``most`` would be mounted."""
    end = min(window.total, window.end + step)
    return Window(max(window.start, end - most), end, window.total)


def appended(window: Window, most: int = MOST) -> Window:
    """A message was added at the end of the conversation.

    It is mounted if the window was at the end, and stays out while the reader is further up.
    """
    total = window.total + 1
    if window.newer:
        return Window(window.start, window.end, total)
    return Window(max(window.start, total - most), total, total)


def around(index: int, total: int, first: int = FIRST) -> Window:
    """A window that holds message ``index``, with some of what follows it."""
    end = min(total, max(index + 1 + first // 2, min(first, total)))
    return Window(max(0, min(index, end - first)), end, total)
