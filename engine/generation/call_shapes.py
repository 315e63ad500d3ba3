"""Reads tool calls between two marks, in the shapes of ``assets/tool_calls.toml`` and with the mistakes that models
make.

Unreadable text is not a call. A tool's name is never guessed.
"""

from __future__ import annotations

import ast
import bisect
import html
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.generation.argument_stream import ArgumentStream, TaggedStream
from engine.generation.reasoning import MESSAGE
from engine.generation.tool_arguments import ArgumentTypes, WrittenInteger, json_text, read_json
from engine.ipc.messages import Tool
from engine.models.text.tool_formats import ToolFormat

DEEPEST_VALUE = 100
"""Maximum levels of lists and dictionaries in arguments that are not JSON."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPACE = re.compile(r"\s*")
_BETWEEN_OBJECTS = re.compile(r"[\s;,]*")
_TOO_MANY = re.compile(r"[\s\]})`;,]*")
"""Superfluous text after the last object of a call: white space, brackets and fences."""
_FENCE = re.compile(r"```\w*\s*")
_BRACKET = re.compile(r"[\[\](){}]")
_PLAIN = re.compile(r"[^,\]}]*")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_TEXT_TYPE = re.compile(r'\b(string="true"|type="string")')
_ATTRIBUTES = r"""["']?(?:\s+\w+="[^"]*")*"""
_STRING_OR_ZEROS = re.compile(
    r"""'[^'\\]*(?:\\[^\n][^'\\]*)*'|"[^"\\]*(?:\\[^\n][^"\\]*)*"|(?<![\w.])0[0-9]*[1-9][0-9]*(?![\w.])"""
)
_STRING_BEGIN = re.compile(r"""[(,]\s*\w+\s*=\s*(['"])""")
_STRING_END = re.compile(r"""(['"])(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w.]+\(|\]?\s*\Z)))""")
"""The end of a keyword argument: another one follows, or the end of the call."""
_PAIR = re.compile(r"""\s+(\w+)=("[^"]*"|'[^']*'|[^\s"'<>]+)""")
_BRACE_HEAD = re.compile(r"\s*(?:(?:call)?:)?\s*([A-Za-z0-9_.-]+)\s*(?=\{)")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool_name", "function"), ("arguments", "parameters")
_BEGUN_OBJECT = re.compile(
    r'[\[\s]*\{\s*("(tool_call_id|id|type)"\s*:\s*"[^"\\]*"\s*,\s*)*("function"\s*:\s*\{\s*)?'
    r'"(name|tool_name)"\s*:\s*"(?P<name>[^"\\]*)"\s*(,\s*("(arguments|parameters)"\s*(:\s*(?P<arguments>.*))?)?)?',
    re.DOTALL,
)
"""The beginning of a call that is written as a JSON object."""
_OPENED_OBJECT = re.compile(
    r'\s*(?:```\w*\s*)?[\[\s]*\{\s*("(tool_call_id|id|type)"\s*:\s*"[^"\\]*"\s*,\s*)*("function"\s*:\s*\{\s*)?'
    r'"(name|tool_name)"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)'
)
"""The beginning of such a call up to its arguments, if they are an object."""
_BEGUN_MEMBER = re.compile(r'[\[\s]*\{\s*"(?P<name>[^"\\]+)"\s*:\s*(?P<arguments>\{.*)', re.DOTALL)
"""The beginning of a call whose name is the key of its arguments."""


@dataclass(frozen=True)
class Called:
    """A tool's name and the arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ReadCalls:
    """Calls, and the text after the last one that belongs to none."""

    calls: list[Called]
    rest: str = ""


class CallReader:
    """Reads calls of ``tools`` in ``form``."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool]) -> None:
        self._form = form
        self._types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}
        self._properties = {tool.name: _properties(tool) for tool in tools}
        mark = re.sub(f"^{_ATTRIBUTES}", "", form.name_end.strip())
        hidden = "|".join(re.escape(mark) for mark in form.hidden) or "(?!)"
        self._hidden = re.compile(rf"(?:\s*(?:{hidden}))*")
        self._hidden_end = re.compile(rf"(?:(?:{hidden})\s*)+\Z")
        self._repeated = re.compile(rf"\A\s*(?:{re.escape(form.begin)}\s*)*" if form.begin else "(?!)")
        key_begin = form.tags[0] if form.tags else ""
        self._key_begins = (key_begin, re.sub('"$', "'", key_begin))
        """Beginnings of a key, including one with the other quotation marks."""
        self._after_name = re.compile(rf"{_ATTRIBUTES}\s*(?:{re.escape(mark)})?\s*")

    def read(self, body: str, last: bool = False) -> ReadCalls | None:
        """The calls that ``body`` writes; None if it writes none, or names an unknown tool.

        ``last``: no more text follows, so a missing end mark was forgotten.
        """
        text = self._cleaned(body)
        calls: ReadCalls | None = None
        if _without_fence(text)[:1] in ("{", "["):
            calls = self._objects(_without_fence(text), last)
        if calls is None:
            match self._form.shape:
                case "named" | "parts":
                    calls = self._named(text)
                case "tagged":
                    calls = self._tagged(text, last)
                case "braces":
                    calls = self._braces(text)
                case "elements":
                    calls = self._elements(text)
                case _:
                    calls = self._python(_without_fence(text).removesuffix("```"))
        known = calls is not None and calls.calls and all(each.name in self._types for each in calls.calls)
        return calls if known else None

    def is_hopeless(self, body: str) -> bool:
        """Whether no text after ``body`` could make it a call."""
        text = body.lstrip()
        if self._form.shape != "json" or self._form.bare or text[:1] in ("", "{", "[", "`"):
            return False
        marks = (self._form.begin, *self._form.hidden)
        return not any(mark.startswith(text) or text.startswith(mark) for mark in marks if mark)

    def begun(self, body: str) -> Called | None:
        """The first call that ``body`` begins to write: its name, and its arguments so far.

        None if the name is incomplete or is no tool's.
        """
        text = self._cleaned(body)
        found = self._begun(text)
        return found if found is not None and found.name in self._types else None

    def opening(self, body: str) -> tuple[str, ArgumentStream | TaggedStream, int] | None:
        """The tool's name, a reader of its arguments, and the index in ``body`` at which they begin.

        None unless this is certainly a call whose arguments can be read while they arrive.
        """
        written = _OPENED_OBJECT.match(body)
        if written is not None:
            name, at = written["name"], written.end()
        elif self._form.shape == "tagged":
            return self._opening_tags(body)
        elif self._form.shape in ("named", "parts") and body.lstrip()[:1] not in ("{", "["):
            name, is_whole, rest = self._name_and_rest(body)
            at = body.find("{") if is_whole and rest[:1] == "{" else -1
        else:
            return None
        types = self._types.get(name)
        return (name, ArgumentStream(types), at) if types is not None and types.by_member and at >= 0 else None

    def _opening_tags(self, body: str) -> tuple[str, TaggedStream, int] | None:
        start = _spaces(body, 0)
        prefix = next((prefix for prefix in self._form.prefixes if body.startswith(prefix, start)), "")
        start = _spaces(body, start + len(prefix), ('"', "'"))
        name, at = self._name_at(body, start)
        at = self._after_name.match(body, at).end()  # type: ignore[union-attr]
        if not name or not body.startswith(self._form.tags[0], at):
            return None
        return name, TaggedStream(self._form, self._types[name]), at

    def _cleaned(self, body: str) -> str:
        """``body`` without the marks around it. Marks inside may be text of a value."""
        text = self._hidden_end.sub("", self._hidden.sub("", body, count=1))
        return self._repeated.sub("", text, count=1).strip()

    def _begun(self, text: str) -> Called | None:
        text = _without_fence(text)
        if (written := _BEGUN_OBJECT.match(text) or _BEGUN_MEMBER.match(text)) is not None:
            return Called(written["name"], _first_value(written["arguments"] or ""))
        match self._form.shape:
            case "tagged":
                return self._begun_tagged(text)
            case "named" | "parts":
                name, is_whole, arguments = self._name_and_rest(text)
                return Called(name, arguments) if is_whole else None
        begun = re.match(r"[\[\s]*(?:(?:call)?:)?([A-Za-z0-9_.-]+)[({\"]", text)
        return None if begun is None else Called(begun[1], "")

    # --- JSON -----------------------------------------------------------------------------------------------------

    def _objects(self, text: str, last: bool) -> ReadCalls | None:
        values, rest = self._values(text, last)
        calls = []
        for value in values:
            for each in value if isinstance(value, list) else [value]:
                found = self._object(each)
                if found is None:
                    return None
                calls.append(found)
        return ReadCalls(calls, rest) if calls else None

    def _values(self, text: str, last: bool) -> tuple[list[Any], str]:
        """The values that follow one another in ``text``, and the text after them.

        ``last``: no more text follows, so missing brackets after the arguments were forgotten.
        """
        values: list[Any] = []
        at = 0
        while True:
            at = _BETWEEN_OBJECTS.match(text, at).end()  # type: ignore[union-attr]
            mark = next((mark for mark in (self._form.begin, self._form.end) if mark and text.startswith(mark, at)), "")
            if values and mark:
                at += len(mark)
                continue
            if text[at : at + 1] not in ("{", "["):
                break
            try:
                end = _DECODER.raw_decode(text, at)[1]
            except (ValueError, RecursionError):
                if not values and isinstance(value := _python_value(text[at:]), dict | list):
                    return [value], ""
                written = text[at:].removesuffix(self._form.end).rstrip() if last and not values else ""
                tries = (read_json(written + more) for more in ("]", "}", "}]")) if written.endswith("}") else ()
                if (whole := next((each for each in tries if each is not None), None)) is not None:
                    return [whole], ""
                break
            values.append(read_json(text[at:end]))
            at = end
        rest = text[at:]
        return values, "" if _TOO_MANY.fullmatch(rest) else rest

    def _object(self, value: Any) -> Called | None:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            # OpenAI's own form of a call.
            value = value["function"]
        if not isinstance(value, dict):
            return None
        name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
        if name is None and len(value) == 1:
            # {"weather": {"city": "Rome"}}
            ((name, arguments),) = value.items()
            return self._typed(name, arguments) if name in self._types and isinstance(arguments, dict) else None
        arguments = next((value[key] for key in _ARGUMENT_KEYS if key in value), None)
        if isinstance(arguments, str) and arguments.strip():
            arguments = read_json(arguments)
        elif not arguments and not isinstance(arguments, list | bool | int):
            arguments = {}
        return self._typed(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None

    def _typed(self, name: str, arguments: Mapping[str, Any]) -> Called:
        types = self._types.get(name)
        typed = dict(arguments) if types is None else types.typed(types.unwrapped(arguments))
        return Called(name, json_text(typed))

    # --- a name, and arguments as JSON ------------------------------------------------------------------------------

    def _name_and_rest(self, text: str) -> tuple[str, bool, str]:
        """The tool's name, whether it is complete, and the text of the arguments without a fence."""
        form = self._form
        for prefix in form.prefixes:
            text = text.removeprefix(prefix)
        name, mark, rest = text.partition(MESSAGE if form.shape == "parts" else form.separator)
        if not mark:
            # Some write the name on a line of its own, or the arguments right behind it.
            written = re.match(r"\s*([^\s{`]+)(\s*)(?=([{`]))?", text)
            name, rest = (written[1], text[written.end() :]) if written is not None else ("", "")
            mark = "\n" if written is not None and ("\n" in written[2] or written[3]) else ""
        if form.id_end:
            name = name.rpartition(form.id_end)[2]
        if form.id_begin:
            name = name.partition(form.id_begin)[0]
        # An index may follow the name: functions.clock:0
        name, _, index = name.strip().partition(":")
        is_whole = bool(mark) and (not index or index.isdecimal())
        return name, is_whole, _without_fence(rest.strip())

    def _named(self, text: str) -> ReadCalls | None:
        calls = self._one_named(text)
        mark = self._form.separator
        while calls is not None and mark.strip():
            name = calls.rest.lstrip().partition(mark)[0]
            following = self._one_named(calls.rest.lstrip()) if mark in calls.rest and name in self._types else None
            if following is None:
                break
            calls = ReadCalls(calls.calls + following.calls, following.rest)
        return calls

    def _one_named(self, text: str) -> ReadCalls | None:
        """The first of the calls in ``text``. Some models write several without a mark between them."""
        name, is_whole, written = self._name_and_rest(text)
        if not is_whole:
            return None
        if not written:
            separator = MESSAGE if self._form.shape == "parts" else self._form.separator
            return ReadCalls([self._typed(name, {})]) if separator.strip() and separator in text else None
        try:
            end = _DECODER.raw_decode(written)[1]
            value = read_json(written[:end])
        except (ValueError, RecursionError):
            end, value = len(written), _python_value(written.removesuffix("```"))
        if not isinstance(value, dict):
            return None
        rest = written[end:]
        return ReadCalls([self._typed(name, value)], "" if _TOO_MANY.fullmatch(rest) else rest)

    # --- arguments between tags -------------------------------------------------------------------------------------

    def _tagged(self, text: str, last: bool) -> ReadCalls | None:
        form = self._form
        calls: list[Called] = []
        at = 0
        while True:
            before, start = at, _spaces(text, at)
            prefix = next((prefix for prefix in form.prefixes if text.startswith(prefix, start)), "")
            start = _spaces(text, start + len(prefix), ('"', "'"))
            name, at = self._name_at(text, start)
            if not name or (calls and not prefix):
                return ReadCalls(calls, text[before:]) if calls and not prefix else None
            start = self._after_name.match(text, at).end()  # type: ignore[union-attr]
            found = self._pairs(text, at, name) or self._arguments(text, self._behind_hidden(text, start), name, last)
            if found is None:
                return None
            arguments, at = found
            at = self._behind_hidden(text, at)
            calls.append(Called(name, json_text(self._types[name].unwrapped(arguments))))
            end = form.last.strip()
            if end and text.startswith(end, _spaces(text, at)):
                at = _spaces(text, at) + len(end)

    def _behind_hidden(self, text: str, at: int) -> int:
        return self._hidden.match(text, at).end()  # type: ignore[union-attr]

    def _name_at(self, text: str, at: int) -> tuple[str, int]:
        """The tool's complete name at ``at``, and its end; empty if there is none. Some models escape it as in XML."""
        spelled = ((name, spelling) for name in self._types for spelling in (name, name.replace("&", "&amp;")))
        matches = [
            (name, at + len(spelling))
            for name, spelling in spelled
            if text.startswith(spelling, at) and _NAME.match(text, at + len(spelling)) is None
        ]
        return max(matches, key=lambda spelling: spelling[1], default=("", at))

    def _pairs(self, text: str, at: int, name: str) -> tuple[dict[str, Any], int] | None:
        """The arguments that fill ``text`` from ``at``, written like ``clock zone=UTC``, and their end."""
        arguments: dict[str, Any] = {}
        while not self._form.begin.endswith('"') and (pair := _PAIR.match(text, at)) is not None:
            key, value, at = pair[1], pair[2], pair.end()
            if key not in self._properties[name] or key in arguments:
                return None
            arguments[key] = self._types[name].from_text(key, value[1:-1] if value[0] in "'\"" else value)
        return (arguments, at) if arguments and at == len(text) else None

    def _arguments(self, text: str, at: int, name: str, last: bool) -> tuple[dict[str, Any], int] | None:
        """The arguments of ``name`` that begin at ``at``, and their end."""
        _, _, value_begin, value_end = self._form.tags
        if text.startswith("{", at):
            try:
                end = _DECODER.raw_decode(text, at)[1]
            except (ValueError, RecursionError):
                return None
            written = read_json(text[at:end])
            return (self._types[name].typed(written), end) if isinstance(written, dict) else None
        arguments: dict[str, Any] = {}
        while text.startswith(self._key_begins, _spaces(text, at)):
            start = _spaces(text, at) + len(self._key_begins[0])
            stop, value_at = self._key_end(text, start)
            if stop < 0:
                return None
            # Other attributes may follow the name of an argument.
            key, _, attributes = text[start:stop].partition('"')
            key, start = key.strip(), value_at
            if key not in self._properties[name] and html.unescape(key) in self._properties[name]:
                key = html.unescape(key)
            if value_begin and text.startswith(value_begin, _spaces(text, start)):
                start = _spaces(text, start) + len(value_begin)
            stop, at = self._value_end(text, start, name, arguments, last)
            if stop < 0:
                return None
            value = text[start:stop]
            if self._form.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if (quoted := _CDATA.fullmatch(value)) is not None:
                value = quoted[1]
            is_text = _TEXT_TYPE.search(f'{attributes}"') is not None  # the mark after a key begins with its quote
            types = self._types[name]
            arguments[key] = types.typed({key: value})[key] if is_text else types.from_text(key, value)
        if self._form.lines and text.startswith(value_end, _spaces(text, at)):
            at = _spaces(text, at) + len(value_end)
        return arguments, at

    def _key_end(self, text: str, start: int) -> tuple[int, int]:
        """The end of the key that begins at ``start``, and the start of its value; -1 without an end.

        In formats whose values have lines of their own, the end of the line ends the key, too.
        """
        mark = self._form.tags[1]
        if text[start - 1] == "'":
            mark = mark.replace('"', "'")
        stop = text.find(mark, start)
        line = text.find("\n", start) if self._form.lines else -1
        return (line, line) if 0 <= line < stop else (stop, stop + len(mark))

    def _value_end(self, text: str, start: int, name: str, arguments: Mapping[str, Any], last: bool) -> tuple[int, int]:
        """The end of the value that begins at ``start``, and the start of what follows; -1 without an end.

        An end mark counts only before something that may follow an argument, because values may contain the mark.
        ``arguments`` are the arguments before it.
        """
        value_end, end = self._form.tags[3], self._form.last.strip() or self._form.end
        begin = _spaces(text, start)
        from_ = text.find("]]>", begin) if text.startswith("<![CDATA[", begin) else start
        stop = text.find(value_end, from_) if from_ >= 0 else -1
        while stop >= 0 and not self._may_follow(text, _spaces(text, stop + len(value_end))):
            stop = text.find(value_end, stop + 1)
        forgotten = self._next_argument(text, start, stop if stop >= 0 else len(text), name, arguments)
        if forgotten >= 0:
            return forgotten, forgotten
        if stop < 0 and last and end and (at := text.find(end, start)) >= 0:
            return at, at
        return stop, stop + len(value_end)

    def _may_follow(self, text: str, at: int) -> bool:
        marks = (*self._key_begins, self._form.last.strip(), *self._form.prefixes)
        return at == len(text) or any(text.startswith(mark, at) for mark in marks if mark)

    def _next_argument(self, text: str, start: int, stop: int, name: str, arguments: Mapping[str, Any]) -> int:
        """The start of a line before ``stop`` that begins another argument of the tool; -1 if there is none.

        Such a line shows that the end mark of the argument before it was forgotten.
        """
        key_begin, key_end = self._form.tags[:2]
        at = text.find(f"\n{key_begin}", start, stop)
        while at >= 0:
            key = text[at + 1 + len(key_begin) : stop].partition(key_end)[0].partition('"')[0].strip()
            if key in self._properties[name] and key not in arguments:
                return at
            at = text.find(f"\n{key_begin}", at + 1, stop)
        return -1

    def _begun_tagged(self, text: str) -> Called | None:
        key_begin, _, _, value_end = self._form.tags
        whole, found, _ = text.rpartition(value_end)
        name, key, _ = text.partition(key_begin)
        called = self._tagged(whole + found or name, last=True)
        # The last brace is written with the call's end.
        return Called(called.calls[0].name, called.calls[0].arguments[:-1] if key else "") if called else None

    # --- Python, Gemma's braces, elements ---------------------------------------------------------------------------

    def _python(self, text: str) -> ReadCalls | None:
        calls = []
        for node in _expressions(text):
            if not isinstance(node, ast.Call):
                return None
            name = _dotted(node.func)
            if name not in self._types:
                name = name.removesuffix(".call")
            try:
                arguments = {
                    argument.arg: _literal(argument.value) for argument in node.keywords if argument.arg is not None
                }
                given = [_literal(argument) for argument in node.args]
            except ValueError:
                return None
            if len(given) == 1 and isinstance(given[0], dict) and not arguments:
                arguments = given.pop()
            if given or any(argument.arg is None for argument in node.keywords):
                return None
            calls.append(self._typed(name, arguments))
        return ReadCalls(calls) if calls else None

    def _braces(self, text: str) -> ReadCalls | None:
        calls: list[Called] = []
        at = 0
        while (head := _BRACE_HEAD.match(text, at)) is not None:
            try:
                value, at = _BraceReader(text, self._form.quote).value(head.end(), 0)
            except ValueError:
                return None
            calls.append(self._typed(head[1], value))
        return ReadCalls(calls, "" if _TOO_MANY.fullmatch(text, at) else text[at:]) if calls else None

    def _elements(self, text: str) -> ReadCalls | None:
        head = re.match(r'([A-Za-z0-9_.-]+)"?>', text)
        if head is None or head[1] not in self._types:
            return None
        if text.startswith("{", head.end()):
            arguments = read_json(text[head.end() :])
            return ReadCalls([self._typed(head[1], arguments)]) if isinstance(arguments, dict) else None
        before, *pieces = text[head.end() :].split(self._form.separator)
        types = self._types[head[1]]
        try:
            found = _by_name(_elements(iter(pieces), "", 0))
        except ValueError:
            return None
        arguments = {key: types.from_text(key, each) if isinstance(each, str) else each for key, each in found.items()}
        return None if before.strip() else ReadCalls([self._typed(head[1], arguments)])


_DECODER = json.JSONDecoder(strict=False)


def _properties(tool: Tool) -> frozenset[str]:
    schema = read_json(tool.parameters)
    found = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(found if isinstance(found, dict) else ())


def _spaces(text: str, at: int, more: tuple[str, ...] = ()) -> int:
    """The end of the white space that begins at ``at``, with one of the letters ``more`` if one follows."""
    end = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    return end + 1 if text.startswith(more, end) else end


def _without_fence(text: str) -> str:
    """``text`` without the line before a code block. Text after the block is ignored by the readers."""
    fence = _FENCE.match(text)
    return text if fence is None else text[fence.end() :]


def _first_value(text: str) -> str:
    """The JSON value at the start of ``text``, or all of ``text`` if it is incomplete."""
    try:
        return text[: _DECODER.raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


# --- Python ---------------------------------------------------------------------------------------------------------


def _expressions(text: str) -> list[ast.expr]:
    """The Python expressions in ``text``, with lists split into their elements; empty if it is not Python."""
    if _depth(text) > DEEPEST_VALUE:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(text.strip())
            except (ValueError, SyntaxError):
                tree = _mended(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    expressions: list[ast.expr] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            return []
        value = statement.value
        expressions += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return expressions


def _mended(text: str) -> ast.Module:
    """``text`` parsed as Python after its flaws are repaired. Raises ValueError or SyntaxError if it still is not
    Python."""
    try:
        return ast.parse(_STRING_OR_ZEROS.sub(_as_python, text))
    except (ValueError, SyntaxError):
        return ast.parse(_STRING_OR_ZEROS.sub(_as_python, _with_inner_quotes(text)))


def _as_python(found: re.Match[str]) -> str:
    """A Python string with the necessary escapes, or a name for a number with leading zeros."""
    if found[0].startswith("0"):
        return f"_{found[0]}"
    return found[0].replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\x00")


def _with_inner_quotes(text: str) -> str:
    """``text`` with escapes for quotation marks inside its keyword arguments."""
    ends = {mark: [match.start() for match in _STRING_END.finditer(text) if match[1] == mark] for mark in "'\""}
    written, at = "", 0
    for begin in _STRING_BEGIN.finditer(text):
        mark = begin[1]
        place = bisect.bisect_left(ends[mark], begin.end())
        if begin.start() >= at and place < len(ends[mark]):
            inner = text[begin.end() : ends[mark][place]]
            written += text[at : begin.end()] + re.sub(
                rf"(\\.)|{mark}", lambda match: match[1] or f"\\{match[0]}", inner
            )
            at = ends[mark][place]
    return written + text[at:]


def _depth(text: str) -> int:
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _python_value(text: str) -> Any:
    """The single Python value in ``text``; None if there is none."""
    text = text.strip().rstrip(";")
    if text[:1] not in ("{", "[") or text[-1] not in "}]":
        return None
    # A list would be taken apart.
    nodes = _expressions(f"[{text}]")
    try:
        return _literal(nodes[0]) if len(nodes) == 1 else None
    except ValueError:
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal, including JSON's words. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=float() as number) if not math.isfinite(number):
            raise ValueError("it is no number of JSON")
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.Name(id=word) if word[:1] == "_" and word[1:].isdecimal():
            return WrittenInteger.of(word[1:])
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case ast.List() | ast.Tuple() | ast.Set():
            return [_literal(each) for each in node.elts]
        case ast.Dict():
            keys = [_literal(key) if key is not None else None for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("a key is no text")
            return dict(zip(keys, map(_literal, node.values), strict=True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            number = _literal(node.operand)
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("it is no literal")


def _dotted(node: ast.expr) -> str:
    """The dotted name that ``node`` writes; empty if it is not a name."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


# --- Gemma ----------------------------------------------------------------------------------------------------------


class _BraceReader:
    """Reads values written as in JSON, but with bare keys, and a mark for a quotation mark."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value at ``at``, and its end. Raises ValueError if it is incomplete."""
        text = self._text
        at = _spaces(text, at)
        if depth > DEEPEST_VALUE:
            raise ValueError("it is too deep")
        if text.startswith(self._quote, at):
            end = text.index(self._quote, at + len(self._quote))
            return text[at + len(self._quote) : end], end + len(self._quote)
        if text[at : at + 1] == '"':
            return _DECODER.raw_decode(text, at)
        if text[at : at + 1] in ("{", "["):
            return self._members(at, depth) if text[at] == "{" else self._items(at, depth)
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        word = text[at:end].strip()
        if not word:
            raise ValueError("there is no value")
        return _WORDS[word] if word in _WORDS else found if (found := read_json(word)) is not None else word, end

    def _members(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        text, at = self._text, _spaces(self._text, at + 1)
        while text[at : at + 1] != "}":
            if text.startswith((self._quote, '"'), at):
                key, at = self.value(at, depth)
                at = text.index(":", at)
            else:
                end = text.index(":", at)
                key, at = text[at:end].strip(), end
            members[key], at = self.value(at + 1, depth + 1)
            at = self._after_member(at, "}")
        return members, at + 1

    def _items(self, at: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = _spaces(self._text, at + 1)
        while self._text[at : at + 1] != "]":
            each, at = self.value(at, depth + 1)
            items.append(each)
            at = self._after_member(at, "]")
        return items, at + 1

    def _after_member(self, at: int, end: str) -> int:
        at = _spaces(self._text, at)
        if self._text[at : at + 1] == ",":
            return _spaces(self._text, at + 1)
        if self._text[at : at + 1] != end:
            raise ValueError(f"neither , nor {end}")
        return at


# --- elements -------------------------------------------------------------------------------------------------------


def _elements(pieces: Iterator[str], end: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The elements up to the tag ``end``, by name: a text, a list of items, or a dictionary.

    Each of ``pieces`` is a tag and the text after it. Raises ValueError if they do not match.
    """
    for piece in pieces:
        if end and piece.startswith(end):
            return
        tag = re.match(r"<([^/<>]+)>", piece)
        if tag is None or depth > DEEPEST_VALUE:
            raise ValueError("a tag does not fit")
        inner = list(_elements(pieces, f"</{tag[1]}>", depth + 1))
        if not inner:
            yield tag[1], piece[tag.end() :]
        elif all(name == "item" for name, _ in inner):
            yield tag[1], [value for _, value in inner]
        else:
            yield tag[1], _by_name(inner)
    if end:
        raise ValueError("an element does not end")


def _by_name(elements: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values of ``elements`` by name. A name with several values gets a list."""
    found: dict[str, list[Any]] = {}
    for name, value in elements:
        found.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}
