"""Other programs at work while something is measured: what such a machine shows is not kept for later decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from engine.calibration.spread import Spread

MOST_SHARE = 0.1
"""Share of all processors' time that other programs may use meanwhile."""
MOST_UNSTEADY = 3.0
"""Ratio of the highest to the lowest figure of one thing beyond which the machine was not the same throughout: somebody
used its memory, or its processor was slowed down."""


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds so far: of the clock, of all processors at work for anybody, and of this process at work."""

    clock_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> ProcessorTimes:
        every, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = every.idle + getattr(every, "iowait", 0.0)
        return cls(
            time.monotonic(),
            sum(every) - idle - getattr(every, "guest", 0.0) - getattr(every, "guest_nice", 0.0),
            own.user + own.system + own.children_user + own.children_system,
        )


def share_of_others(before: ProcessorTimes, after: ProcessorTimes, processors: int) -> float:
    """Share of the time of ``processors`` that others than this process used between two moments, 0 to 1."""
    passed = (after.clock_s - before.clock_s) * processors
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others / passed)) if passed > 0 else 0.0


def why_not_kept(share: float, samples: Sequence[float]) -> str:
    """Why figures are not worth keeping if others used ``share`` of the processors and one thing, measured again and
    again, gave ``samples``; empty: they are."""
    if share > MOST_SHARE:
        return f"other programs used {share:.0%} of the processors meanwhile"
    if samples and (found := Spread.of(samples)).high > MOST_UNSTEADY * found.low:
        return f"the machine was {found.high / found.low:.1f} times as fast at one moment as at another"
    return ""


class Others:
    """What other programs do from now on."""

    def __init__(self) -> None:
        self._before = ProcessorTimes.now()

    def why_not_kept(self, samples: Sequence[float]) -> str:
        """See :func:`why_not_kept`, of the time until now."""
        share = share_of_others(self._before, ProcessorTimes.now(), psutil.cpu_count() or 1)
        return why_not_kept(share, samples)
