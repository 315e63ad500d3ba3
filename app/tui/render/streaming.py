"""Drawing an answer while it is written: how much of it, and how often. Pure but for the clocks that are passed in, and
for the timer of a drawing.

A growing answer is cut into finished parts, which are rendered once as Markdown, and a tail that is drawn again as text
arrives. A cut is made where both sides mean the same as the whole: after a blank line outside a fence and without an
indent. A tail that is too long to be drawn several times a second is also cut at the end of a line within a paragraph,
a list or a fence, where the two sides look as the whole does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TypeGuard

from textual.content import Content
from textual.message_pump import MessagePump
from textual.timer import Timer

from app.tui.render.markdown import render_markdown

LONGEST_TAIL = 2_000
"""Number of characters from which on the tail, which is drawn again with every piece, is cut at a line."""
_TRIES = 6
"""Number of lines at whose ends a cut of a long tail is tried, the latest first."""
_WIDTH = 80
"""Width in cells at which the two sides of such a cut are compared with the whole."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$")


class Joint(Enum):
    """The joint between a part and the text above it."""

    BLOCK = 1
    """The part is a block of its own, after an empty line."""
    LINE = 2
    """The part continues in the next line."""
    CODE = 3
    """The part continues in the next line, as code whose language is shown above."""


@dataclass(frozen=True)
class AnswerPart:
    """A part of the answer, in Markdown that means the same by itself."""

    source: str
    joint: Joint = Joint.BLOCK


def joined(parts: Iterable[AnswerPart], render: Callable[[str], Content]) -> Content:
    """The content of ``parts``, each of which ``render`` makes of its Markdown, one below the other."""
    whole: Content | None = None
    for part in parts:
        content = render(part.source)
        if part.joint is Joint.CODE:
            content = Content("\n").join(list(content.split("\n", allow_blank=True))[1:])
        between = "\n\n" if part.joint is Joint.BLOCK else "\n"
        whole = content if whole is None else Content(between).join([whole, content])
    return Content() if whole is None else whole


