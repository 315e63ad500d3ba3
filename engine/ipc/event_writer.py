"""Writes events to one program, which may read slowly or not at all, without making the others wait."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

from engine.ipc.messages import FRAME_LIMIT, Event, pack

BACKLOG_LIMIT = FRAME_LIMIT
"""Bytes that may wait for a program that does not read; with more it counts as gone."""


class EventWriter:
    """Writes events as frames. Thread-safe.

    What the reader does not take at once waits in a backlog, which a thread writes. ``on_closed`` is called once if the
    reader is gone, from any thread.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._changed = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._waiting = 0
        self._closed = False
        self._flushing = False

    def send(self, event: Event) -> None:
        """Write ``event``, or put it into the backlog. Does nothing if the reader is gone. Raises ProtocolError."""
        frame = memoryview(pack(event))
        with self._changed:
            if self._closed:
                return
            if self._waiting > BACKLOG_LIMIT:
                self._closed = True
            else:
                self._backlog.append(frame)
                self._waiting += len(frame)
                if not self._flushing:
                    self._write()
            closed, flush = self._closed, bool(self._backlog) and not self._flushing
            self._flushing = self._flushing or flush
        if closed:
            self._end()
        elif flush:
            self._flush_beside()

    @property
    def closed(self) -> bool:
        """Whether the reader is gone."""
        return self._closed

    def drain(self, seconds: float) -> None:
        """Wait until everything was written, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._backlog, seconds)

    def close(self) -> None:
        """Write nothing more; the descriptor is the caller's to close. ``on_closed`` is not called."""
        with self._changed:
            self._closed = True
            self._on_closed = lambda: None
            self._changed.notify_all()

    def _write(self) -> None:
        """Write what the reader takes without waiting."""
        try:
            while self._backlog:
                frame = self._backlog[0]
                written = os.write(self._descriptor, frame)
                self._waiting -= written
                if written < len(frame):
                    self._backlog[0] = frame[written:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._closed = True

    def _flush_beside(self) -> None:
        try:
            threading.Thread(target=self._flush, name="writing", daemon=True).start()
        except RuntimeError:
            self._flush()

    def _flush(self) -> None:
        """Write the backlog as the reader takes it."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        while True:
            ready.poll(1000)
            with self._changed:
                if not self._closed:
                    self._write()
                if self._closed or not self._backlog:
                    self._flushing = False
                    self._changed.notify_all()
                    break
        if self._closed:
            self._end()

    def _end(self) -> None:
        with self._changed:
            told, self._on_closed = self._on_closed, lambda: None
            self._backlog.clear()
            self._changed.notify_all()
        told()
