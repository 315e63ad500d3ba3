"""From token ids to text, piece by piece: pieces never split a character, and stop strings never appear.

Both classes hold text back only while later tokens could change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.errors import ModelError

REPLACEMENT = "\ufffd"
"""Character that a decoder puts in place of bytes that are not (yet) a character."""

_PATIENCE = 8
"""Maximum tokens ending in an unfinished character before its bytes count as invalid. A character has at most four
bytes."""

_UNFINISHED = 3
"""Maximum replacement characters at the end that the next token may still complete."""


class IncrementalDecoder:
    """Text of a growing list of tokens, in pieces.

    ``decode`` gives the text of a list of ids. Only a window of the last few tokens is decoded each time: it starts at
    a token after which the text was whole, because tokenizers treat the first token of a list specially (many drop
    its space). ``context`` are tokens before the list, if its text goes on from theirs.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context)
        self._settled = len(self._window)
        self._emitted = len(decode(self._window)) if context else 0
        self._unfinished_for = 0
        """Number of tokens since the text last ended with a whole character."""

    def push(self, token: int) -> str:
        """The whole characters that ``token`` completes, often none."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            self._unfinished_for = 0
            piece = text[self._emitted :]
            if piece:
                # The tokens decoded here become the context of the next ones.
                del self._window[: self._settled]
                self._settled = len(self._window)
                self._emitted = len(self._decode(self._window))
            return piece
        self._unfinished_for += 1
        if self._unfinished_for < _PATIENCE:
            return ""
        unfinished = min(_UNFINISHED, len(text) - len(text.rstrip(REPLACEMENT)))
        return self._take(text[: len(text) - unfinished])

    def flush(self) -> str:
        """The text that was held back. An unfinished character becomes U+FFFD. Must be called once, at the end."""
        return self._take(self._decode(self._window)) if self._window else ""

    def _take(self, text: str) -> str:
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece


class StopStrings:
    """Cuts a stream of text at the first stop string, even if it arrives in pieces.

    The first stop string is the one whose last character comes first, and the longest of several that end there.
    Raises ModelError (bad-input) for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ModelError("A stop string is empty, so every answer would be; leave it out.", kind="bad-input")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.stopped = False
        self.found = ""
        """The stop string that was found; empty before."""

    def push(self, piece: str) -> str:
        """The text that certainly belongs to no stop string. Always empty after a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        cut = first_stop(text, self._stops)
        if cut is not None:
            self.stopped = True
            self.found = max((stop for stop in self._stops if text.startswith(stop, cut)), key=len)
            self._held = ""
            return text[:cut]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back. Must be called at the end of the stream."""
        held, self._held = self._held, ""
        return held


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The index in ``text`` at which the first complete stop string begins, or None."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
