"""The table of ``bench ring`` from given numbers: which predictions came true."""

from __future__ import annotations

from engine.bench.ring import COLUMNS, RingRow, result_of
from engine.ipc.messages import Bench, BenchResult, Load
from engine.planning.ring_speed import PassTime


def row(method: str, measured: float, planned: float | None, predicted: float | None) -> RingRow:
    def took(seconds: float | None) -> PassTime | None:
        return None if seconds is None else PassTime(seconds, 0.0, 0.0)

    time = took(measured)
    assert time is not None
    return RingRow("tiny", method, 2, time, measured, measured, took(planned), took(predicted))


def table(*rows: RingRow) -> BenchResult:
    return result_of(Bench(id=1, load=Load(id=1, model="tiny"), kind="ring"), 1, True, 2, 32, rows)


def test_each_row_says_whether_its_prediction_came_true() -> None:
    found = table(
        row("P-L_R-D", 0.100, 0.130, 0.120), row("P-L_B", 0.100, 0.080, 0.126), row("naive", 0.100, None, 0.074)
    )
    within = COLUMNS.index("within 25 %")
    error = COLUMNS.index("error")
    assert [(each[error], each[within]) for each in found.rows] == [("+20 %", "yes"), ("+26 %", "no"), ("-26 %", "no")]
    assert all(len(each) == len(COLUMNS) for each in found.rows)
    assert "Predictions within 25 % of the measured time of a token: planned 1 of 2, predicted 1 of 3." in found.notes
    assert found.data is not None
    assert [each["planned_within_25_percent"] for each in found.data["rows"]] == [False, True, None]


def test_without_predictions_nothing_is_counted() -> None:
    found = table(row("one node", 0.1, None, None))
    assert found.rows[0][COLUMNS.index("within 25 %")] is None
    assert not [note for note in found.notes if "25 %" in note]
