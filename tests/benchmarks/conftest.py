"""The page on the papers as it was printed, for tests that hold rows to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from benchmarks.papers.findings import Row
from benchmarks.papers.page import cells, markdown

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "papers.md"


@pytest.fixture(scope="session")
def not_on_the_page() -> Callable[[Iterable[Row]], list[str]]:
    """The lines of rows that benchmarks/results/papers.md does not have as they are now."""
    printed = set(PAGE.read_text().splitlines())
    return lambda rows: [line for line in markdown((), [cells(row) for row in rows])[2:] if line not in printed]