class GrowingText:
    """The answer so far, as ``frozen`` parts and the ``tail``.

    The tail is longer than ``longest`` characters only if it can be cut nowhere.

    ``update`` takes the whole text each time: it may also be another text altogether (the best beam changed).
    """

    def __init__(self, longest: int = LONGEST_TAIL) -> None:
        self._longest = longest
        self.clear()

    def clear(self) -> None:
        self.frozen: list[AnswerPart] = []
        self.tail = AnswerPart("")
        self._text = ""
        self._frozen_length = 0
        self._reopen = ""
        """Opening line of a fence that was cut: the tail begins with it."""
        self._joint = Joint.BLOCK
        """Joint between the tail and the text above."""
        self._tried = 0
        """Length of the tail when it was last tried to cut it at a line."""

    def update(self, text: str) -> None:
        if not text.startswith(self._text[: self._frozen_length]):
            self.clear()
        self._text = text
        rest = self._reopen + text[self._frozen_length :]
        while (cut := self._cut(rest)) is not None:
            block, joint, reopen = cut
            self.frozen.append(AnswerPart(block + reopen[0], self._joint))
            self._frozen_length += len(block) - len(self._reopen)
            self._joint, self._reopen, self._tried = joint, reopen[1], 0
            rest = self._reopen + rest[len(block) :]
        self.tail = AnswerPart(rest, self._joint)

    def _cut(self, text: str) -> tuple[str, Joint, tuple[str, str]] | None:
        """The finished beginning of ``text``, how what follows is joined, and the closing and the opening line if the
        cut is in a fence. None: there is nothing to cut off yet."""
        safe = find_cut(text)
        if safe:
            return text[:safe], Joint.BLOCK, ("", "")
        # What could not be cut is tried again when it has grown by a part.
        if len(text) <= max(self._longest, self._tried * 5 // 4):
            return None
        self._tried = len(text)
        whole = _lines(text)
        for end, closing, opening in list(line_ends(text, self._longest))[: -_TRIES - 1 : -1]:
            above, below = _lines(text[:end] + closing), _lines(opening + text[end:])
            for joint, lines in ((Joint.LINE, below), (Joint.CODE, below[1:]), (Joint.BLOCK, ["", *below])):
                if (joint is Joint.CODE) == bool(opening.strip(" `~\n")) and above + lines == whole:
                    return text[:end], joint, (closing, opening)
        return None


def _lines(source: str) -> list[str]:
    return [line.rstrip() for line in render_markdown(source, _WIDTH).plain.split("\n")]


def find_cut(text: str) -> int:
    """The end of the part of ``text`` that can be rendered apart, because what follows cannot change it; 0 if none."""
    position = 0
    safe = 0
    fence = ""
    previous_blank = False
    fence_start = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            # A line that is still growing is certain to be a paragraph only if it begins with a letter.
            if not fence and previous_blank and line[0].isalpha():
                safe = position
            break
        opening = _FENCE.match(line.rstrip("\n"))
        if not fence:
            if previous_blank and line.strip() and not line.startswith((" ", "\t")) and not _is_item(line):
                safe = position
            if _opens(opening):
                fence, fence_start = opening[1], position
        elif _closes(opening, fence):
            fence = ""
            # An indented fence may be part of a list, and then does not end it.
            if not text[fence_start].isspace():
                safe = position + len(line)
        position += len(line)
        previous_blank = not fence and not line.strip()
    return safe


def line_ends(text: str, longest: int) -> Iterator[tuple[int, str, str]]:
    """The ends of the lines within the first ``longest`` characters of ``text``, each with the lines that close a fence
    there and open it again; empty outside of one.

    None is before or after a line that may be the head of a table.
    """
    position = 0
    closing = opening = ""
    for line, following in pairwise(text.splitlines(keepends=True)):
        position += len(line)
        if position > longest:
            return
        found = _FENCE.match(line.rstrip("\n"))
        if not closing and _opens(found):
            closing, opening = f"{found[1]}\n", line
            continue
        if closing and _closes(found, closing.rstrip("\n")):
            closing = opening = ""
        if closing or "|" not in line + following:
            yield position, closing, opening


def _opens(match: re.Match[str] | None) -> TypeGuard[re.Match[str]]:
    return match is not None and not ("`" in match[2] and match[1][0] == "`")


def _closes(match: re.Match[str] | None, fence: str) -> bool:
    return match is not None and match[1].startswith(fence) and not match[2].strip()


def _is_item(line: str) -> bool:
    return re.match(r"([-*+]|\d{1,9}[.)])[ \t]", line) is not None


SHARE = 0.03
"""Fraction of one core that the screen may use while an answer is written. The engine's threads wait for one another in
every layer, so time that the screen takes from one of them delays the answer."""


class Pace:
    """The time between two drawings, chosen so that this process uses about :data:`SHARE` of a core.

    It is ``least`` seconds while drawing is cheap and grows up to ``most`` seconds as drawing costs more. The text is
    shown a little later then; no text is lost.

    This is one of the two limits of an answer's stream. The other is the rate at which the engine emits events
    (:mod:`engine.session.turn`); between them events are passed on as they come.
    """

    def __init__(
        self,
        least: float,
        most: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self.interval = least
        self._least, self._most = least, most
        self._clock, self._used = clock, used
        self._drawn_at = clock() - least
        self._used_then = used()

    def wait(self) -> float:
        """Seconds until the next drawing may be made. 0 or less means now."""
        return self._drawn_at + self.interval - self._clock()

    def drawn(self) -> None:
        """A drawing is made now. The processor time used since the last one determines the next interval."""
        now, used = self._clock(), self._used()
        wanted = (used - self._used_then) / SHARE
        # Half of the way at a time, so that one costly drawing causes no long pause.
        self.interval = min(self._most, max(self._least, (self.interval + wanted) / 2))
        self._drawn_at, self._used_then = now, used

    def begin(self) -> None:
        """Start over: the next drawing may be made at once, and processor time used before does not count."""
        self.interval = self._least
        self._drawn_at, self._used_then = self._clock() - self._least, self._used()


class PacedDrawing:
    """Calls ``draw`` of ``widget`` as often as a :class:`Pace` of ``least`` to ``most`` seconds allows.

    ``draw`` says with :meth:`drawn` that it draws, whoever called it.
    """

    def __init__(self, widget: MessagePump, draw: Callable[[], None], least: float, most: float) -> None:
        self._pace = Pace(least, most)
        self._widget, self._draw = widget, draw
        self._timer: Timer | None = None

    def want(self) -> None:
        """Draw now, or as soon as it is allowed."""
        wait = self._pace.wait()
        if wait <= 0:
            self._draw()
        elif self._timer is None:
            self._timer = self._widget.set_timer(wait, self._draw)

    def drawn(self) -> None:
        """A drawing is made now."""
        self.drop()
        self._pace.drawn()

    def begin(self) -> None:
        """The next drawing may be made at once."""
        self._pace.begin()

    def drop(self) -> None:
        """Make no drawing that still waits."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
