"""A measured figure with its range, and how it is written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
    """Three digits that mean something, never more than three after the point."""
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
    """How many of ``things`` per second, if that many take each of ``seconds``."""
    return Spread.of(seconds).mapped(lambda value: things / value if value > 0 else 0.0)
