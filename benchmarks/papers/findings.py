"""The rows of the page on the papers: what a paper prints, what comes out here, and how it was found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Paper = Literal["Private LLMs on Apple Silicon", "MoNDE", "Twiddler", "Beyond the papers"]
PAPERS: tuple[Paper, ...] = ("Private LLMs on Apple Silicon", "MoNDE", "Twiddler", "Beyond the papers")

Tag = Literal["exact", "executed", "timed", "simulated", "not possible here"]
TAGS: dict[Tag, str] = {
    "exact": "computed, nothing fitted; *equal* is in every digit that the paper prints",
    "executed": "the algorithm ran here, on this machine's processor or on a device with a virtual clock",
    "timed": "the real ring ran, with stated sleeps in place of hardware that is not here",
    "simulated": "computed from a model whose inputs are listed with their sources",
    "not possible here": "the reason is in the note",
}

Source = Literal["paper", "published", "measured here", "chosen", "fitted"]
"""Where an input comes from. ``chosen``: nobody printed it; rows that depend on it have a band."""


@dataclass(frozen=True)
class Input:
    """A number that rows rest on. ``where``: section, table, publication or row."""

    name: str
    value: str
    source: Source
    where: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of a paper beside ours.

    ``paper`` is the text as printed, which carries its digits: "0.061", "<0.001"; "" where nothing is printed.
    """

    where: str
    """Table, figure or section of the paper."""
    what: str
    """The quantity with its unit."""
    tag: Tag
    paper: str = ""
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    """The band of ours, where inputs are uncertain."""
    fitted_on: str = ""
    """The figure that this row was fitted on. Such a row shows nothing."""
    digits: int = 3
    """Significant digits of ours where the paper prints no number."""
    note: str = ""

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{self.where}: a band has two ends")
        if self.tag == "not possible here" and not self.note:
            raise ValueError(f"{self.where}: a row that is not possible here says why")

    @property
    def printed(self) -> float | None:
        """The number that the paper prints; None if it prints none."""
        text = self.paper.removeprefix("<").removeprefix("≤").removeprefix("about ").replace(" %", "").replace(",", "")
        try:
            return float(text)
        except ValueError:
            return None

    @property
    def decimals(self) -> int:
        """Digits behind the point in what the paper prints."""
        text = self.paper.replace(" %", "")
        return len(text.partition(".")[2])

    @property
    def equal(self) -> bool:
        """Whether ours, rounded as the paper rounds, is what the paper prints."""
        printed = self.printed
        if printed is None or self.ours is None:
            return False
        if self.paper.startswith("<"):
            return self.ours < printed
        if self.paper.startswith("≤"):
            return self.ours <= printed
        return round(self.ours, self.decimals) == printed

    @property
    def covered(self) -> bool | None:
        """Whether the band holds what the paper prints, to its printed digits; None without a band or a figure."""
        printed = self.printed
        if printed is None or self.low is None or self.high is None:
            return None
        return round(self.low, self.decimals) <= printed <= round(self.high, self.decimals)

    @property
    def deviation(self) -> float | None:
        """Ours over the paper's, less one; None where there is nothing to compare, or ours was fitted."""
        printed = self.printed
        if not printed or self.ours is None or self.fitted_on or self.paper[:1] in "<≤":
            return None
        return self.ours / printed - 1.0


@dataclass(frozen=True)
class Table:
    """Figures without a counterpart in the paper, or the points of a curve."""

    caption: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Findings:
    """What one group of rows found."""

    rows: Sequence[Row] = ()
    inputs: Sequence[Input] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Group:
    """Rows that one module finds. ``find`` does all the work; ``quiet``: it measures time on this machine, so that
    other programs disturb it."""

    name: str
    paper: Paper
    title: str
    find: Callable[[], Findings]
    quiet: bool = False

    @property
    def script(self) -> str:
        """The command that finds these rows alone."""
        return f"python -m benchmarks.papers --only {self.name}"
