"""The thread that keeps weights in memory: it brings them there once, and looks after them between questions."""

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
"""After so long without a question, the next one's first token tells what idling cost."""
QUIET_S = 0.3
"""So long after an answer, or after a pass for the ring's head, the next one may yet follow: nothing is touched."""
_NEWS_S = 0.25
CHECK_S = 15.0
"""How often it is asked whether to let go."""


class IdleProbe:
    """How long the first token takes after idling: the sign of weights that were unwired or dropped meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended = clock()
        self._idle = False
        self.probe_s: float | None = None
        """Seconds, as last measured; None: never after more than IDLE_S of idling."""

    def begin(self) -> None:
        """A question came, or a pass for the ring's head."""
        self._idle = self._clock() - self._ended > IDLE_S

    def first_token(self, seconds: float) -> float | None:
        """It came so long after the beginning; returned if that was after idling."""
        if not self._idle:
            return None
        self._idle = False
        self.probe_s = seconds
        return seconds

    def end(self) -> None:
        """Idle from now on."""
        self._ended = self._clock()


class Keeper:
    """Warms ``weights`` up, and touches them again while nobody asks anything; closed, it leaves nothing running.

    ``tell(done, total)`` hears of the warm-up, in bytes, at most four times a second; ``after_warm_up`` (locking) is
    called once, in the keeper's thread. ``wired``: what is warm stays so by itself. The keeper never works while an
    answer runs (:meth:`answering`). A pass that fails, with the disk say, ends the keeping, and nothing else.
    ``lets_go(seconds)`` says whether nothing is kept any more after so long without an answer (None: it is never
    asked). Then ``hold(False)`` is called, and ``hold(True)`` when the next answer begins.
    """

    def __init__(
        self,
        weights: Weights,
        tell: Callable[[int, int], None] = lambda done, total: None,
        *,
        wired: bool = False,
        after_warm_up: Callable[[], None] | None = None,
        lets_go: Callable[[float], bool] | None = None,
        hold: Callable[[bool], None] = lambda wanted: None,
        available: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights
        self._tell = tell
        self._wired = wired
        self._after_warm_up = after_warm_up
        self._lets_go = lets_go
        self._hold = hold
        self._held = True
        self._available = available
        self._clock = clock
        self._used = clock()
        """When an answer last ended, or began; the warm-up's end before the first."""
        self._changed = threading.Condition()
        self._answering = 0
        self._quiet_until = -math.inf
        self._touching = False
        self._closed = False
        self._warm = threading.Event()
        self.passes = 0
        """Standby passes that were finished."""
        self.touched = 0
        """Bytes touched in all."""
        self.problem = ""
        """Why it gave up, if it did."""
        self._thread = threading.Thread(target=self._work, name="residency", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Within it nothing is touched; entering waits for the piece at hand (some milliseconds)."""
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
        """Whether the warm-up is over (done, or given up)."""
        return self._warm.wait(timeout)

    def close(self) -> None:
        """Stop, and let go of the weights. May be called twice."""
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
        """How long to rest after a pass that took ``seconds``; None: until it is closed."""
        standby = standby_period(seconds, self._wired, self._weights.own_memory)
        return CHECK_S if standby is None and self._lets_go is not None else standby

    def _let_go(self) -> bool:
        """Let go if it is time to, and wait until somebody is answered again. Whether it did."""
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
        """Touch as many pieces as fit in memory (``everything``: also those that are there), at ``share`` of the time.
        Returns the seconds that the touching took."""
        sizes = self._weights.sizes
        count = touchable(sizes, self._available())
        total, done, next_news, seconds = sum(sizes[:count]), 0, 0.0, 0.0
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
            if not self._warm.is_set() and (begun >= next_news or done == total):
                next_news = begun + _NEWS_S
                self._tell(done, total)
            if not self._rest(pause_after(taken, share), only_pause=True):
                break
        return seconds

    def _begin_touching(self) -> bool:
        """Wait until nobody is answered, and was not a moment ago. False: closed."""
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
        """Wait so long (None: until closed), counted anew after an answer but for a pause in a pass. False: closed."""
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
