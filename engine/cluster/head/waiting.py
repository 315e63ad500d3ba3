"""An answer that waits: as long as those who are there cannot hold the model, and goes on when they can."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import ModelError
from engine.ipc.progress import ProgressCallback
from engine.planning.units import byte_size

POLL_S = 0.2
RETRY_S = 10.0
"""After so long it is tried again although nobody came: memory may have been freed."""

Formed = TypeVar("Formed")


class TooFewError(ModelError):
    """Those who are there cannot hold the model: ``missing`` bytes are lacking. ``lines``: why some of them do not
    count, for the person."""

    def __init__(self, text: str, missing: int, lines: Sequence[str] = ()) -> None:
        super().__init__(text, kind="memory")
        self.missing = missing
        self.lines = tuple(lines)


@dataclass(frozen=True)
class Patience:
    """``there``: who is there now, in any form that differs when somebody came; ``away``: names of those who are not
    and were. ``limit_s``: seconds to wait; None: until it is stopped. ``clock``: seconds from any time on."""

    there: Callable[[], frozenset[object]]
    away: Callable[[], list[str]]
    limit_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def formed(self, form: Callable[[], Formed], progress: ProgressCallback, say: Callable[[str], None]) -> Formed:
        """What ``form`` returns, called again whenever somebody came, as long as it raises TooFewError. ``say`` hears
        once that it is waited, and for whom. Raises TooFewError after ``limit_s``, and what ``progress`` raises."""
        begun, said = self.clock(), False
        while True:
            seen = self.there()
            try:
                return form()
            except TooFewError as error:
                if self.limit_s is not None and self.clock() - begun >= self.limit_s:
                    raise
                if not said:
                    said = True
                    for line in (*error.lines, self._line(error.missing)):
                        say(line)
                self._wait(seen, error, begun, progress)

    def _wait(self, seen: frozenset[object], error: TooFewError, begun: float, progress: ProgressCallback) -> None:
        """Until somebody came who was not ``seen``, or it is time to try again, or to give up."""
        until = self.clock() + RETRY_S
        if self.limit_s is not None:
            until = min(until, begun + self.limit_s)
        while self.clock() < until:
            now = self.there()
            if now - seen:
                return
            seen &= now
            progress(f"waiting for {self._whom()}: {byte_size(error.missing)} are missing", 0, 0, "")
            self.sleep(POLL_S)

    def _line(self, missing: int) -> str:
        waits = "waits" if self.limit_s is None else f"waits up to {max(1, round(self.limit_s / 60))} minutes"
        return f"The answer {waits} for {self._whom()}: {byte_size(missing)} are missing; it goes on by itself then."

    def _whom(self) -> str:
        return " and ".join(self.away()) or "another machine"
