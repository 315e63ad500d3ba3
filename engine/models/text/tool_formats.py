"""How a model writes calls of tools: ``assets/tool_calls.toml``, and which of its formats a template declares."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
import tomllib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from engine.errors import ModelError, shown
from engine.ipc.messages import Tool, ToolCall

_DEEPEST = 100
"""Maximum brackets that are open at once in arguments that were cut."""
MOST_TOOLS = 256
"""Maximum tools of a question."""
LARGEST_PARAMETERS = 64 * 1024
"""Maximum characters of a tool's JSON schema."""
LONGEST_NAME = 128
"""Maximum characters of a tool's name."""
_TRIES = 3
"""Members that are left out at most from the end of arguments that were cut."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TAKES_TOOLS = re.compile(r"\btools\b")


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One format of calls. Its marks are no part of any text that is shown."""

    name: str
    shape: Literal["json", "named", "tagged", "parts", "python", "braces", "elements"]
    """How name and arguments are written, as the file says."""
    begin: str = ""
    end: str = ""
    """Mark after a call; empty: it goes on to the next one, or to the end of the answer."""
    also: tuple[tuple[str, str], ...] = ()
    """Further marks before and after a call, which some models write instead."""
    separator: str = ""
    """Mark between name and arguments, or before each tag of elements."""
    id_begin: str = ""
    """Mark between a name and the call's id after it."""
    id_end: str = ""
    """Mark between a call's id and the name after it."""
    quote: str = ""
    """Mark before and after a text."""
    prefixes: tuple[str, ...] = ()
    """What may stand before a name."""
    tags: tuple[str, ...] = ()
    """What is before and after an argument's key, and before and after its value."""
    lines: bool = False
    """Whether a line break before and after a value belongs to its tags."""
    name_end: str = ""
    """What is written after a name, if a call with tags is forced."""
    last: str = ""
    """What is written after the last argument of such a call."""
    hidden: tuple[str, ...] = ()
    """Marks that mean nothing."""
    bare: bool = False
    """Whether a call is an answer that begins with a brace, without a mark."""
    turn_ends: tuple[str, ...] = ()
    """Special tokens that end a turn after a call, to wait for the tool's result."""
    known: tuple[str, ...] = ()
    """Texts by which the format is known; empty: its marks."""
    shown: tuple[str, ...] = ()
    """What a template must have besides, if it has the first mark."""

    @property
    def all_marks(self) -> tuple[str, ...]:
        """The marks that may be special tokens."""
        further = (mark for pair in self.also for mark in pair)
        found = (
            *(self.begin, self.end, self.separator, *self.tags, *self.hidden),
            *(*further, self.id_begin, self.id_end, self.quote),
        )
        return tuple(dict.fromkeys(mark for mark in found if len(mark) > 2))


def tool_format_of(template: str, tokens: Collection[str]) -> ToolFormat | None:
    """The first format all of whose texts or marks are in the chat ``template``'s source or among the added ``tokens``;
    None if there is none, or the template takes no tools."""
    if _TAKES_TOOLS.search(template) is None:
        return None
    for form in tool_formats():
        if form.begin in template and not all(text in template for text in form.shown):
            continue
        if all(mark in template or mark in tokens for mark in form.known or form.all_marks):
            return form
    return None


@functools.cache
def tool_formats() -> tuple[ToolFormat, ...]:
    """The formats of ``assets/tool_calls.toml``, in its order."""
    text = importlib.resources.files("assets").joinpath("tool_calls.toml").read_text(encoding="utf-8")
    found = msgspec.convert(tomllib.loads(text), dict[str, list[ToolFormat]])
    return tuple(found["format"])


