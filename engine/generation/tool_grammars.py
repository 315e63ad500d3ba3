"""Grammars of answers that must be a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.errors import ModelError
from engine.ipc.messages import Constraint, Tool
from engine.models.tool_formats import ToolFormat


def call_grammar(
    form: ToolFormat, tools: Sequence[Tool], encode: Callable[[str], Sequence[int]], control: Collection[int]
) -> Constraint:
    """The form of an answer that is one call of one of ``tools``.

    ``encode`` gives the tokens of a mark, and those in ``control`` are no text. Raises ModelError (bad-input) for a
    format whose calls cannot be forced.
    """
    if form.shape == "parts":
        raise ModelError(
            f"Calls in {form.name}'s format cannot be forced; leave the choice of tools to the model.", "bad-input"
        )

    def literal(mark: str) -> str:
        tokens = encode(mark) if mark else []
        if len(tokens) == 1 and tokens[0] in control:
            return f"<[{tokens[0]}]>"
        return json.dumps(mark, ensure_ascii=False) if mark else ""

    begin, end = literal(form.begin), literal(form.end)
    if form.name == "mistral-list":
        begin, end = f'{begin} "["', f'"]" {end}'
    calls = "\n    | ".join(_call(form, tool, literal) for tool in tools)
    text = f"start: {begin} call {end}\ncall: {calls}\n"
    if form.shape == "tagged":
        # A text value must not begin a mark.
        text += "VALUE: /[^<]*/\n"
    return Constraint(kind="grammar", text=text)


def _call(form: ToolFormat, tool: Tool, literal: Callable[[str], str]) -> str:
    schema = json.loads(tool.parameters) if tool.parameters else {"type": "object"}
    if form.shape == "json":
        key = "parameters" if form.bare else "arguments"
        body = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: schema},
            "required": ["name", key],
            "additionalProperties": False,
        }
        # References within the schema begin at its own root.
        for name in ("$defs", "definitions"):
            if name in schema:
                body[name] = schema[name]
        return f"%json {json.dumps(body)}"
    if form.shape == "tagged":
        return _tagged(form, tool.name, schema)
    return f"{json.dumps(tool.name)} {literal(form.separator)} %json {json.dumps(schema)}"


def _tagged(form: ToolFormat, name: str, schema: Any) -> str:
    """A call whose arguments are keys and values between tags: those that are required, then the others, each in the
    schema's order."""
    key_begin, key_end, value_begin, value_end = form.tags
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    needed = [key for key in required if key in known] if isinstance(required, list) else []

    def argument(key: str) -> str:
        value = known[key]
        free = not isinstance(value, dict) or value.get("type", "string") == "string" or "$ref" in value
        text = "VALUE" if free else f"%json {json.dumps(value)}"
        begin = json.dumps(f"{key_begin}{key}{key_end}\n{value_begin}", ensure_ascii=False)
        return f"{begin} {text} {json.dumps(value_end)} /\\n?/"

    optional = [f"({argument(key)})?" for key in known if key not in needed]
    head = json.dumps((form.prefixes or ("",))[0] + name + form.name_end)
    return " ".join([head, *map(argument, needed), *optional, json.dumps(form.last) if form.last else ""])
