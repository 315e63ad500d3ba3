"""Text that is safe to write to a terminal: it can be read but does not act.

Removed are control characters except newline and tab, whole escape sequences (also those that a stream cuts in two),
and the characters that reorder text on the screen. Everything else stays as it is.

Model files, peers and libraries put their words into the engine's events. :func:`made_safe` removes the same from every
text of an event, whatever its field, including fields that are added later. The only exception is the text that a model
streams: a piece may end within an escape sequence, so whoever shows it uses a :class:`Sanitizer`.
"""

from __future__ import annotations

import enum
import functools
import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from engine.ipc.messages import (
    AnyEvent,
    Beam,
    Finished,
    LikelyToken,
    Piece,
    Sample,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
)

# C0 except tab and newline, DEL, C1; line and paragraph separators; overrides and isolates of the writing direction;
# half surrogate pairs, which no terminal's encoding can carry.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Pattern of a character that acts on a terminal. A newline and a tab do not."""
_REPLACED = {"\u2028": "\n", "\u2029": "\n"}

_STRING_INTRODUCERS = "]PX^_"
_C1_STRINGS = "\x9d\x90\x98\x9e\x9f"
_C1_SEQUENCE = "\x9b"
_STRING_ENDS = "\x07\x9c"
_ABORTS = "\x18\x1a"


class _EscapeState(enum.Enum):
    TEXT = enum.auto()
    ESCAPE = enum.auto()
    """After ESC, or ESC and intermediate characters."""
    SEQUENCE = enum.auto()
    """In a control sequence (CSI), up to its final character."""
    STRING = enum.auto()
    """In a command string (OSC, DCS, SOS, PM, APC), up to its terminator."""


class Sanitizer:
    """Sanitises a stream of text. The result does not depend on how the stream is cut; no safe text is delayed."""

    def __init__(self) -> None:
        self._state = _EscapeState.TEXT

    def feed(self, text: str) -> str:
        if self._state is _EscapeState.TEXT and not UNSAFE.search(text):
            return text
        return "".join(self._take(character) for character in text)

    def _take(self, character: str) -> str:
        """The text that remains of ``character``."""
        if character == "\x1b":
            # Starts a new sequence wherever it comes; after a string, ESC \ is its terminator and ends it all the same.
            self._state = _EscapeState.ESCAPE
            return ""
        if character in _ABORTS:
            self._state = _EscapeState.TEXT
            return ""
        match self._state:
            case _EscapeState.ESCAPE:
                return self._after_escape(character)
            case _EscapeState.SEQUENCE:
                if "\x20" <= character <= "\x3f":
                    return ""
                self._state = _EscapeState.TEXT
                return "" if "\x40" <= character <= "\x7e" else self._plain(character)
            case _EscapeState.STRING:
                # The introducer is gone, so the rest cannot act. An unfinished string therefore costs its line only.
                if character == "\n":
                    self._state = _EscapeState.TEXT
                    return character
                if character in _STRING_ENDS:
                    self._state = _EscapeState.TEXT
                return ""
            case _:
                return self._plain(character)

    def _after_escape(self, character: str) -> str:
        if character == "[":
            self._state = _EscapeState.SEQUENCE
        elif character in _STRING_INTRODUCERS:
            self._state = _EscapeState.STRING
        elif "\x20" <= character <= "\x2f":
            pass
        else:
            self._state = _EscapeState.TEXT
            return "" if "\x30" <= character <= "\x7e" else self._plain(character)
        return ""

    def _plain(self, character: str) -> str:
        if character == _C1_SEQUENCE:
            self._state = _EscapeState.SEQUENCE
        elif character in _C1_STRINGS:
            self._state = _EscapeState.STRING
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


STREAMED = frozenset((kind, field) for kind in (Piece, Finished, Beam, Sample) for field in ("text", "reasoning")) | {
    (Finished, "stop_string"),
    (Sample, "stop_string"),
    (ToolCall, "arguments"),
    (ToolCallPiece, "arguments"),
    (TokenLogprob, "text"),
    (LikelyToken, "text"),
}
"""The fields with text that a model wrote, which other programs get as it is."""


def made_safe(event: AnyEvent) -> AnyEvent:
    """``event`` without what acts on a terminal; the same object if there is nothing to remove."""
    safe: AnyEvent = _safe(event)
    return safe


def _safe(value: Any) -> Any:
    match value:
        case str():
            return sanitize(value)
        case list() | tuple():
            return type(value)(_safe(item) for item in value)
        case dict():
            return {_safe(key): _safe(item) for key, item in value.items()}
        case msgspec.Struct():
            before = {name: getattr(value, name) for name in _fields_with_text(type(value))}
            after = {name: _safe(item) for name, item in before.items()}
            return value if after == before else msgspec.structs.replace(value, **after)
        case _:
            return value


@functools.cache
def _fields_with_text(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields that may hold text. Others are skipped: timing events are frequent and full of numbers."""
    return tuple(
        field.name
        for field in msgspec.structs.fields(kind)
        if (kind, field.name) not in STREAMED and _may_hold_text(field.type)
    )


def _may_hold_text(annotation: Any) -> bool:
    if annotation in (int, float, bool, NoneType) or get_origin(annotation) is Literal:
        return False
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return any(map(_may_hold_text, arguments)) if arguments else True
