"""Tools as the three protocols offer them: what the model is told, and which of them it may or must call."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, get_args

import msgspec

from app.serve.asking import as_text
from app.serve.refusals import Refused
from engine.ipc.messages import Tool, ToolChoice

_WORDS = (*get_args(ToolChoice), "any")


class NamedTool(msgspec.Struct):
    """A tool by its name, in the form of either protocol of OpenAI."""

    name: str = ""
    function: NamedTool | None = None

    @property
    def wanted(self) -> str:
        return self.name or (self.function.name if self.function is not None else "")


class ToolChoiceObject(NamedTool):
    """A ``tool_choice`` that is no word: one tool, or those that are allowed (``mode`` says whether one must be)."""

    type: str = ""
    mode: str = "auto"
    tools: list[NamedTool] | None = None
    allowed_tools: ToolChoiceObject | None = None


def tool_of(name: str, description: str | None, schema: dict[str, Any] | None) -> Tool:
    """A function that a client offers. ``schema``: the JSON schema of its parameters."""
    return Tool(name=name, description=description or "", parameters="" if schema is None else as_text(schema))


def chosen(tools: Sequence[Tool], choice: str | ToolChoiceObject | None) -> dict[str, Any]:
    """The fields of ``Generate`` for ``tools`` and OpenAI's ``tool_choice``. Raises Refused."""
    if choice is None or isinstance(choice, str):
        return offered(tools, choice)
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice
        names = [tool.wanted for tool in allowed.tools or ()]
        known = {tool.name: tool for tool in tools}
        for name in names:
            _check_known(name, known)
        return offered([known[name] for name in dict.fromkeys(names)], allowed.mode)
    if choice.wanted:
        return offered(tools, None, choice.wanted)
    return offered(tools, choice.type if choice.type in _WORDS else None)


def offered(tools: Sequence[Tool], word: str | None, name: str = "") -> dict[str, Any]:
    """The fields of ``Generate`` that say which ``tools`` may be called: as ``word`` says (auto, none or required, and
    auto if it is None), or the one of this ``name``, which must be. Raises Refused."""
    fields: dict[str, Any] = {"tools": list(tools)}
    if name:
        _check_known(name, [tool.name for tool in tools])
        return fields | {"tool_choice": "required", "forced_tool": name}
    if word is None:
        return fields
    if word not in _WORDS:
        raise Refused(f"The tool choice {word[:50]!r} is unknown: use auto, none or required.", parameter="tool_choice")
    word = "required" if word == "any" else word
    if word == "required" and not tools:
        raise Refused("A tool must be called, but there are no tools.", parameter="tool_choice")
    return fields | {"tool_choice": word}


def _check_known(name: str, names: Container[str]) -> None:
    if name not in names:
        raise Refused(f"There is no tool {name[:100]!r} among the tools.", parameter="tool_choice")
