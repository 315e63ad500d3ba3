"""Whether an expert cache earns its keep: predictions raise the question, measurements decide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WINDOW = 128
"""Number of layers that are measured before a decision."""

Verdict = Literal["try-without", "keep", "off"]


@dataclass
class CacheWorth:
    """Decides whether the cache is worth keeping.

    If a window of layers takes longer with the cache than predicted without it, a window without the cache is measured,
    and the better of the two is used from then on. Both are compared with the predicted time of the same layers without
    a cache, so that their numbers of tokens do not matter.
    """

    window: int = WINDOW
    state: Literal["watching", "trying", "decided"] = "watching"
    with_cache: float = 0.0
    """Measured time with the cache, relative to what it should be without; of the last whole window."""
    without_cache: float = 0.0
    """The same, measured without."""
    _measured: float = 0.0
    _expected: float = 0.0
    _count: int = 0

    @property
    def asks(self) -> bool:
        """Whether :meth:`add` still has an effect."""
        return self.state != "decided"

    def add(self, measured_s: float, without_s: float) -> Verdict | None:
        """Record a layer that took ``measured_s`` and is predicted to take ``without_s`` without a cache."""
        self._measured += measured_s
        self._expected += without_s
        self._count += 1
        if self._count < self.window:
            return None
        ratio = self._measured / self._expected if self._expected > 0 else 0.0
        self._measured = self._expected = 0.0
        self._count = 0
        if self.state == "watching":
            self.with_cache = ratio
            if ratio <= 1.0:
                return None
            self.state = "trying"
            return "try-without"
        if self.state == "trying":
            self.without_cache = ratio
            self.state = "decided"
            return "off" if ratio < self.with_cache else "keep"
        return None
