"""An answer that waits for machines: what is said, when it is tried again, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.cluster.head.capacity_wait import RETRY_S, CapacityError, CapacityWait
from engine.errors import Cancelled, ModelError


class Scene:
    """Machines that come and go by a clock of their own; the model needs all of ``needed``."""

    def __init__(self, needed: set[str], events: dict[float, set[str]], limit_s: float | None = None) -> None:
        self.now = 0.0
        self.tries: list[float] = []
        self.said: list[str] = []
        self.stages: list[str] = []
        self.until = 1e9
        self._needed = needed
        self._events = events
        self.wait = CapacityWait(
            lambda: frozenset(self.there),
            lambda: sorted(needed - self.there),
            limit_s,
            lambda: self.now,
            self._sleep,
        )

    @property
    def there(self) -> set[str]:
        return next((there for at, there in sorted(self._events.items(), reverse=True) if at <= self.now), set())

    def __call__(self) -> str:
        return self.wait.form(self._form, self._progress, self.said.append)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _progress(self, stage: str, done: int, total: int, unit: str) -> None:
        if self.now >= self.until:
            raise Cancelled("Stopped.")
        self.stages.append(stage)

    def _form(self) -> str:
        self.tries.append(self.now)
        missing = self._needed - self.there
        if missing:
            raise CapacityError("It does not fit.", 3_100_000_000 * len(missing))
        return " ".join(sorted(self.there))


def test_nobody_waits_where_all_are_there() -> None:
    scene = Scene({"attic"}, {0.0: {"attic"}})
    assert scene() == "attic"
    assert (scene.said, scene.stages) == ([], [])


def test_it_goes_on_when_the_machine_returns() -> None:
    scene = Scene({"attic", "cellar"}, {0.0: {"cellar"}, 3.0: {"attic", "cellar"}})
    assert scene() == "attic cellar"
    assert scene.said == ["The answer waits for attic: 3.1 GB are missing; it goes on by itself then."]
    assert set(scene.stages) == {"waiting for attic: 3.1 GB are missing"}
    assert scene.tries == [0.0, pytest.approx(3.0, abs=0.3)]


def test_one_that_goes_and_comes_back_is_news_and_one_of_two_is_not_enough() -> None:
    scene = Scene({"attic", "cellar"}, {0.0: {"cellar"}, 1.0: set(), 2.0: {"cellar"}, 4.0: {"attic", "cellar"}})
    assert scene() == "attic cellar"
    assert scene.tries == [0.0, pytest.approx(2.0, abs=0.3), pytest.approx(4.0, abs=0.3)]
    assert len(scene.said) == 1
    assert "waiting for attic and cellar: 3.1 GB are missing" in scene.stages


def test_it_is_tried_again_although_nobody_came() -> None:
    scene = Scene({"attic"}, {0.0: set()})
    scene.until = 2.5 * RETRY_S
    with pytest.raises(Cancelled):
        scene()
    assert len(scene.tries) == 3


def test_stopping_ends_it_at_once() -> None:
    scene = Scene({"attic"}, {0.0: set()})
    scene.until = 0.0
    with pytest.raises(Cancelled):
        scene()
    assert scene.tries == [0.0]


@pytest.mark.parametrize("limit", [0.0, 25.0])
def test_it_waits_no_longer_than_it_may(limit: float) -> None:
    scene = Scene({"attic"}, {0.0: set()}, limit)
    with pytest.raises(CapacityError, match="does not fit") as found:
        scene()
    assert found.value.kind == "memory"
    assert scene.now == pytest.approx(limit, abs=0.3)
    assert bool(scene.said) == (limit > 0)


def test_other_failures_are_not_waited_out() -> None:
    def fail() -> None:
        raise ModelError("The models differ.", kind="bad-input")

    def never(*_: object) -> None:
        raise AssertionError("nothing is said")

    say: Callable[[str], None] = never
    with pytest.raises(ModelError, match="differ"):
        CapacityWait(frozenset, list).form(fail, never, say)
