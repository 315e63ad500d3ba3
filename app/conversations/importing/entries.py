"""The entries of an export's JSON, one at a time: what is damaged or too large costs itself only.

A whole export takes many times its size when it is parsed, and one wrong character in it would cost all of it. So the
ends of the entries are found first, which needs brackets and texts only, and each entry is parsed by itself.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST_ENTRY = 100_000_000
"""Maximum bytes of an entry. Some programs keep a chat's pictures in it."""
_MOST_VALUES = 3_000_000
"""Maximum number of values in an entry, by which the memory of a parsed one is limited: that of an empty list is twenty
times as large as its text."""
_DEEPEST = 200
"""Maximum depth of nested values in an entry. Exports have less than 30."""

_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _TEXT + rb")*+[\[\]{}]", re.DOTALL)
"""Pattern of what comes up to the next bracket that is not in a text. It never goes back, so it takes linear time."""
_NO_TABLE = re.compile(_TEXT + rb'|[^"\[\]{},\s]++', re.DOTALL)
"""Pattern of a text, a number or a word."""
_BETWEEN = re.compile(rb"[\s,]*+")


class Unread(enum.Enum):
    """Why an entry was not read."""

    DAMAGED = enum.auto()
    LARGE = enum.auto()
    DEEP = enum.auto()
    CUT = enum.auto()
    """Reading ended here, because the beginning of the next entry cannot be found."""


def entries(data: bytes) -> Iterator[Mapping[str, Any] | Unread | None]:
    """The entries of the list in ``data``, or of the one in its member ``conversations``, or the only one.

    None stands for an entry that is JSON, but no object.
    """
    data = _as_utf8(data)
    place = _after(_BETWEEN, data, 0)
    if data[place : place + 1] == b"[":
        yield from _listed(data, place + 1)
        return
    content = _only(data, place)
    if not isinstance(content, dict):
        yield content if isinstance(content, Unread) else None
        return
    # Some exports have the list in an object.
    inside = content.get("conversations")
    for entry in inside if isinstance(inside, list) else [content]:
        yield entry if isinstance(entry, dict) else None


def _as_utf8(data: bytes) -> bytes:
    """``data`` as UTF-8, in which each bracket is one byte."""
    encoding = json.detect_encoding(data)
    if encoding == "utf-8":
        return data
    return data.decode(encoding, "replace").encode("utf-8", "replace")


def _listed(data: bytes, place: int) -> Iterator[Mapping[str, Any] | Unread | None]:
    while True:
        place = _after(_BETWEEN, data, place)
        first = data[place : place + 1]
        if first == b"]":
            if _after(_BETWEEN, data, place + 1) < len(data):
                yield Unread.CUT
            return
        if first in (b"{", b"["):
            end, depth = _end(data, place)
            if end is None:
                yield Unread.CUT
                return
            content = _parsed(data, place, end, depth)
            yield content if isinstance(content, dict | Unread) else None
        else:
            end = _after(_NO_TABLE, data, place)
            if end == place:
                yield Unread.CUT
                return
            yield None
        place = end


def _only(data: bytes, place: int) -> object:
    if data[place : place + 1] != b"{":
        return _parsed(data, place, len(data), 0)
    end, depth = _end(data, place)
    if end is None or _after(_BETWEEN, data, end) < len(data):
        return Unread.CUT
    return _parsed(data, place, end, depth)


def _parsed(data: bytes, start: int, end: int, depth: int) -> object:
    if depth > _DEEPEST:
        return Unread.DEEP
    if end - start > _LONGEST_ENTRY or sum(data.count(mark, start, end) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        return Unread.LARGE
    try:
        return json.loads(data[start:end].decode("utf-8", "surrogatepass"))
    except ValueError:
        return Unread.DAMAGED


def _end(data: bytes, place: int) -> tuple[int | None, int]:
    """The end of the value that begins with a bracket at ``place``, None if it has none; and the value's depth."""
    depth = deepest = 0
    while (found := _TO_BRACKET.match(data, place)) is not None:
        place = found.end()
        if data[place - 1] in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
            if not depth:
                return place, deepest
    return None, deepest


def _after(pattern: re.Pattern[bytes], data: bytes, place: int) -> int:
    """The end of a match of ``pattern`` at ``place``; ``place`` itself without a match."""
    found = pattern.match(data, place)
    return place if found is None else found.end()
