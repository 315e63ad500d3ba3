"""Finding a text in the shown conversation: which messages have it, how often, and which hit is looked at. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.chat.state import Entry

_MARKUP = re.compile(r"\*\*|__|[*`~]|^[ \t]*(?:#{1,6} |> ?)", re.MULTILINE)


def pattern_of(text: str) -> re.Pattern[str] | None:
    """A pattern that finds ``text`` regardless of case and white space; None if it has no words."""
    words = text.split()
    return re.compile(r"\s+".join(map(re.escape, words)), re.IGNORECASE) if words else None


def about(entry: Entry, pattern: re.Pattern[str]) -> int:
    """The number of hits in a message that is not drawn: its Markdown without the commonest marks is searched."""
    if entry.state == "writing":
        return 0
    text = entry.content if entry.role == "user" else _MARKUP.sub("", entry.content)
    return sum(1 for _ in pattern.finditer(text))


class Hits:
    """The hits of each message of a path, in order, and the one that is looked at.

    The numbers of messages that are not drawn are estimates, which :meth:`correct` replaces.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self._counts = list(counts)
        self.place: tuple[int, int] | None = None
        """Index of the message and of the hit in it that is looked at; None if there is none."""

    @property
    def total(self) -> int:
        return sum(self._counts)

    @property
    def number(self) -> int:
        """The number of the hit that is looked at, from 1; 0 if there is none."""
        if self.place is None:
            return 0
        message, hit = self.place
        return sum(self._counts[:message]) + hit + 1

    def begin(self, first: int, last: int) -> None:
        """Look at the first hit of the messages ``first`` to ``last``, which are on the screen.

        Without one, at the last hit before them, or else at the first after them.
        """
        messages = [index for index, count in enumerate(self._counts) if count]
        seen = [index for index in messages if first <= index <= last]
        before = [index for index in messages if index < first]
        if seen:
            self.place = seen[0], 0
        elif before:
            self.place = before[-1], self._counts[before[-1]] - 1
        else:
            self.place = (messages[0], 0) if messages else None

    def step(self, offset: int) -> None:
        """Look at the next hit (``offset`` 1) or the previous one (-1); after the last comes the first."""
        if self.place is None or not self.total:
            self.place = None
            return
        message, hit = self.place
        hit += offset
        while not 0 <= hit < self._counts[message]:
            message = (message + offset) % len(self._counts)
            hit = 0 if offset > 0 else self._counts[message] - 1
        self.place = message, hit

    def correct(self, message: int, count: int) -> bool:
        """``message`` is drawn and has ``count`` hits. Returns whether the hit that is looked at is still there.

        If its message has fewer hits, the last of them is looked at.
        """
        self._counts[message] = count
        if self.place is None or self.place[0] != message:
            return True
        self.place = message, max(0, min(self.place[1], count - 1))
        return count > 0
