"""The page on the papers in Markdown. Pure."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.findings import PAPERS, TAGS, Findings, Group, Row, Table

COLUMNS = ("where", "what", "how", "paper", "ours", "deviation", "note")
CLOSE = 0.15
"""Deviation, relative to the paper's figure, up to which a row counts as close."""

WIDTH = 120
"""Columns of a paragraph."""

INTRODUCTION = (
    "Printed by `make papers`. Every table and figure of the three papers, with what comes out here. The papers: "
    "*Towards Building Private LLMs: Exploring Multi-Node Expert Parallelism on Apple Silicon* (RACS '24), *MoNDE: "
    "Mixture of Near-Data Experts* (DAC '24), and *Twiddler*. What is ours alone is in "
    "[docs/performance.md](../../docs/performance.md); [docs/papers.md](../../docs/papers.md) says it in short."
)
RULES = (
    "A row that was fitted on a figure says so, has no deviation, and counts for nothing. In brackets is a band: the "
    "least and the most that the uncertain inputs allow. Every input has a source; *chosen* means that nobody printed "
    "it. Neither a GPU nor a Mac was at hand when this page was made: what needs one is simulated, or says that it is "
    "not possible here."
)
IN_SHORT = (
    "*Private LLMs*: equation (1) gives 29 of the 30 cells of table 6 once copies of experts are placed by one rule, "
    "which the paper does not state. Placed by our planner, three and four nodes execute 13 % and 26 % fewer experts; "
    "the timed ring shows what that is in tokens per second.",
    "*MoNDE*: from data sheets one of the four means of figure 6 comes out. All four do with inputs that the paper "
    "does not print and that were chosen with them known; the decoders' largest gain does not. Both ratios of figure 8 "
    "then lie inside their bands, of which the encoder's is so wide that it says little, and the directions of figures "
    "7, 9 and 10 hold in all rows but two.",
    "*Twiddler*: hit rates follow from its popularity, long prompts come out within 5 %, and of the 1.26 for answers "
    "about a third does. The 11.57 for beams is mostly a baseline that decodes tokens again: with nothing else "
    "changed, that makes our own engine many times slower.",
)


@dataclass(frozen=True)
class Done:
    """A group, what it found, and the seconds it took."""

    group: Group
    findings: Findings
    seconds: float
    left_out: bool = False
    """Whether it was not run, and ``findings`` only says so."""


def page(done: Sequence[Done], machine: str) -> str:
    """The whole page. ``machine``: the one on which groups that measure time ran."""
    lines = [
        "# The three papers, rerun",
        "",
        *paragraph(INTRODUCTION),
        "",
        "| how | meaning |",
        "| --- | --- |",
        *(f"| {tag} | {meaning} |" for tag, meaning in TAGS.items()),
        "",
        *paragraph(RULES),
        "",
        *_tally(done),
    ]
    for text in IN_SHORT:
        lines += ["", *paragraph(text)]
    for paper in PAPERS:
        groups = [each for each in done if each.group.paper == paper]
        if groups:
            lines += ["", f"## {paper}"]
        for each in groups:
            lines += ["", *_group(each)]
    if not any(each.left_out for each in done):
        seconds = sum(each.seconds for each in done)
        lines += ["", f"All rows together took {seconds / 60:.1f} minutes. Timed and executed rows ran on: {machine}."]
    return "\n".join(lines) + "\n"


def _tally(done: Sequence[Done]) -> list[str]:
    """How many rows of each tag agree."""
    rows = [row for each in done for row in each.findings.rows if not row.fitted_on]
    fitted = sum(1 for each in done for row in each.findings.rows if row.fitted_on)
    counts = Counter(row.tag for row in rows)
    lines = ["| how | rows | equal | within 15 % | paper inside our band |", "| --- | --- | --- | --- | --- |"]
    for tag in TAGS:
        here = [row for row in rows if row.tag == tag]
        compared = [row for row in here if row.printed is not None and row.ours is not None]
        equal = sum(row.equal for row in compared)
        close = sum(row.equal or abs(row.deviation or 1.0) <= CLOSE for row in compared)
        banded = [row.covered for row in here if row.covered is not None]
        cells = [f"{equal} of {len(compared)}", f"{close} of {len(compared)}"] if compared else ["", ""]
        inside = f"{sum(banded)} of {len(banded)}" if banded else ""
        lines.append(f"| {tag} | {counts[tag]} | {' | '.join(cells)} | {inside} |")
    return [
        *lines,
        "",
        f"Rows without a number of the paper are not compared. Fitted and counted nowhere: {fitted} rows.",
    ]


def _group(done: Done) -> list[str]:
    group, findings = done.group, done.findings
    lines = [f"### {group.title}", "", f"`{group.script}`"]
    if group.quiet:
        lines[-1] += ", which measures time: other programs disturb it."
    if findings.rows:
        lines += ["", *markdown(COLUMNS, [cells(row) for row in findings.rows])]
    for table in findings.tables:
        lines += ["", *_table(table)]
    for note in findings.notes:
        lines += ["", *paragraph(note)]
    if findings.inputs:
        given = [[each.name, each.value, each.source, each.where] for each in findings.inputs]
        lines += ["", *markdown(("input", "value", "source", "where"), given)]
    return lines


def _table(table: Table) -> list[str]:
    return [*paragraph(table.caption), "", *markdown(table.columns, table.lines)]


def paragraph(text: str) -> list[str]:
    """``text`` in lines of at most WIDTH columns."""
    return textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    head = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return head + [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def cells(row: Row) -> list[str]:
    """A row of the page."""
    return [row.where, row.what, row.tag, row.paper, _ours(row), _deviation(row), row.note]


def _ours(row: Row) -> str:
    if row.ours is None:
        return ""
    text = number(row.ours, row)
    if row.low is not None and row.high is not None:
        text += f" ({number(row.low, row)}–{number(row.high, row)})"
    return text


def number(value: float, row: Row) -> str:
    """``value`` with the digits that the paper prints in ``row``, at least the row's own number of them."""
    found = figure(value, row.digits)
    decimals = len(found.partition(".")[2])
    return f"{value:.{row.decimals}f}" if row.printed is not None and decimals < row.decimals else found


def figure(value: float, digits: int = 3) -> str:
    """``value`` with so many significant digits and no exponent."""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _deviation(row: Row) -> str:
    if row.fitted_on:
        return f"fitted on {row.fitted_on}"
    if row.equal:
        return "equal"
    if row.deviation is None:
        return ""
    text = percent(row.deviation)
    if row.covered is not None:
        text += ", inside" if row.covered else ", outside"
    return text


def percent(share: float) -> str:
    """A signed share in percent, small ones with a digit behind the point."""
    return f"{100 * share:+.{1 if abs(share) < 0.01 else 0}f} %"
