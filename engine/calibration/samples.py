"""Repeated measurements: their spread, its notation, and whether the machine was steady.

Measurements made while other programs were busy are not stored for later decisions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

MOST_SHARE = 0.1
"""Maximum fraction of all processors' time that other programs may use during a measurement."""
MOST_UNSTEADY = 3.0
"""Maximum ratio of the highest to the lowest sample. Beyond it other programs used the memory, or the processor was
slowed down."""


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, and the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError if ``values`` is empty."""
        if not values:
            raise ValueError("no value was measured")
        return cls(statistics.median(values), min(values), max(values))

    def mapped(self, function: Callable[[float], float]) -> Spread:
        """The figures as ``function`` gives them; a falling one (seconds to rates) turns the range round."""
        low, high = sorted((function(self.low), function(self.high)))
        return Spread(function(self.median), low, high)

    def __str__(self) -> str:
        """``22.0 (21.7–26.0)``"""
        return f"{figure(self.median)} ({figure(self.low)}–{figure(self.high)})"


def figure(value: float) -> str:
    """``value`` with three significant digits, at most three of them after the point."""
    size = abs(value)
    return (
        f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.3f}"
    )


def milliseconds(seconds: Sequence[float]) -> Spread:
    return Spread.of(seconds).mapped(lambda value: value * 1000.0)


def per_second(seconds: Sequence[float], things: float) -> Spread:
    """The rates of ``things`` per second, if they take each of ``seconds``."""
    return Spread.of(seconds).mapped(lambda value: things / value if value > 0 else 0.0)


@dataclass(frozen=True)
class ProcessorTimes:
    """A moment: seconds of the clock, of all processors' work for any program, and of this process's work."""

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
    """Fraction of the time of ``processors`` that other processes used between two moments, 0 to 1."""
    passed = (after.clock_s - before.clock_s) * processors
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others / passed)) if passed > 0 else 0.0


def unsteady_reason(share: float, samples: Sequence[float]) -> str:
    """The reason for not keeping figures if other programs used ``share`` of the processors and repeated measurements
    gave ``samples``; empty: they are kept."""
    if share > MOST_SHARE:
        return f"other programs used {share:.0%} of the processors meanwhile"
    if samples and (found := Spread.of(samples)).high > MOST_UNSTEADY * found.low:
        return f"the machine was {found.high / found.low:.1f} times as fast at one moment as at another"
    return ""


class OtherPrograms:
    """Measures what other programs use from its creation on."""

    def __init__(self) -> None:
        self._before = ProcessorTimes.now()

    def unsteady_reason(self, samples: Sequence[float]) -> str:
        """See :func:`unsteady_reason`, of the time until now."""
        share = share_of_others(self._before, ProcessorTimes.now(), psutil.cpu_count() or 1)
        return unsteady_reason(share, samples)
