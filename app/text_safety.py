"""Makes text of a model safe for a terminal: it may be read, it may not act.

Removed are control characters except newline and tab, escape sequences as a whole (also when a stream cuts them in
two), and the characters that reorder text on the screen. What is safe stays as it is.
"""

from __future__ import annotations

import enum
import re

# C0 except tab and newline, DEL, C1; line and paragraph separators; overrides and isolates of the writing direction;
# half surrogate pairs, which no terminal's encoding can carry.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""A character that acts on a terminal; a newline and a tab do not."""
_REPLACED = {"\u2028": "\n", "\u2029": "\n"}

_STRING_INTRODUCERS = "]PX^_"
_C1_STRINGS = "\x9d\x90\x98\x9e\x9f"
_C1_SEQUENCE = "\x9b"
_STRING_ENDS = "\x07\x9c"
_ABORTS = "\x18\x1a"


class _State(enum.Enum):
    TEXT = enum.auto()
    ESCAPE = enum.auto()
    """After ESC, or ESC and intermediate characters."""
    SEQUENCE = enum.auto()
    """In a control sequence (CSI), up to its final character."""
    STRING = enum.auto()
    """In a command string (OSC, DCS, SOS, PM, APC), up to its terminator."""


class Sanitizer:
    """Sanitises a stream; however it is cut into pieces, the result is the same. Nothing safe is held back."""

    def __init__(self) -> None:
        self._state = _State.TEXT

    def feed(self, text: str) -> str:
        if self._state is _State.TEXT and not UNSAFE.search(text):
            return text
        return "".join(self._take(character) for character in text)

    def _take(self, character: str) -> str:
        """What ``character`` leaves of itself."""
        if character == "\x1b":
            # Starts a new sequence wherever it comes; after a string, ESC \ is its terminator and ends it all the same.
            self._state = _State.ESCAPE
            return ""
        if character in _ABORTS:
            self._state = _State.TEXT
            return ""
        match self._state:
            case _State.ESCAPE:
                return self._after_escape(character)
            case _State.SEQUENCE:
                if "\x20" <= character <= "\x3f":
                    return ""
                self._state = _State.TEXT
                return "" if "\x40" <= character <= "\x7e" else self._plain(character)
            case _State.STRING:
                # The introducer is gone, so the rest cannot act. An unfinished string therefore costs its line only.
                if character == "\n":
                    self._state = _State.TEXT
                    return character
                if character in _STRING_ENDS:
                    self._state = _State.TEXT
                return ""
            case _:
                return self._plain(character)

    def _after_escape(self, character: str) -> str:
        if character == "[":
            self._state = _State.SEQUENCE
        elif character in _STRING_INTRODUCERS:
            self._state = _State.STRING
        elif "\x20" <= character <= "\x2f":
            pass
        else:
            self._state = _State.TEXT
            return "" if "\x30" <= character <= "\x7e" else self._plain(character)
        return ""

    def _plain(self, character: str) -> str:
        if character == _C1_SEQUENCE:
            self._state = _State.SEQUENCE
        elif character in _C1_STRINGS:
            self._state = _State.STRING
        elif not UNSAFE.match(character):
            return character
        elif "\ud800" <= character <= "\udfff":
            return "\ufffd"
        return _REPLACED.get(character, "")


def sanitize(text: str) -> str:
    """``text`` without anything that acts on a terminal."""
    return Sanitizer().feed(text)


def one_line(text: str) -> str:
    """``text`` as one safe line, for names and messages."""
    return " ".join(sanitize(text).split())
