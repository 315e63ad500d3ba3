"""Pictures as what is sent to a terminal: by kitty's protocol, or as sixels, a row of cells at a time. Pure.

Either way a picture is a part of lines of text, so that scrolling, folding and what covers it need nothing else. With
kitty's protocol the terminal gets the picture once, and each cell is a character that names its part. Each row of cells
in sixels is a picture of its own, and characters stand for it until it is sent.
"""

from __future__ import annotations

import math
import re
import zlib
from base64 import b64encode
from typing import NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style

from app.tui.terminal.graphics import CellSize
from engine.pictures.picture import Picture

_PLACEHOLDER = "\U0010eeee"
_DIACRITICS = (
    "\u0305\u030d\u030e\u0310\u0312\u033d\u033e\u033f\u0346\u034a\u034b\u034c\u0350\u0351\u0352\u0357\u035b\u0363\u0364"
    "\u0365\u0366\u0367\u0368\u0369\u036a\u036b\u036c\u036d\u036e\u036f\u0483\u0484\u0485\u0486\u0487\u0592\u0593\u0594"
    "\u0595\u0597\u0598\u0599\u059c\u059d\u059e\u059f\u05a0\u05a1\u05a8\u05a9\u05ab\u05ac\u05af\u05c4\u0610\u0611\u0612"
    "\u0613\u0614\u0615\u0616\u0617\u0657\u0658"
)
"""Characters that stand for the numbers from 0 on in kitty's protocol."""
_FIRST, _MOST_ROWS, _CONTINUED = 0x100000, 0x8000, "\U00108000"
"""First of the characters that begin a row of sixels, their number, and the character of its further cells. All are of
private use."""
_CELLS = re.compile("[\U00100000-\U00107fff]\U00108000*|\U00108000+")
_CHUNK = 4096
"""Maximum characters of a picture's data in one sequence of kitty's protocol."""
SIXEL_COLOURS = 64
"""Maximum colours of a picture in sixels."""
_BAND = 6
"""Rows of pixels that a character of sixels has."""
_REPEATED = re.compile(r"(.)\1{3,}")


class Fit(NamedTuple):
    """The size of a drawn picture: in cells, and the pixels that it is scaled to."""

    columns: int
    rows: int
    width: int
    height: int


def fitted(width: int, height: int, cell: CellSize, columns: int, rows: int) -> Fit:
    """The size of a picture of ``width`` x ``height`` pixels that is at most ``columns`` x ``rows`` cells, and is not
    made larger."""
    scale = min(1.0, columns * cell.width / width, rows * cell.height / height)
    wide, high = max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
    return Fit(-(-wide // cell.width), -(-high // cell.height), wide, high)


# --- kitty's protocol -------------------------------------------------------------------------------------------------


def kitty_picture(number: int, picture: Picture, fit: Fit) -> str:
    """What gives the terminal ``picture``, under a ``number`` of 24 bits, and lets cells show it."""
    data = b64encode(zlib.compress(picture.rgb)).decode()
    chunks = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    head = f"a=T,U=1,q=2,f=24,o=z,s={picture.width},v={picture.height},i={number},c={fit.columns},r={fit.rows},"
    return "".join(
        f"\x1b_G{head if not index else 'q=2,'}m={int(index < len(chunks) - 1)};{chunk}\x1b\\"
        for index, chunk in enumerate(chunks)
    )


def kitty_removal(number: int) -> str:
    """What has the terminal forget the picture ``number``."""
    return f"\x1b_Ga=d,d=I,q=2,i={number}\x1b\\"


def kitty_rows(number: int, fit: Fit) -> list[Segment]:
    """The cells of each row of the picture ``number``."""
    style = Style(color=Color.from_rgb(number >> 16, number >> 8 & 255, number & 255))
    return [
        Segment("".join(_PLACEHOLDER + _DIACRITICS[row] + _DIACRITICS[column] for column in range(fit.columns)), style)
        for row in range(fit.rows)
    ]


# --- sixels -----------------------------------------------------------------------------------------------------------


def sixel_rows(picture: Picture, cell: CellSize) -> list[str]:
    """The sequences that draw ``picture``, one for each row of cells, from the row's top left corner on.

    Raises ValueError if it has more than :data:`SIXEL_COLOURS` colours.
    """
    pixels = list(zip(picture.rgb[::3], picture.rgb[1::3], picture.rgb[2::3], strict=True))
    numbers = {colour: number for number, colour in enumerate(dict.fromkeys(pixels))}
    if len(numbers) > SIXEL_COLOURS:
        raise ValueError(f"a picture with {len(numbers)} colours; {SIXEL_COLOURS} are possible")
    indices = bytes(numbers[pixel] for pixel in pixels)
    lines = [indices[start : start + picture.width] for start in range(0, len(indices), picture.width)]
    palette = list(numbers)
    return [_sixels(lines[top : top + cell.height], palette) for top in range(0, picture.height, cell.height)]


def _sixels(lines: list[bytes], palette: list[tuple[int, int, int]]) -> str:
    """The picture whose ``lines`` are numbers of colours in ``palette``."""
    colours = sorted(set(b"".join(lines)))
    # Pixels that are not set keep what is behind: the last band reaches below the row.
    drawn = [f'\x1bP0;1q"1;1;{len(lines[0])};{len(lines)}']
    for colour in colours:
        red, green, blue = (round(value / 2.55) for value in palette[colour])
        drawn.append(f"#{colour};2;{red};{green};{blue}")
    bands = []
    for top in range(0, len(lines), _BAND):
        masks: dict[int, bytearray] = {}
        for bit, line in enumerate(lines[top : top + _BAND]):
            for place, colour in enumerate(line):
                masks.setdefault(colour, bytearray(b"?" * len(line)))[place] += 1 << bit
        bands.append("$".join(f"#{colour}{_packed(mask.decode())}" for colour, mask in masks.items()))
    return "".join([*drawn, "-".join(bands), "\x1b\\"])


def _packed(sixels: str) -> str:
    return _REPEATED.sub(lambda same: f"!{len(same[0])}{same[1]}", sixels.rstrip("?"))


class SixelTable:
    """The rows of pictures that are drawn as sixels, and the characters that stand for their cells in lines of text.

    A row begins with a character of its own, and each further cell is :data:`_CONTINUED`. They become the picture when
    they are sent to the terminal, if all of them are still there, and blanks otherwise.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, str]] = {}
        """Columns and sequence of each row, by its first character."""
        self._next = 0

    def put(self, rows: list[str], fit: Fit) -> list[str]:
        """The cells of each of the ``rows`` of a picture, which are kept."""
        cells = []
        for sixels in rows:
            self._next = (self._next + 1) % _MOST_ROWS
            first = chr(_FIRST + self._next)
            self._rows[first] = fit.columns, sixels
            cells.append(first + _CONTINUED * (fit.columns - 1))
        return cells

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()

    def drawn(self, sent: str) -> str:
        """``sent`` with pictures in the places of their cells."""
        return _CELLS.sub(self._drawn, sent) if self._rows else sent

    def _drawn(self, cells: re.Match[str]) -> str:
        columns, sixels = self._rows.get(cells[0][0], (0, ""))
        blanks = " " * len(cells[0])
        if columns != len(cells[0]):
            return blanks
        return f"\x1b7{blanks}\x1b8{sixels}\x1b8\x1b[{columns}C"
