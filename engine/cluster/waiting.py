"""What the head waits for of other machines, and the watch that ends it: nobody waits for ever for a machine that is
there and does nothing, and who stops an answer does not wait for it at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cluster.formation import Formation

LIMIT_S = 30.0
"""For the contributions of a decoding step to one layer; a machine that swaps may take seconds."""
TOKEN_S = 0.1
"""More for each further token: a prompt's chunk is a layer's work for hundreds of them."""
FIRST = 10
"""So many times that for a layer's first exchange of an epoch: the weights may come from a cold disk."""
STOPPED_S = 1.0
"""What an exchange has for coming to its end when the answer was stopped, so that the ring can be kept."""
LOOK_S = 0.1


def patience(tokens: int, first: bool) -> float:
    """Seconds that machines which are there may let one exchange wait; ``tokens`` are run in it."""
    return (LIMIT_S + TOKEN_S * max(0, tokens - 1)) * (FIRST if first else 1)


@dataclass(frozen=True)
class Wait:
    """``since`` is of :func:`time.monotonic`; ``missing`` gives the ranks that are waited for, as far as known."""

    since: float
    allowed_s: float
    missing: Callable[[], Sequence[int]]


class Waits:
    """What one thread waits for now, for others to look at."""

    def __init__(self) -> None:
        self.now: Wait | None = None

    def on(self, missing: Callable[[], Sequence[int]], allowed_s: float) -> Waits:
        """``with waits.on(...)``: within it the thread waits."""
        self.now = Wait(time.monotonic(), allowed_s, missing)
        return self

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now = None


class Watch:
    """Looks at what the head waits for in the epoch of ``formation``, from a thread of its own until :meth:`close`.

    ``cancelled`` says whether the answer was stopped; ``stopped`` whether the epoch was ended for that.
    """

    def __init__(self, formation: Formation) -> None:
        self.cancelled: Callable[[], bool] = lambda: False
        self.stopped = False
        self._formation = formation
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="waiting-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        layers = self._formation.layers
        while not self._closed.wait(LOOK_S):
            cancelled = self.cancelled()
            if cancelled:
                layers.abort()
            wait = layers.waits.now
            if wait is None:
                continue
            waited = time.monotonic() - wait.since
            if cancelled and waited > STOPPED_S:
                self.stopped = True
                self._formation.lose((), "the answer was stopped while other machines were waited for")
                return
            if waited > wait.allowed_s:
                silent = tuple(wait.missing())
                who = "" if silent else "a machine of the ring "
                self._formation.lose(silent, f"{who}contributed nothing for {waited:.0f} s")
                return
