"""Separates calls of tools from the text of an answer while it streams.

A call is given out as soon as it is whole. What looks like a call but cannot be read stays text, so nothing is lost.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.generation.reasoning import MESSAGE, RECIPIENT
from engine.generation.text import overlap
from engine.generation.tool_arguments import ArgumentTypes, json_text, read_json
from engine.ipc.messages import Tool, ToolCall
from engine.models.tool_formats import ToolFormat

_LETTERS = string.ascii_lowercase + string.digits
ID_LETTERS = 9
"""Letters of a call's id. Some templates take no other number."""


_BEGUN_OBJECT = re.compile(
    r'[\[\s]*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*'
    r'(,\s*("(arguments|parameters)"\s*(:\s*(?P<arguments>.*))?)?)?',
    re.DOTALL,
)
"""The beginning of a call that is written as a JSON object."""


@dataclass(frozen=True)
class WithCalls:
    """New text of the answer, and calls that became whole."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class _Called:
    """A name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallParser:
    """Reads calls of ``tools`` in ``form``. Marks may arrive in pieces. At most ``most`` calls are given out."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], most: int | None = None) -> None:
        self._form = form
        self._names = frozenset(tool.name for tool in tools)
        self._types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}
        self._most = most
        self._begin = RECIPIENT if form.shape == "parts" else form.begin
        self._held = ""
        self._space = ""
        """White space that is left out if a call follows."""
        self._in_call = False
        self._tried = 0
        """Characters of ``_held`` in which no end mark is the call's end."""
        self._begun = False
        """Whether there was text or a call."""
        self.calls: list[ToolCall] = []
        """The calls so far."""

    def again(self) -> ToolCallParser:
        """Another one that has read nothing. This one must have read nothing, too."""
        other = copy.copy(self)
        other.calls = []
        return other

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks at which a call may begin."""
        return tuple(mark for mark in (self._begin, *self._form.hidden) if mark and self._form.shape != "parts")

    def push(self, piece: str) -> WithCalls:
        """The text that certainly belongs to no call, and the calls that are whole."""
        self._held += piece
        text, before = "", len(self.calls)
        while True:
            text += self._text_before_call()
            if not self._in_call or not self._read_call(last=False):
                break
        return WithCalls(text, self.calls[before:])

    def flush(self, cut: bool = False) -> WithCalls:
        """What was held back. Must be called once, at the end.

        ``cut``: the answer reached its limit. A call that it was in is then given out as far as it was written, with
        arguments that are no whole JSON, as OpenAI's servers do.
        """
        before, text = len(self.calls), ""
        while self._in_call:
            if not self._read_call(last=True) and not (cut and self._take_beginning()):
                # It is no call: all of it was text.
                text, self._in_call = text + self._space + self._held, False
                self._held = self._space = ""
                break
            text += self._text_before_call()
        text += "" if self.calls and not self._held.strip() else self._space + self._held
        self._held = self._space = ""
        return WithCalls(text, self.calls[before:])

    # --- text -----------------------------------------------------------------------------------------------------

    def _text_before_call(self) -> str:
        """The text that is ready. Afterwards ``_held`` begins with a call's mark, or holds what may become one."""
        text = ""
        while not self._in_call:
            marks = [mark for mark in (self._begin, *self._form.hidden) if mark]
            found = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
            if self._form.bare and not self._begun and self._held.lstrip()[:1] in ("{", "["):
                found.append((len(self._held) - len(self._held.lstrip()), ""))
            if not found:
                keep = max((overlap(self._held, mark) for mark in marks), default=0)
                ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                return text + self._spaced(ready)
            at, mark = min(found)
            text += self._spaced(self._held[:at])
            if mark in self._form.hidden:
                self._held = self._held[at + len(mark) :]
            else:
                self._held, self._in_call, self._tried = self._held[at:], True, len(self._begin)
        return text

    def _spaced(self, text: str) -> str:
        """``text`` without white space at its end, which waits for more text; after a call all of it is left out."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return ""
        if self.calls:
            kept = kept.lstrip()
        self._begun = True
        return kept

    # --- calls ----------------------------------------------------------------------------------------------------

    def _read_call(self, last: bool) -> bool:
        """Read the call at which ``_held`` begins. Returns False if it is not whole, or none.

        The end mark may also be in an argument: then the call goes on. ``last``: no more text follows.
        """
        start, end = len(self._begin), self._form.end or self._begin
        while end and (at := self._held.find(end, self._tried)) >= 0:
            if self._take(self._held[start:at]):
                self._held = self._held[at + len(self._form.end) :]
                return True
            # More text makes no call of what is none up to here. A model may repeat the mark for ever.
            self._tried = at + 1
        self._tried = max(self._tried, len(self._held) - len(end) + 1)
        if last and self._take(self._held[start:]):
            self._held = ""
            return True
        return False

    def _take(self, body: str) -> bool:
        """Add the calls that ``body`` writes. Returns False if it writes none."""
        for mark in self._form.hidden:
            body = body.replace(mark, "")
        found = _called(self._form, body.strip(), self._types)
        if not found or any(each.name not in self._names for each in found):
            return False
        self._in_call, self._begun, self._space = False, True, ""
        for each in found:
            if self._most is None or len(self.calls) < self._most:
                self.calls.append(ToolCall(id=new_id(), name=each.name, arguments=each.arguments))
        return True

    def _take_beginning(self) -> bool:
        """Add the call whose beginning is held. Returns False if no tool's name was written yet."""
        body = self._held[len(self._begin) :]
        for mark in self._form.hidden:
            body = body.replace(mark, "")
        found = _beginning(self._form, body.strip(), self._types)
        if found is None or found.name not in self._names:
            return False
        if self._most is None or len(self.calls) < self._most:
            self.calls.append(ToolCall(id=new_id(), name=found.name, arguments=found.arguments))
        self._in_call, self._held, self._space = False, "", ""
        return True


