"""The line at which a conversation is being read, remembered by its text, so that any new layout can show it again.

Messages are wrapped anew for each width, and parts above the line open and fold. The letters stay the same: all
characters except white space, line fillers and the marks of code. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from textual.content import Content

from app.chat.state import Entry

_NOT_LETTERS = re.compile(r"[\s─▎⧉]+")
_SNIPPET = 24
"""Letters from the reader's line on by which it is found in text whose letters have changed around it."""


@dataclass(frozen=True)
class Drawn:
    """A message as it is drawn ``width`` cells wide: its ``pieces``, each with the line at which it begins."""

    pieces: tuple[tuple[int, str], ...]
    width: int

    def lines(self) -> list[tuple[int, str]]:
        """The number and the letters of each line."""
        return [
            (first + index, _NOT_LETTERS.sub("", line.plain))
            for first, text in self.pieces
            for index, line in enumerate(Content(text).wrap(self.width))
        ]


@dataclass(frozen=True)
class Place:
    """A reading position: the end, or line ``row`` of ``entry`` as it was ``drawn`` then.

    Lines count from 0; those of the margin before the message are negative.
    """

    entry: Entry | None = None
    row: int = 0
    drawn: Drawn = Drawn((), 0)

    def row_in(self, drawn: Drawn) -> int:
        """The line of ``drawn``, the same message now, that begins with or contains the reader's text."""
        if self.row < 0 or drawn == self.drawn:
            return self.row
        before, now = self.drawn.lines(), drawn.lines()
        above = sum(len(letters) for row, letters in before if row < self.row)
        old, new = ("".join(letters for _, letters in lines) for lines in (before, now))
        if above == len(old) or not new:
            # Below its last line: as far from its end as before.
            return max(0, self.row + (now[-1][0] if now else 0) - (before[-1][0] if before else 0))
        wanted = min(_found(old, new, above), len(new) - 1)
        blank = next(row for row, letters in before if row >= self.row and letters) - self.row
        above_it = -1
        for row, letters in now:
            wanted -= len(letters)
            if wanted < 0:
                # As many blank lines stay above it as the reader saw, if it has them still.
                return max(row - blank, above_it + 1)
            if letters:
                above_it = row
        return now[-1][0]


def _found(old: str, new: str, index: int) -> int:
    """The index in ``new`` of the letter ``index`` of ``old``, or an estimate if the text around it has changed."""
    snippet = old[index : index + _SNIPPET]
    if new.startswith(old[: index + _SNIPPET]):
        return index
    if len(snippet) == _SNIPPET and new.endswith(old[index:]):
        return index + len(new) - len(old)
    # Something differs before it and after it: a table that is laid out in another way, say.
    share = index * len(new) // len(old)
    there, here = _places(snippet, old), _places(snippet, new)
    if len(there) == len(here):
        return here[there.index(index)]
    while not here and (snippet := snippet[: len(snippet) // 2]):
        here = _places(snippet, new)
    return min(here, key=lambda place: abs(place - share), default=share)


def _places(snippet: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(f"(?={re.escape(snippet)})", text)]
