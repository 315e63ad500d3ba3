"""An answer that waits while the present machines cannot hold the model, and goes on when they can."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.planning.units import byte_size

POLL_S = 0.2
"""Seconds between two checks which machines are present."""
RETRY_S = 10.0
"""Seconds until forming is tried again although no machine came, because memory may have been freed."""

Formed = TypeVar("Formed")


class CapacityError(ModelError):
    """The present machines cannot hold the model.

    ``missing`` is the shortfall in bytes. ``lines`` explain to the person why some machines do not count.
    """

    def __init__(self, text: str, missing: int, lines: Sequence[str] = ()) -> None:
        super().__init__(text, kind="memory")
        self.missing = missing
        self.lines = tuple(lines)


@dataclass(frozen=True)
class CapacityWait:
    """Forms a ring as soon as enough machines are present.

    ``present`` returns a set that grows when a machine comes. ``absent`` returns the names of the machines that left.
    ``limit_s`` is the maximum wait in seconds; None: no limit. ``clock`` returns seconds, as time.monotonic does.
    """

    present: Callable[[], frozenset[object]]
    absent: Callable[[], list[str]]
    limit_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def form(self, form: Callable[[], Formed], progress: ProgressCallback, notify: Callable[[str], None]) -> Formed:
        """The result of ``form``, which is called again whenever a machine came, as long as it raises CapacityError.

        ``notify`` is called once, with a line that names the machines that are waited for. Raises CapacityError after
        ``limit_s``, and what ``progress`` raises.
        """
        begun, notified = self.clock(), False
        while True:
            seen = self.present()
            try:
                return form()
            except CapacityError as error:
                if self.limit_s is not None and self.clock() - begun >= self.limit_s:
                    raise
                if not notified:
                    notified = True
                    for line in (*error.lines, self._line(error.missing)):
                        notify(line)
                self._wait(seen, error, begun, progress)

    def _wait(self, seen: frozenset[object], error: CapacityError, begun: float, progress: ProgressCallback) -> None:
        """Wait until a machine comes that is not in ``seen``, or until it is time to try again or give up."""
        until = self.clock() + RETRY_S
        if self.limit_s is not None:
            until = min(until, begun + self.limit_s)
        while self.clock() < until:
            now = self.present()
            if now - seen:
                return
            seen &= now
            progress(f"waiting for {self._names()}: {byte_size(error.missing)} are missing", 0, 0, "")
            self.sleep(POLL_S)

    def _line(self, missing: int) -> str:
        waits = "waits" if self.limit_s is None else f"waits up to {max(1, round(self.limit_s / 60))} minutes"
        return f"The answer {waits} for {self._names()}: {byte_size(missing)} are missing; it goes on by itself then."

    def _names(self) -> str:
        return " and ".join(self.absent()) or "another machine"