def new_id() -> str:
    """A new id of a call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(ID_LETTERS))


def _called(form: ToolFormat, body: str, types: Mapping[str, ArgumentTypes]) -> list[_Called]:
    """The calls that ``body`` writes; none if it is not in ``form``. ``types``: those of each tool's arguments."""
    if form.shape == "json":
        return _objects(body, types)
    if form.shape == "tagged":
        return _tagged(form, body, types)
    for prefix in form.prefixes:
        body = body.removeprefix(prefix)
    name, _, arguments = _named(form, body)
    # An index may follow the name: functions.clock:0
    name, _, index = name.strip().partition(":")
    if index and not index.isdecimal():
        return []
    found = read_json(arguments)
    return [_typed(name, found, types)] if isinstance(found, dict) else []


def _beginning(form: ToolFormat, body: str, types: Mapping[str, ArgumentTypes]) -> _Called | None:
    """The first call that ``body`` begins to write: its name, and its arguments as far as they are there."""
    if form.shape == "json":
        written = _BEGUN_OBJECT.match(body)
        return None if written is None else _Called(written["name"], _first_value(written["arguments"] or ""))
    for prefix in form.prefixes:
        body = body.removeprefix(prefix)
    if form.shape == "tagged":
        key_begin, _, _, value_end = form.tags
        whole, found, _ = body.rpartition(value_end)
        name, key, _ = body.partition(key_begin)
        called = _tagged(form, whole + found or name, types)
        # The last brace is written with the call's end.
        return _Called(called[0].name, called[0].arguments[:-1] if key else "") if called else None
    name, is_whole, arguments = _named(form, body)
    return _Called(name.partition(":")[0].strip(), arguments) if is_whole else None


def _named(form: ToolFormat, body: str) -> tuple[str, bool, str]:
    """The name, whether it is whole, and the arguments of a call that has them apart."""
    name, mark, arguments = body.partition(MESSAGE if form.shape == "parts" else form.separator)
    if not mark:
        # Some write the name on a line of its own, and fence the arguments.
        name, mark, arguments = body.partition("\n")
    return name, bool(mark), arguments.strip().removeprefix("```json").removesuffix("```").strip()


def _first_value(text: str) -> str:
    """The JSON value at which ``text`` begins, or all of it if that is not whole."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def _objects(body: str, types: Mapping[str, ArgumentTypes]) -> list[_Called]:
    found = read_json(body)
    if found is None:
        # Several objects may follow each other, each on a line or after a semicolon.
        parts = [read_json(part) for part in body.replace(";", "\n").split("\n") if part.strip()]
        found = None if any(part is None for part in parts) else parts
    calls = []
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments = each.get("arguments", each.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            return []
        calls.append(_typed(each["name"], arguments, types))
    return calls


def _typed(name: str, arguments: dict[str, Any], types: Mapping[str, ArgumentTypes]) -> _Called:
    """A call with arguments read from JSON, which get the types that the tool's schema asks for."""
    return _Called(name, json_text(types[name].typed(arguments) if name in types else arguments))


def _tagged(form: ToolFormat, body: str, types: Mapping[str, ArgumentTypes]) -> list[_Called]:
    for prefix in form.prefixes:
        body = body.removeprefix(prefix)
    key_begin, key_end, value_begin, value_end = form.tags
    head, *parts = body.split(key_begin)
    name = head.strip().removesuffix("</function>").strip().rstrip('">')
    arguments: dict[str, Any] = {}
    for part in parts:
        key, found, rest = part.partition(key_end)
        value, closed, _ = rest.partition(value_end)
        if not found or not closed:
            return []
        value = value.strip() if value_begin else value.removeprefix("\n").removesuffix("\n")
        if value_begin:
            value = value.removeprefix(value_begin)
        arguments[key.strip()] = types[name].from_text(key.strip(), value) if name in types else value
    return [_Called(name, json_text(arguments))]
