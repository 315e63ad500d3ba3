"""How a model writes calls of tools: ``assets/tool_calls.toml``, and which of its formats a template declares."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
import tomllib
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from engine.errors import ModelError
from engine.ipc.messages import Tool, ToolCall
from engine.models.wording import shown

MOST_TOOLS = 256
"""Maximum tools of a question."""
LARGEST_PARAMETERS = 64 * 1024
"""Maximum characters of a tool's JSON schema."""
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
    """``calls`` in the form that chat templates take. Raises ModelError (bad-input) for arguments that are no JSON."""
    found = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"The arguments of the call {shown(call.id)} are no JSON: {error}.", "bad-input"
            ) from error
        found.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return found


def check_tools(tools: Sequence[Tool], forced: str) -> None:
    """Raises ModelError (bad-input) for tools that are malformed or too many, or if ``forced`` is none of them."""
    if len(tools) > MOST_TOOLS:
        raise ModelError(f"{len(tools)} tools were given, and at most {MOST_TOOLS} can be.", "bad-input")
    names = [tool.name for tool in tools]
    for tool in tools:
        if _NAME.fullmatch(tool.name) is None:
            raise ModelError(
                f"A tool's name is {shown(tool.name)}; it must be 1 to 128 letters, digits, dots, _ and -.", "bad-input"
            )
        if names.count(tool.name) > 1:
            raise ModelError(f"Two tools are called {tool.name}; give each a name of its own.", "bad-input")
        _check_parameters(tool)
    if forced and forced not in names:
        raise ModelError(f"The tool {shown(forced)} must be called, but is not among those given.", "bad-input")


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
