"""Keeps a growing answer on disk: often enough that a crash loses at most a second of text, not at every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from app.conversations.records import StoreError

WRITE_INTERVAL_S = 0.5
"""Half of the second that may be lost: the other half is for a slow disk and a busy event loop."""


class PartialWriter:
    """Collects the text of one answer and decides when to write it.

    ``write`` gets the whole text so far. When it raises StoreError nothing is lost: the text stays here, ``error`` says
    why, and the next :meth:`poll` that is due tries again. Call :meth:`poll` now and then (or let :meth:`run` do it),
    and :meth:`flush` at the end.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        interval_s: float = WRITE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.error: StoreError | None = None
        self._write = write
        self._interval_s = interval_s
        self._clock = clock
        self._pieces: list[str] = []
        self._unwritten = False
        self._next = 0.0

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, piece: str) -> None:
        """More text at the end."""
        if piece:
            self._pieces.append(piece)
            self._unwritten = True

    def replace(self, text: str) -> None:
        """Another text altogether: the best beam changed."""
        if text != self.text:
            self._pieces = [text]
            self._unwritten = True

    def due_in(self) -> float | None:
        """Seconds until there is something to write; None if there is nothing."""
        return max(0.0, self._next - self._clock()) if self._unwritten else None

    def poll(self) -> bool:
        """Write if it is time. Whether it was written."""
        return self.due_in() == 0.0 and self.flush()

    def flush(self) -> bool:
        """Write what is not written yet. False, with ``error`` set, if that failed."""
        if not self._unwritten:
            return True
        self._next = self._clock() + self._interval_s
        try:
            self._write(self.text)
        except StoreError as error:
            self.error = error
            return False
        self.error = None
        self._unwritten = False
        return True

    async def run(self) -> None:
        """Poll for ever; cancel it when the answer is complete, then :meth:`flush`."""
        while True:
            due = self.due_in()
            await asyncio.sleep(self._interval_s / 2 if due is None else max(due, 0.01))
            self.poll()