def rendered_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """``tools`` in the form that chat templates take."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def rendered_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """``calls`` in the form that chat templates take.

    Most templates take the arguments apart, so that they are always a dictionary: what was cut is one as far as it was
    written, and what is none becomes one.
    """
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _dictionary(call.arguments)}}
        for call in calls
    ]


def _dictionary(written: str) -> dict[str, Any]:
    value = _json(written)
    if not isinstance(value, dict) and written.lstrip().startswith("{"):
        value = _as_far_as_written(written)
    if isinstance(value, dict):
        return value
    return {} if written.strip() in ("", "null", "[]", '""') else {"arguments": written if value is None else value}


def _as_far_as_written(text: str) -> Any:
    """The value of JSON that was cut: without its last member, if that cannot be read. None if it is no JSON."""
    closed: deque[tuple[int, str]] = deque(maxlen=_TRIES)
    """The last places where a value may end, and the brackets that are open there."""
    brackets, in_text, place = "", False, 0
    while place < len(text):
        letter = text[place]
        if in_text:
            in_text = letter != '"'
            place += letter == "\\"
        elif letter == '"':
            in_text = True
        elif letter in "{[":
            brackets = ("}" if letter == "{" else "]") + brackets
            if len(brackets) > _DEEPEST:
                return None
            closed.append((place + 1, brackets))
        elif letter in "}]":
            brackets = brackets[1:]
        elif letter == ",":
            closed.append((place, brackets))
        place += 1
    if not in_text and not brackets:
        return None
    # A text may have been cut within an escape.
    written = [text + '"', text[: max(0, text.rfind("\\"))] + '"'] if in_text else [text]
    tries = [each + brackets for each in written] + [text[:end] + rest for end, rest in reversed(closed)]
    return next((found for each in tries if (found := _json(each)) is not None), None)


def _json(text: str) -> Any:
    """The value that ``text`` writes; None if it writes none, or halves of characters."""
    try:
        found = json.loads(text, strict=False)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found


def takes_name(form: ToolFormat | None, name: str) -> bool:
    """Whether calls in ``form`` can name a tool ``name``."""
    if _NAME.fullmatch(name) is not None:
        return True
    if form is None or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME or name != name.strip():
        return False
    if any(mark and mark in name for mark in (*form.all_marks, form.separator)):
        return False
    apart = not any(letter.isspace() or letter in ":{`" for letter in name)
    taken = {"json": True, "named": apart, "parts": apart, "tagged": not set('"<>{') & set(name)}
    return taken.get(form.shape, False)


def offered_tools(tools: Sequence[Tool], forced: str, form: ToolFormat | None) -> tuple[list[Tool], list[str]]:
    """The members of ``tools`` that calls in ``form`` can name, and a sentence on each of the others.

    Raises ModelError (bad-input) for tools that are too many or have no schema, or if ``forced`` is none of those that
    are offered.
    """
    if len(tools) > MOST_TOOLS:
        raise ModelError(f"{len(tools)} tools were given, and at most {MOST_TOOLS} can be.", "bad-input")
    offered: dict[str, Tool] = {}
    left_out = []
    for tool in tools:
        if tool.name in offered:
            left_out.append(f"Two tools are called {shown(tool.name)}: the model is told of the first one only.")
        elif not takes_name(form, tool.name):
            left_out.append(f"The model cannot call a tool by the name {shown(tool.name)}: it is not told of that one.")
        else:
            _check_parameters(tool)
            offered[tool.name] = tool
    if forced and forced not in offered:
        known = any(tool.name == forced for tool in tools)
        reason = "the model cannot call a tool by that name" if known else "is not among those given"
        raise ModelError(f"The tool {shown(forced)} must be called, but {reason}.", "bad-input")
    return list(offered.values()), left_out


def _check_parameters(tool: Tool) -> None:
    if len(tool.parameters) > LARGEST_PARAMETERS:
        raise ModelError(
            f"The parameters of the tool {tool.name} have {len(tool.parameters):,} characters, and at most "
            f"{LARGEST_PARAMETERS:,} can be given.",
            "bad-input",
        )
    try:
        found = json.loads(tool.parameters or "{}")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"The parameters of the tool {tool.name} are no JSON: {error}.", "bad-input") from error
    if not isinstance(found, dict):
        raise ModelError(f"The parameters of the tool {tool.name} are no JSON schema.", "bad-input")
