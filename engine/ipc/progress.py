"""Progress reports of long operations."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.errors import Cancelled
from engine.ipc.messages import AnyEvent, Progress

ProgressCallback = Callable[[str, int, int, str], None]
"""Callback ``(stage, done, total, unit)``, with the fields of :class:`engine.ipc.messages.Progress`. It may raise
:class:`engine.errors.Cancelled`."""

INTERVAL_S = 0.1


class Reports:
    """The :data:`ProgressCallback` of one request, which emits events for the screen.

    Emits each new stage and its end at once, and otherwise at most ten events per second. Raises Cancelled as soon as
    ``cancelled()`` returns True. Not thread-safe.
    """

    def __init__(self, request_id: int, emit: Callable[[AnyEvent], None], cancelled: Callable[[], bool]) -> None:
        self._id = request_id
        self._emit = emit
        self._cancelled = cancelled
        self._next = 0.0
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if self._cancelled():
            raise Cancelled(f"Stopped while {stage}.")
        now = time.monotonic()
        if stage == self._stage and now < self._next and (total == 0 or done < total):
            return
        self._stage, self._next = stage, now + INTERVAL_S
        known = unit if unit in ("bytes", "tensors", "layers") else ""
        self._emit(Progress(id=self._id, stage=stage, done=done, total=total, unit=known))  # type: ignore[arg-type]
