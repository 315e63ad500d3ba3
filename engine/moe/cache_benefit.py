"""Whether an expert cache earns its keep: predictions raise the question, measurements decide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WINDOW = 128
"""Layers that are measured before anything is concluded."""

Verdict = Literal["try-without", "keep", "off"]


@dataclass
class CacheWorth:
    """A window of layers that takes longer with the cache than it should without is followed by one window without;
    the better of the two is kept for good.

    Both windows are compared with what the same layers should take without a cache, so that it does not matter how
    many tokens they had.
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
        """Whether :meth:`add` is still of use."""
        return self.state != "decided"

    def add(self, measured_s: float, without_s: float) -> Verdict | None:
        """A layer took ``measured_s``; without a cache it should take ``without_s``."""
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
