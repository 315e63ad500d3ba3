"""The page on the papers: what a row says of itself, and what is printed of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import __main__ as command
from benchmarks.papers.findings import Findings, Group, Input, Row, Table
from benchmarks.papers.page import Done, cells, figure, page, percent

MEASURED = Row(where="table 9", what="time, s", tag="executed", paper="0.020", ours=0.0204)


def test_equal_is_as_the_paper_rounds() -> None:
    assert Row(where="", what="", tag="exact", paper="0.061", ours=0.06149).equal
    assert not Row(where="", what="", tag="exact", paper="0.061", ours=0.0616).equal
    assert Row(where="", what="", tag="exact", paper="289,000", ours=289000.2).equal
    assert Row(where="", what="", tag="exact", paper="<0.001", ours=0.0009).equal
    assert not Row(where="", what="", tag="exact", paper="≤ 7.5", ours=7.6).equal
    assert not Row(where="", what="", tag="exact", paper="a curve", ours=1.0).equal


def test_a_band_covers_what_the_paper_prints_or_does_not() -> None:
    def banded(low: float, high: float) -> Row:
        return Row(where="", what="", tag="simulated", paper="3.1", ours=3.3, low=low, high=high)

    assert banded(3.14, 3.5).covered
    assert banded(3.16, 3.5).covered is False
    assert MEASURED.covered is None
    assert cells(banded(3.0, 3.5))[4:6] == ["3.30 (3.00–3.50)", "+6 %, inside"]
    assert cells(banded(3.2, 3.5))[5] == "+6 %, outside"


def test_a_fitted_row_has_no_deviation_and_counts_for_nothing() -> None:
    fitted = Row(where="", what="", tag="timed", paper="6.1", ours=6.1, fitted_on="table 4")
    assert fitted.deviation is None
    assert cells(fitted)[5] == "fitted on table 4"
    group = Group("a", "MoNDE", "A", Findings)
    text = page([Done(group, Findings(rows=[fitted, MEASURED]), 1.0)], "here")
    assert "| executed | 1 | 1 of 1 | 1 of 1 |  |" in text
    assert "| timed | 0 |" in text
    assert "counted nowhere: 1 rows" in text


def test_half_a_band_and_a_missing_reason_are_errors() -> None:
    with pytest.raises(ValueError, match="two ends"):
        Row(where="x", what="", tag="simulated", low=1.0)
    with pytest.raises(ValueError, match="says why"):
        Row(where="x", what="", tag="not possible here")


def test_the_page_has_everything_that_was_found() -> None:
    findings = Findings(
        rows=[MEASURED],
        inputs=[Input("link", "22.6 GB/s", "published", "somewhere")],
        tables=[Table("A curve.", ("x", "y|z"), [["1", "2"]])],
        notes=["Said."],
    )
    text = page([Done(Group("name", "Twiddler", "Title", Findings, quiet=True), findings, 61.0)], "a machine")
    assert "## Twiddler\n\n### Title\n\n`python -m benchmarks.papers --only name`, which measures time" in text
    assert "| table 9 | time, s | executed | 0.020 | 0.0204 | equal |  |" in text
    assert "| link | 22.6 GB/s | published | somewhere |" in text
    assert "A curve.\n\n| x | y|z |" in text
    assert "Said." in text
    assert "1.0 minutes" in text and "a machine" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.061234, "0.0612"), (16.29, "16.3"), (1234.0, "1234"), (7.0, "7.00"), (0.0, "0"), (120, "120")],
)
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text


def test_percents() -> None:
    assert (percent(-0.134), percent(0.004), percent(0.0)) == ("-13 %", "+0.4 %", "+0.0 %")


def test_one_group_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tuple(Group(name, "MoNDE", name, lambda: Findings(rows=[MEASURED])) for name in ("first", "second"))
    monkeypatch.setattr(command, "GROUPS", groups)
    command.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["first", "second"]
    command.main(["--only", "second"])
    assert "### second" in (printed := capsys.readouterr().out)
    assert "### first" not in printed
    loud = Group("third", "MoNDE", "third", lambda: pytest.fail("it was run"), quiet=True)
    monkeypatch.setattr(command, "GROUPS", (*groups, loud))
    command.main(["--untimed"])
    assert "### third" in (printed := capsys.readouterr().out)
    assert "### second" in printed
    assert "Not run for this page" in printed
    assert "All rows together took" not in printed
    monkeypatch.setattr(command, "GROUPS", groups)
    command.main(["--out", str(tmp_path / "papers.md")])
    assert "### first" in (tmp_path / "papers.md").read_text()
