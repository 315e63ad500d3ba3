"""Text that is safe to write to a terminal: it can be read but does not act.

:func:`sanitize` removes control characters except newline and tab, whole escape sequences (also those that a stream
cuts in two), and the characters that reorder text on the screen. Everything else stays as it is. :func:`visible`, which
is for what is drawn or printed, also removes what nobody can see, as with it one text looks like another.

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

# Marks of the writing direction, and what Unicode calls default ignorable, but for what is in _AFTER: soft hyphens,
# fillers, spaces of no width, invisible operators, tags.
HIDDEN = re.compile(
    "[\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u200b\u200e\u200f\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0"
    "\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff]"
)
"""Pattern of a character that nobody can see, wherever it stands."""
# The scripts whose letters have several forms, or stack: Arabic and its relatives, those of India and South-East Asia.
_JOINING = (
    "\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1780-\u180a\u1810-\u18af\u1a20-\u1aaf\u1b00-\u1c4f\ua800-\ua82f\ua840-\ua8ff"
    "\ua930-\ua9df\uaa00-\uaa7f\uaae0-\uaaff\uabc0-\uabff\ufb50-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff"
    "\U0001e900-\U0001e95f"
)
_EMOJI = "\u2190-\u21ff\u2300-\u23ff\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_IDEOGRAPHS = "\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WITH_FORMS = f"#*0-9\xa9\xae\u1000-\u109f\u2010-\u2bff\u3008-\u33ff\ua840-\ua877{_EMOJI}"
_AFTER = {
    "\u200c": f"[{_JOINING}]",
    "\u200d": f"[{_JOINING}{_EMOJI}]|[{_WITH_FORMS}]\ufe0f",
    "\u180b-\u180f": "[\u1820-\u18aa]",
    "\ufe00-\ufe0f": f"[{_WITH_FORMS}{_IDEOGRAPHS}]",
    "\U000e0100-\U000e01ef": f"[{_IDEOGRAPHS}]",
}
"""Joiners and selectors of a form, with what stands before those that change what is seen."""
_AFTER_EACH = [(re.compile(f"[{what}]"), re.compile(f"(?:{before})\\Z")) for what, before in _AFTER.items()]
_JOINER = re.compile(f"[{''.join(_AFTER)}]")
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
    """Within a control sequence (CSI), up to its final character."""
    STRING = enum.auto()
    """Within a command string (OSC, DCS, SOS, PM, APC), up to its terminator."""


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


def visible(text: str, before: str = "") -> str:
    """``text`` without what nobody can see. ``before``: the two characters that stand before it, of what was left.

    A joiner stays behind a letter of a script that needs it and behind an emoji, a selector of a form behind a
    character that has several, one at a time.
    """
    if text.isascii():
        return text
    text, shown, place = HIDDEN.sub("", text), [], 0
    for joiner in _JOINER.finditer(text):
        between = text[place : joiner.start()]
        before, place = (before + between)[-2:], joiner.end()
        shown.append(between)
        if next(needed for what, needed in _AFTER_EACH if what.match(joiner.group())).search(before):
            shown.append(joiner.group())
            before += joiner.group()
    return "".join([*shown, text[place:]])


def one_line(text: str) -> str:
    """``text`` as one safe and visible line, for names and messages."""
    return " ".join(visible(sanitize(text)).split())


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
