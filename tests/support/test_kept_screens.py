"""Whatever can be seen to change on a screen changes its text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from tests.support.kept_screens import screen_text

TESTS = Path(__file__).resolve().parents[1]
LINE = (
    ("  ", "on #121212"), ("ready", "#e0e0e0 on #121212"), ("  ", "#777777 on #121212"),
    ("京都", "underline #ffc473 on #121212"), ("   ", "on #1e1e1e"),
)  # fmt: skip


def text_of(*runs: tuple[str, str]) -> str:
    return screen_text([Strip([Segment(text, Style.parse(style)) for text, style in runs])])


def test_the_lines_stand_before_the_runs_that_are_unlike_the_commonest() -> None:
    assert text_of(*LINE) == (
        "  ready  京都   ┃a b9-12 c13-15\n"
        "\n"
        "a  #e0e0e0 on #121212\n"
        "b  #ffc473 underline on #121212\n"
        "c  on #1e1e1e\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("run", "changed"),
    [
        pytest.param(1, ("readv", "#e0e0e0 on #121212"), id="another glyph"),
        pytest.param(1, ("ready", "#e0e0e1 on #121212"), id="another colour"),
        pytest.param(1, ("ready", "#e0e0e0 on #121213"), id="another background"),
        pytest.param(1, ("ready", "bold #e0e0e0 on #121212"), id="bold"),
        pytest.param(1, ("ready", "reverse #e0e0e0 on #121212"), id="reversed"),
        pytest.param(3, ("京都", "#ffc473 on #121212"), id="no underline"),
        pytest.param(2, (" ", "on #121212"), id="one column to the left"),
        pytest.param(2, ("  ", "underline #e0e0e0 on #121212"), id="underlined blanks"),
        pytest.param(2, ("  ", "on #1e1e1e"), id="another background of blanks"),
        pytest.param(4, ("  ", "on #1e1e1e"), id="one column less"),
    ],
)
def test_a_change_is_seen(run: int, changed: tuple[str, str]) -> None:
    assert text_of(*LINE[:run], changed, *LINE[run + 1 :]) != text_of(*LINE)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param((LINE[0], ("re", LINE[1][1]), ("ady", LINE[1][1]), *LINE[2:]), id="split"),
        pytest.param((LINE[0], ("ready  ", LINE[1][1]), *LINE[3:]), id="joined"),
        pytest.param((("  ", "#333333 on #121212"), *LINE[1:]), id="the colour of blanks"),
    ],
)
def test_what_cannot_be_seen_changes_nothing(runs: Sequence[tuple[str, str]]) -> None:
    assert text_of(*runs) == text_of(*LINE)


def test_every_kept_screen_is_one_of_a_test() -> None:
    screens = sorted(TESTS.rglob("__screens__/*/*.txt"))
    assert len(screens) > 50
    for screen in screens:
        test = screen.parents[2] / f"{screen.parent.name}.py"
        assert f"def {screen.stem.partition('[')[0]}(" in test.read_text(encoding="utf-8"), screen
