"""How often the screen draws while the engine works. Pure but for the clocks it is given."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.03
"""Of one core, for the screen while an answer is written. The engine's threads wait for one another in every layer, so
what the screen takes from one of them it takes from the answer."""


class Pace:
    """The least time between two drawings, so that this process uses about :data:`SHARE` of a core.

    It is ``least`` seconds while drawing is cheap, and grows to ``most`` at the utmost where it is not: the text is
    shown a little later then, and not slower.
    """

    def __init__(
        self,
        least: float,
        most: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self.interval = least
        self._least, self._most = least, most
        self._clock, self._used = clock, used
        self._drawn_at = clock() - least
        self._used_then = used()

    def wait(self) -> float:
        """Seconds until the next drawing may be made; 0 or less: now."""
        return self._drawn_at + self.interval - self._clock()

    def drawn(self) -> None:
        """A drawing is made now: what the process used since the last one says how soon the next may be."""
        now, used = self._clock(), self._used()
        wanted = (used - self._used_then) / SHARE
        # Half of the way at a time: one costly drawing is no reason to stop for long.
        self.interval = min(self._most, max(self._least, (self.interval + wanted) / 2))
        self._drawn_at, self._used_then = now, used

    def begin(self) -> None:
        """Something new begins: what was used before does not count, and it is drawn at once."""
        self.interval = self._least
        self._drawn_at, self._used_then = self._clock() - self._least, self._used()
