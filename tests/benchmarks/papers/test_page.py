"""The page on the papers: what a row says of itself, and what is printed of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import __main__ as command
from benchmarks.papers.findings import TAGS, Findings, Group, Input, Row, Table
from benchmarks.papers.page import IN_SHORT, Done, cells, figure, page, paragraph, percent
from benchmarks.papers.registry import GROUPS

PAGE = Path(__file__).parents[3] / "benchmarks" / "results" / "papers.md"
MISSED = ("Switch-Large-128 encoder", "Switch-Large-128 decoder", "NLLB-MoE decoder")
"""Stacks whose gain does not follow from data sheets."""
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


def printed_rows() -> list[list[str]]:
    """The cells of every row of benchmarks/results/papers.md that has a tag."""
    lines = [line.strip().strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in cells] for cells in lines]
    return [cells for cells in rows if len(cells) == 7 and cells[2] in TAGS]


def test_the_printed_page_has_every_group_with_its_script() -> None:
    text = PAGE.read_text()
    for group in GROUPS:
        assert f"### {group.title}\n\n`{group.script}`" in text
    for said in IN_SHORT:
        assert "\n".join(paragraph(said)) in text


def test_on_the_printed_page_exact_rows_are_equal_and_bands_hold_the_papers_figures_but_for_these() -> None:
    rows = printed_rows()
    assert len(rows) > 130
    unequal = {(row[0], row[5]) for row in rows if row[2] == "exact" and row[5] not in ("", "equal")}
    assert unequal == {
        ("table 6, 6 nodes", "-3 %"),
        ("figure 8", "-0.9 %"),
        ("section 5.5", "-4 %"),
        ("appendix B", "-4 %"),
    }
    outside = {(row[0], row[1]) for row in rows if row[5].endswith("outside")}
    assert outside == {
        ("footnote 4", "prompt tokens/s, P-L_R-D, 4 nodes"),
        *(("figure 6, nominal inputs", f"{name}, MD+LB over GPU+PM") for name in MISSED),
        ("figure 8, appendix C", "25th percentile"),
        ("figure 8, appendix C", "minimum"),
        ("figure 4", "answers, Twiddler over llama.cpp, mean of 12 lengths"),
        ("figure 5", "long prompts, Twiddler over Mixtral-offloading"),
        ("figure 6", "beams, Twiddler over llama.cpp, widths 4, 8, 12"),
    }


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
