"""What a pass waits for from other machines, and the time limit of each wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

LIMIT_S = 30.0
"""Maximum seconds for the contributions of one layer of a decoding step. A machine that swaps may take seconds."""
TOKEN_S = 0.1
"""Additional seconds for each further token. A layer of a prompt's chunk works for hundreds of them."""
FIRST = 10
"""Factor for a layer's first exchange of an epoch: the weights may come from a cold disk."""


def exchange_timeout(tokens: int, first: bool) -> float:
    """Maximum seconds for one exchange of ``tokens`` tokens while all machines are alive."""
    return (LIMIT_S + TOKEN_S * max(0, tokens - 1)) * (FIRST if first else 1)


@dataclass(frozen=True)
class Wait:
    """A running wait. ``since`` is a time of :func:`time.monotonic`. ``missing`` returns the ranks that are waited for,
    as far as they are known."""

    since: float
    allowed_s: float
    missing: Callable[[], Sequence[int]]


class Waits:
    """What one thread waits for now, visible to other threads."""

    def __init__(self) -> None:
        self.now: Wait | None = None

    def on(self, missing: Callable[[], Sequence[int]], allowed_s: float) -> Waits:
        """Mark the wait: ``with waits.on(...)`` encloses it."""
        self.now = Wait(time.monotonic(), allowed_s, missing)
        return self

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now = None
