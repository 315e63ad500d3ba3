"""Rows, tokens and rates of the answers under way, against a count over all passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ipc.messages import AskingProgram
from engine.session.sharing import WINDOW_S, PassLog

PROGRAMS: list[AskingProgram] = ["chat", "serve", "serve", "ask"]
Pass = tuple[float, float, list[tuple[int, int]]]


@st.composite
def passes(draw: st.DrawFn) -> list[Pass]:
    """Passes one after the other: begin, end, and the answer and rows of each step."""
    now, found = 0.0, list[Pass]()
    for _ in range(draw(st.integers(1, 30))):
        begun = now + draw(st.floats(0, 0.5))
        now = begun + draw(st.floats(0.01, 3))
        steps = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=6))
        found.append((begun, now, steps))
    return found


@given(passes())
def test_rates_are_those_of_the_passes_of_the_last_seconds(run: list[Pass]) -> None:
    log = PassLog()
    for number, program in enumerate(PROGRAMS):
        log.begin(number, program)
    for begun, ended, steps in run:
        log.decoded(begun, ended, steps)

    def rate(number: int) -> float:
        own = [(begun, ended, steps) for begun, ended, steps in run if any(step[0] == number for step in steps)]
        if not own:
            return 0.0
        latest = own[-1][1]
        recent = [each for each in own if each[0] >= latest - WINDOW_S] or own[-1:]
        tokens = sum(step[0] == number for _, _, steps in recent for step in steps)
        return tokens / (latest - recent[0][0])

    rates = [rate(number) for number in range(4)]
    told = log.under_way(1)
    assert told is not None and told.answers == 4
    assert told.own_tokens_per_s == pytest.approx(rates[1])
    assert told.tokens_per_s == pytest.approx(sum(rates))
    shares = {share.program: share for share in log.shares()}
    assert list(shares) == ["ask", "chat", "serve"] and shares["serve"].answers == 2
    assert shares["serve"].tokens_per_s == pytest.approx(rates[1] + rates[2])
    recent = [each for each in run if each[0] >= run[-1][1] - WINDOW_S] or run[-1:]
    rows = sum(rows for _, _, steps in recent for _, rows in steps)
    assert log.rows_per_pass == pytest.approx(rows / len(recent))


def test_who_is_alone_is_told_of_nobody() -> None:
    log = PassLog()
    log.begin("a", "chat")
    log.decoded(0.0, 0.1, [("a", 1)])
    assert log.under_way("a") is None
    log.begin("b", "ask")
    assert log.under_way("a") is not None
    log.end("a")
    log.decoded(0.1, 0.2, [("a", 1), ("b", 3)])  # its last pass may be counted after its end
    assert log.under_way("a") is None and log.under_way("b") is None and log.answers == 1
    assert log.rows_per_pass == 2.5
    log.end("b")
    assert log.rows_per_pass == 0.0 and log.shares() == []
