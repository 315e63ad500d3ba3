"""The page warmer: a thread that brings weights into memory once and touches them again between questions."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from engine.planning.residency import STANDBY_SHARE, WARM_UP_SHARE, pause_after, standby_period, touchable
from engine.runtimes.protocol import Weights
from engine.system.free_memory import available_bytes

IDLE_S = 10.0
"""Seconds of idling after which the next first pass counts as the idle probe."""
QUIET_S = 0.3
"""Seconds after an answer, or after a pass for the ring's head, in which nothing is touched, as another may follow."""
_PROGRESS_S = 0.25
"""Seconds between two progress reports of the warm-up."""
CHECK_S = 15.0
"""Seconds between two checks whether to release the weights."""


class IdleProbe:
    """Measures the first pass after idling. A long one shows that weights were unwired or dropped meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = clock()
        self._idle = False
        self.probe_s: float | None = None
        """Seconds of the last probe; None if no question came after more than IDLE_S seconds of idling."""

    def begin(self) -> None:
        """Must be called when a question arrives, or a pass for the ring's head."""
        self._idle = self._clock() - self._ended > IDLE_S

    def first_token(self, seconds: float) -> float | None:
        """Record the seconds of the first pass. Returns them if the question came after idling, else None."""
        if not self._idle:
            return None
        self._idle = False
        self.probe_s = seconds
        return seconds

    def end(self) -> None:
        """Must be called at the end of an answer, when idling begins."""
        self._ended = self._clock()


class PageWarmer:
    """Brings ``weights`` into memory, and touches them again while no answer runs. :meth:`close` ends its thread.

    ``on_progress(done, total)`` is called with the warm-up's progress in bytes, at most four times per second.
    ``after_warm_up`` (locking) is called once, in the warmer's thread. ``wired``: warm weights stay in memory by
    themselves.

    The warmer pauses while an answer runs (:meth:`answering`). An error in a pass, such as a disk error, ends only the
    warmer. ``lets_go(seconds)`` returns whether to release the weights after so many idle seconds (None: never).
    ``hold(False)`` is called then, and ``hold(True)`` when the next answer begins.
    """

    def __init__(
        self,
        weights: Weights,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        wired: bool = False,
        after_warm_up: Callable[[], None] | None = None,
        lets_go: Callable[[float], bool] | None = None,
        hold: Callable[[bool], None] = lambda wanted: None,
        available: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights
        self._on_progress = on_progress
        self._wired = wired
        self._after_warm_up = after_warm_up
        self._lets_go = lets_go
        self._hold = hold
        self._held = True
        self._available = available
        self._clock = clock
        self._used = clock()
        """Time of the last answer's beginning or end; before the first answer, the end of the warm-up."""
        self._changed = threading.Condition()
        self._answering = 0
        self._quiet_until = -math.inf
        self._touching = False
        self._closed = False
        self._warm = threading.Event()
        self.passes = 0
        """Number of finished standby passes."""
        self.touched = 0
        """Number of bytes touched so far."""
        self.problem = ""
        """The error that ended the warmer; empty if there was none."""
        self._thread = threading.Thread(target=self._work, name="residency", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Pause the warmer. Entering waits for the current piece, which takes some milliseconds."""
        with self._changed:
            self._answering += 1
            while self._touching:
                self._changed.wait()
            if not self._held:
                self._held = True
                self._changed.notify_all()
                self._hold(True)
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._used = self._clock()
                self._quiet_until = self._used + QUIET_S
                self._changed.notify_all()

    def wait_until_warm(self, timeout: float | None = None) -> bool:
        """Whether the warm-up is over, completed or given up."""
        return self._warm.wait(timeout)

    def close(self) -> None:
        """Stop the thread and release the weights. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is None:
            self._weights.close()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        try:
            seconds = self._pass(WARM_UP_SHARE, everything=True)
            if self._after_warm_up is not None and not self._closed:
                self._after_warm_up()
            self._warm.set()
            with self._changed:
                self._used = max(self._used, self._clock())
            checked = self._clock()
            while self._rest(self._period(seconds)):
                if self._lets_go is not None and self._clock() - checked >= CHECK_S:
                    checked = self._clock()
                    if self._let_go():
                        continue
                if standby_period(seconds, self._wired, self._weights.own_memory) is not None:
                    seconds = self._pass(STANDBY_SHARE, everything=self._weights.own_memory)
                    self.passes += not self._closed
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._warm.set()
            self._weights.close()

    def _period(self, seconds: float) -> float | None:
        """Seconds to rest after a pass that took ``seconds``; None: until it is closed."""
        standby = standby_period(seconds, self._wired, self._weights.own_memory)
        return CHECK_S if standby is None and self._lets_go is not None else standby

    def _let_go(self) -> bool:
        """Release the weights if it is time to, and wait for the next answer. Returns whether it did."""
        with self._changed:
            idle = self._clock() - self._used
            if self._answering or self._closed or self._lets_go is None or not self._lets_go(idle):
                return False
            self._held = False
            self._hold(False)
            while not self._held and not self._closed:
                self._changed.wait()
            return True

    def _pass(self, share: float, everything: bool) -> float:
        """Touch as many pieces as fit in memory, using the fraction ``share`` of the time. What is in a GPU driver's
        memory was given its place when it was loaded.

        ``everything``: pieces that are in memory are touched, too. Returns the seconds spent touching.
        """
        sizes = self._weights.sizes
        count = len(sizes) if self._weights.own_memory else touchable(sizes, self._available())
        total, done, next_report, seconds = sum(sizes[:count]), 0, 0.0, 0.0
        for index in range(count):
            if not self._begin_touching():
                break
            begun = self._clock()
            try:
                if everything or not self._weights.resident(index):
                    self._weights.touch(index)
                    self.touched += sizes[index]
            finally:
                self._end_touching()
            taken = self._clock() - begun
            seconds += taken
            done += sizes[index]
            if not self._warm.is_set() and (begun >= next_report or done == total):
                next_report = begun + _PROGRESS_S
                self._on_progress(done, total)
            if not self._rest(pause_after(taken, share), only_pause=True):
                break
        return seconds

    def _begin_touching(self) -> bool:
        """Wait until no answer runs or has just ended. Returns False if closed."""
        with self._changed:
            while not self._closed:
                left = self._quiet_until - self._clock()
                if not self._answering and left <= 0:
                    break
                self._changed.wait(None if self._answering else left)
            self._touching = not self._closed
            return self._touching

    def _end_touching(self) -> None:
        with self._changed:
            self._touching = False
            self._changed.notify_all()

    def _rest(self, seconds: float | None, only_pause: bool = False) -> bool:
        """Wait ``seconds`` (None: until closed). An answer restarts the wait, except with ``only_pause``. Returns False
        if closed."""
        with self._changed:
            until = None if seconds is None else self._clock() + seconds
            while not self._closed:
                if self._answering and not only_pause and seconds is not None:
                    self._changed.wait()
                    until = self._clock() + seconds
                    continue
                left = None if until is None else until - self._clock()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            return False
