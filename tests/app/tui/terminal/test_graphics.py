"""What a terminal answers, and whether pictures are drawn then."""

from __future__ import annotations

import os
import struct
import termios
from fcntl import ioctl

import pytest

from app.tui.terminal.graphics import KITTY_QUESTION, REPORT, CellSize, Graphics, cell_of, questions

KITTY, GHOSTTY, FOOT, KONSOLE = (
    f"\x1bP>|{name}\x1b\\" for name in ("kitty(0.35.2)", "ghostty 1.1.3", "foot(1.18)", "Konsole 23.8")
)
YES, NO = "\x1b_Gi=31;OK\x1b\\", "\x1b_Gi=31;EINVAL:not possible\x1b\\"
WITH_SIXELS, WITHOUT = "\x1b[?62;4;22c", "\x1b[?64;1;2;42c"
CELL = "\x1b[6;20;9t"


def told(*reports: str, true_colours: bool = True) -> tuple[Graphics, str]:
    """The graphics after ``reports``, and what was asked further."""
    graphics = Graphics(true_colours)
    assert all(REPORT.fullmatch(report) for report in reports)
    return graphics, "".join(graphics.take(report) for report in reports)


@pytest.mark.parametrize(
    ("reports", "protocol", "asked"),
    [
        ((KITTY, CELL, WITHOUT, YES), "kitty", KITTY_QUESTION),
        ((GHOSTTY, WITHOUT, YES), "kitty", KITTY_QUESTION),
        ((KITTY, CELL, WITHOUT, NO), None, KITTY_QUESTION),
        ((KITTY, CELL, WITHOUT), None, KITTY_QUESTION),
        ((FOOT, CELL, WITH_SIXELS), "sixel", ""),
        ((WITH_SIXELS, CELL), "sixel", ""),
        ((KONSOLE, CELL, WITH_SIXELS), "sixel", ""),
        ((FOOT, WITH_SIXELS), None, ""),  # pixels that nobody knows
        ((WITH_SIXELS, "\x1b[6;0;0t"), None, ""),
        (("\x1b[?4c", CELL), None, ""),  # a VT132
        ((CELL, WITHOUT), None, ""),
        ((), None, ""),
    ],
)
def test_the_protocol_is_what_the_terminal_says(reports: tuple[str, ...], protocol: str | None, asked: str) -> None:
    graphics, more = told(*reports)
    assert (graphics.protocol, more) == (protocol, asked)
    assert graphics.cell == (CellSize(9, 20) if CELL in reports else None)


def test_few_colours_cannot_name_kittys_pictures() -> None:
    graphics, more = told(KITTY, CELL, WITHOUT, true_colours=False)
    assert (graphics.protocol, more) == (None, "")


@pytest.mark.parametrize(
    ("environment", "asks"),
    [
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, True),
        ({"TERM": "xterm-256color", "TMUX": "/tmp/tmux-0/default,1,0"}, False),
        ({"TERM": "tmux-256color"}, False),
        ({"TERM": "screen.xterm-256color"}, False),
        ({"TERM": "xterm", "STY": "1.pts-0"}, False),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, False),
        ({"TERM": "linux"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_only_terminals_that_may_draw_are_asked(environment: dict[str, str], asks: bool) -> None:
    assert bool(questions(environment)) == asks
    assert "\x1b_" not in questions(environment), "others than kitty may print its question"


@pytest.mark.parametrize(
    ("size", "cell"), [((24, 80, 800, 480), CellSize(10, 20)), ((24, 80, 0, 0), None), ((0, 0, 800, 480), None)]
)
def test_the_system_may_know_the_pixels(size: tuple[int, int, int, int], cell: CellSize | None) -> None:
    master, slave = os.openpty()
    try:
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size))
        assert cell_of(slave) == cell
    finally:
        os.close(master)
        os.close(slave)
    read, write = os.pipe()
    assert cell_of(write) is None
    os.close(read)
    os.close(write)
