"""How the terminal draws pictures, found out while the screen is already there: it is asked, and may never answer.

A terminal is asked for its name, the size of a cell and its abilities by sequences that every terminal reads as such.
Only one that calls itself kitty or Ghostty is asked for kitty's protocol, because others print that question, or say
yes without placing pictures by characters, which is what the layout needs.
"""

from __future__ import annotations

import re
import struct
import termios
from collections.abc import Mapping
from fcntl import ioctl
from typing import Literal, NamedTuple

from textual.message import Message

Protocol = Literal["kitty", "sixel"]

PATIENCE_S = 3.0
"""Seconds in which answers are expected. Afterwards the beginning of one is a key again."""
KITTY_QUESTION = "\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\"
"""A question whether a picture of one pixel could be drawn."""
_QUESTIONS = "\x1b[>0q\x1b[16t\x1b[c"
"""Questions for the name, the pixels of a cell and the abilities."""
_PLACING = ("kitty", "ghostty")
"""Beginnings of the names of terminals that place pictures by characters."""
_UNABLE = ("dumb", "linux", "screen", "tmux")
"""Beginnings of TERM that draw no pictures. What is between this program and the terminal would move text, and not the
pictures."""

_NAME = re.compile(r"\x1bP>\|([^\x1b]*)\x1b\\")
_KITTY = re.compile(r"\x1b_Gi=31;([^\x1b]*)\x1b\\")
_CELL = re.compile(r"\x1b\[6;(\d{1,4});(\d{1,4})t")
_ABILITIES = re.compile(r"\x1b\[\?([0-9;]*)c")
REPORT = re.compile(r"\x1b(?:P>\|[^\x1b]{0,200}\x1b\\|_G[^\x1b]{0,200}\x1b\\|\[6;\d{1,4};\d{1,4}t|\[\?[0-9;]{0,80}c)")
"""A whole answer."""
REPORT_BEGUN = re.compile(r"\x1b(?:P(?:>(?:\|[^\x1b]{0,200}\x1b?)?)?|_(?:G[^\x1b]{0,200}\x1b?)?)\Z")
"""The beginning of an answer that does not begin as keys do."""


class TerminalReport(Message):
    """The terminal answered with ``sequence``."""

    def __init__(self, sequence: str) -> None:
        super().__init__()
        self.sequence = sequence


class CellSize(NamedTuple):
    """Pixels of a character's cell."""

    width: int
    height: int


USUAL_CELL = CellSize(10, 20)
"""The cell that is assumed where it only decides on proportions."""


def questions(environment: Mapping[str, str]) -> str:
    """What to ask the terminal; empty if it draws no pictures anyway."""
    between = "TMUX" in environment or "STY" in environment or "NO_COLOR" in environment
    return "" if between or environment.get("TERM", "dumb").startswith(_UNABLE) else _QUESTIONS


def cell_of(descriptor: int) -> CellSize | None:
    """The size of a cell, if the terminal told the system its pixels."""
    try:
        rows, columns, width, height = struct.unpack("HHHH", ioctl(descriptor, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return None
    if not rows or not columns:
        return None
    cell = CellSize(width // columns, height // rows)
    return cell if all(cell) else None


class Graphics:
    """What the terminal said so far of its pictures.

    ``true_colours``: whether it is sent colours of 24 bits, with which kitty's protocol says which picture is meant.
    """

    def __init__(self, true_colours: bool = False) -> None:
        self.cell: CellSize | None = None
        self._true_colours = true_colours
        self._answered: set[Protocol] = set()

    @property
    def protocol(self) -> Protocol | None:
        """The protocol to draw with; None: no pictures."""
        if "kitty" in self._answered:
            return "kitty"
        # A sixel picture of a wrong size would cover the text around it.
        return "sixel" if "sixel" in self._answered and self.cell is not None else None

    def take(self, report: str) -> str:
        """Learn from an answer. Returns what to ask next."""
        if name := _NAME.fullmatch(report):
            return KITTY_QUESTION if self._true_colours and name[1].lower().startswith(_PLACING) else ""
        if answer := _KITTY.fullmatch(report):
            if answer[1] == "OK":
                self._answered.add("kitty")
        elif pixels := _CELL.fullmatch(report):
            cell = CellSize(int(pixels[2]), int(pixels[1]))
            self.cell = self.cell or (cell if all(cell) else None)
        elif (abilities := _ABILITIES.fullmatch(report)) and "4" in abilities[1].split(";")[1:]:
            self._answered.add("sixel")
        return ""
