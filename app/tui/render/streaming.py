"""Drawing an answer while it is written: how much of it, and how often. Pure but for the clocks that are passed in.

A growing answer is cut into a finished part, which is rendered once as Markdown, and a tail that is drawn again as text
arrives. A cut is made where both sides mean the same as the whole: after a blank line outside a fence and without an
indent; and at the end of a line within a fence or list if the tail is too long to be drawn several times a second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

LONGEST_TAIL = 2_000
"""Maximum characters of the tail, which is drawn again with every piece. A longer one is cut at a line."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$")


class GrowingText:
    """The answer so far, as ``frozen`` blocks of Markdown and the ``tail``.

    ``update`` takes the whole text each time: it may also be another text altogether (the best beam changed).
    """

    def __init__(self) -> None:
        self.frozen: list[str] = []
        self.tail = ""
        self._text = ""
        self._frozen_length = 0
        self._reopen = ""
        """Opening line of a fence that was cut: the tail begins with it."""

    def clear(self) -> None:
        self.frozen, self.tail, self._text, self._frozen_length, self._reopen = [], "", "", 0, ""

    def update(self, text: str) -> None:
        if not text.startswith(self._text[: self._frozen_length]):
            self.clear()
        self._text = text
        rest = self._reopen + text[self._frozen_length :]
        while (cut := find_cut(rest)) is not None:
            end, fence = cut
            block = rest[:end]
            self._frozen_length += end - len(self._reopen)
            self.frozen.append(f"{block}{fence[0]}\n" if fence else block)
            self._reopen = fence[1] if fence else ""
            rest = self._reopen + rest[end:]
        self.tail = rest


def find_cut(text: str, longest: int = LONGEST_TAIL) -> tuple[int, tuple[str, str] | None] | None:
    """Where the finished part of ``text`` ends, and, if that is inside a fence, its closing and opening lines.

    None: there is nothing to cut off yet.
    """
    position = 0
    safe = 0
    line_end = 0
    fence: tuple[str, str] | None = None
    cut_fence: tuple[str, str] | None = None
    previous_blank = False
    fence_start = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            # A line that is still growing is certain to be a paragraph only if it begins with a letter.
            if fence is None and previous_blank and line[0].isalpha():
                safe = position
            break
        opening = _FENCE.match(line.rstrip("\n"))
        if fence is None:
            if previous_blank and line.strip() and not line.startswith((" ", "\t")) and not _is_item(line):
                safe = position
            if opening and not ("`" in opening[2] and opening[1][0] == "`"):
                fence, fence_start = (opening[1], line), position
        elif _closes(opening, fence[0]):
            fence = None
            # An indented fence may be part of a list, and then does not end it.
            if not text[fence_start].isspace():
                safe = position + len(line)
        position += len(line)
        previous_blank = fence is None and not line.strip()
        if position <= longest:
            line_end, cut_fence = position, fence
    if safe:
        return safe, None
    if len(text) <= longest or not line_end:
        return None
    if cut_fence is not None and line_end <= len(cut_fence[1]):
        return None
    return line_end, cut_fence


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
