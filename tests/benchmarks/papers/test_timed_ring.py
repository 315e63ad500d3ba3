"""The timed ring: its nodes do what the loading rules say, and its predictions of the paper's footnotes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.papers.cluster_model import realised_placement, replicated_halves
from benchmarks.papers.findings import Row
from benchmarks.papers.timed_node import Pace, Sleeper
from benchmarks.papers.timed_ring import TimedMethod, TimedRing
from benchmarks.papers.timed_rows import DIAGRAMS, dbrx_pace, footnotes

QUICK = Pace(expert_s=1e-5, trunk_s=1e-5, wire_s=1e-5, wire_bytes_per_s=1e9)
SMALL = TimedMethod(replicated_halves(2), layers=6, width=32)


def test_nodes_execute_what_the_rules_say() -> None:
    with TimedRing(3, slow=1.0) as ring:
        busy = ring.run(replace(SMALL, mode="central", loading="busy-full"), QUICK, 2)
        assert busy.executed == 8
        naive = ring.run(replace(SMALL, mode="central", loading="selected", one_by_one=True), QUICK, 2)
        assert naive.executed < 4
        aided = ring.run(replace(SMALL, routes=[[[0, 9, 10, 11]] * 6]), QUICK, 2)
        assert aided.executed == 3
        three = replace(SMALL, placement=replicated_halves(3), routes=[[[0, 1, 2, 3]] * 6])
        assert ring.run(three, QUICK, 2).executed == 2
        spread = ring.run(replace(three, placement=realised_placement(3), rows=1), QUICK, 2)
        assert spread.executed == 2
        assert spread.seconds > spread.moe_s + spread.exchange_s > 0
        exact = ring.run(replace(SMALL, mode="exact", shared_meanwhile=True, rows=5), replace_pace(1e-5), 2)
        assert exact.executed > 0


def replace_pace(shared_s: float) -> Pace:
    return Pace(expert_s=1e-5, expert_row_s=1e-5, wire_s=1e-5, shared_s=shared_s)


def test_a_sleep_that_was_too_long_is_taken_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.5

    monkeypatch.setattr("benchmarks.papers.timed_node.time.sleep", sleep)
    monkeypatch.setattr("benchmarks.papers.timed_node.time.perf_counter", lambda: now[0])
    sleeper = Sleeper()
    for _ in range(3):
        sleeper.sleep(1.0)
    sleeper.sleep(0.0)
    assert slept == [1.0, 0.5, 0.5]


def test_calibrated_on_two_nodes_the_footnotes_of_three_follow() -> None:
    rows = {row.what: row for row in footnotes()}
    assert rows["prompt tokens/s, P-L_R-D, 2 nodes"].fitted_on
    assert rows["prompt tokens/s, P-L_R-D, 2 nodes"].equal
    assert rows["prompt tokens/s, P-L_R-D, 3 nodes"].covered
    four = rows["prompt tokens/s, P-L_R-D, 4 nodes"]
    assert four.covered is False and four.deviation == pytest.approx(0.23, abs=0.03)
    assert rows["prompt tokens/s, P-L_B, 2 nodes"].deviation == pytest.approx(-0.19, abs=0.03)


def test_the_page_has_the_footnotes_as_they_follow(not_on_the_page: Callable[[Sequence[Row]], list[str]]) -> None:
    assert not_on_the_page([*footnotes(), *DIAGRAMS]) == []


def test_the_paces_are_table_4s() -> None:
    pace = dbrx_pace()
    assert pace.expert_s * 40 * 2.646 == pytest.approx(0.081, abs=0.0005)
    assert pace.expert_s > 32 * pace.expert_row_s
    assert (pace.trunk_s + pace.wire_s) * 40 == pytest.approx(0.085)
    assert all(row.note for row in DIAGRAMS)
