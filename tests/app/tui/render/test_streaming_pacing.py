"""How often the screen draws, against clocks that are set by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.tui.render.streaming import SHARE, Pace


class Clocks:
    def __init__(self) -> None:
        self.now = 100.0
        self.used = 7.0

    def pace(self, least: float, most: float) -> Pace:
        return Pace(least, most, clock=lambda: self.now, used=lambda: self.used)


def test_the_first_drawing_is_made_at_once() -> None:
    assert Clocks().pace(0.1, 1.0).wait() <= 0


def test_cheap_drawings_come_as_often_as_allowed() -> None:
    clocks = Clocks()
    pace = clocks.pace(0.1, 1.0)
    for _ in range(20):
        pace.drawn()
        assert 0.099 < pace.wait() < 0.101
        clocks.now += 0.1
        clocks.used += 0.001
    assert pace.wait() <= 0


@given(st.floats(0.0001, 0.2), st.integers(10, 40))
def test_the_process_uses_about_its_share(cost: float, drawings: int) -> None:
    clocks = Clocks()
    pace = clocks.pace(0.08, 0.25)
    for _ in range(drawings):
        pace.drawn()
        clocks.used += cost
        clocks.now += max(0.0, pace.wait())
        assert 0.08 <= pace.interval <= 0.25
    wanted = cost / SHARE
    assert abs(pace.interval - min(0.25, max(0.08, wanted))) < 0.01


def test_a_new_answer_begins_without_what_was_used_before() -> None:
    clocks = Clocks()
    pace = clocks.pace(0.08, 0.25)
    clocks.used += 5
    clocks.now += 0.1
    pace.begin()
    assert pace.wait() <= 0
    pace.drawn()
    assert pace.interval == 0.08
