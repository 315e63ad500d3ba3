"""Tools as the three protocols offer them: what the model is told, and which of them it may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from app.serve.asking import as_text
from app.serve.refusals import Refused
from engine.ipc.messages import Tool, ToolChoice


def tool_of(name: str, description: str | None, schema: dict[str, Any] | None) -> Tool:
    """A function that a client offers. ``schema``: the JSON schema of its parameters."""
    return Tool(name=name, description=description or "", parameters="" if schema is None else as_text(schema))


def offered(tools: Sequence[Tool], word: str | None, name: str = "") -> dict[str, Any]:
    """The fields of ``Generate`` that say which ``tools`` may be called: as ``word`` says (auto, none or required, and
    auto if it is None), or the one of this ``name``, which must be. Raises Refused."""
    fields: dict[str, Any] = {"tools": list(tools)}
    if name:
        if name not in (tool.name for tool in tools):
            raise Refused(f"There is no tool {name[:100]!r} among the tools.", parameter="tool_choice")
        return fields | {"tool_choice": "required", "forced_tool": name}
    if word is None:
        return fields
    if word not in get_args(ToolChoice):
        raise Refused(f"The tool choice {word[:50]!r} is unknown: use auto, none or required.", parameter="tool_choice")
    if word == "required" and not tools:
        raise Refused("A tool must be called, but there are no tools.", parameter="tool_choice")
    return fields | {"tool_choice": word}
