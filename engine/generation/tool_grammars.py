"""Grammars of answers that must be a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.errors import ModelError
from engine.generation.argument_grammars import TextRules, arguments_of, json_value
from engine.generation.tool_arguments import ArgumentTypes
from engine.ipc.messages import Constraint, Tool
from engine.models.text.reasoning_formats import ReasoningFormat
from engine.models.text.tool_formats import ToolFormat

Literal = Callable[[str], str]
"""Makes the part of a grammar that is a mark."""


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    encode: Callable[[str], Sequence[int]],
    control: Collection[int],
    parts: ReasoningFormat | None = None,
) -> Constraint:
    """The form of an answer that is one call of one of ``tools``, with arguments of the tool's schema.

    ``encode`` gives the tokens of a mark, and those in ``control`` are no text. ``parts``: how a model names the parts
    of its answer, if a call is one of them; the form is then that of the whole answer, with free thoughts. Raises
    ModelError (bad-input) for a format whose calls cannot be forced, and for a schema that cannot be kept.
    """

    def literal(mark: str) -> str:
        tokens = encode(mark) if mark else []
        if len(tokens) == 1 and tokens[0] in control:
            return f"<[{tokens[0]}]>"
        return json.dumps(mark, ensure_ascii=False) if mark else ""

    rules = ""
    begin, end = literal(form.begin), literal(form.end)
    match form.shape:
        case "json" | "python":
            # JSON is read where Python is the rule, too.
            calls = [_object(form, tool) for tool in tools]
            if form.name == "mistral-list":
                begin, end = f'{begin} "["', f'"]" {end}'
        case "named":
            id_ = f'"0" {literal(form.id_end)} ' if form.id_end else ""
            calls = [f"{id_}{json.dumps(tool.name)} {literal(form.separator)} {_arguments(tool)}" for tool in tools]
        case "braces" | "elements":
            before = (form.prefixes or ("",))[0]
            calls = [f"{json.dumps(before + tool.name + form.name_end)} {_arguments(tool)}" for tool in tools]
        case "tagged":
            tagged = _Tagged(form, literal)
            calls = [tagged.call(tool) for tool in tools]
            rules = tagged.rules.text
        case "parts" if parts is not None:
            begin, rules = _thoughts(parts, literal)
            calls = [_part(form, parts, tool, literal) for tool in tools]
        case _:
            raise ModelError(
                f"Calls in {form.name}'s format cannot be forced; leave the choice of tools to the model.", "bad-input"
            )
    text = f"start: {begin} call {end}\ncall: " + "\n    | ".join(calls) + f"\n{rules}"
    return Constraint(kind="grammar", text=text)


def _schema(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tool.parameters) if tool.parameters else {"type": "object"}
    return found


def _arguments(tool: Tool) -> str:
    schema = _schema(tool)
    return json_value({"type": "object", **schema}, schema)


def _object(form: ToolFormat, tool: Tool) -> str:
    key = "parameters" if form.bare else "arguments"
    schema = _schema(tool)
    body = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: {"type": "object", **schema}},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json_value(body, schema)


def _thoughts(parts: ReasoningFormat, literal: Literal) -> tuple[str, str]:
    """The beginning of an answer up to its call, in which there may be parts for thoughts; and its rules."""
    start, channel = map(literal, parts.headers)
    names = " | ".join(map(json.dumps, parts.thoughts))
    thoughts = f'{channel} ({names}) {literal(parts.body)} THOUGHTS {literal(parts.end)} {start} "assistant"'
    return "thoughts*", f"thoughts: {thoughts}\nTHOUGHTS: /(?s:.*)/\n"


def _part(form: ToolFormat, parts: ReasoningFormat, tool: Tool, literal: Literal) -> str:
    channel = literal(parts.headers[-1])
    name = json.dumps(f"commentary to={form.prefixes[0]}{tool.name} ")
    return f'{channel} {name} {literal("<|constrain|>")} "json" {literal(parts.body)} {_arguments(tool)}'


class _Tagged:
    """Calls whose arguments are keys and values between tags. ``rules`` are those of their values."""

    def __init__(self, form: ToolFormat, literal: Literal) -> None:
        self._form = form
        self._literal = literal
        space = r"/\n?/" if form.lines else ""
        self.rules = TextRules([*form.all_marks, *form.prefixes], literal(form.tags[3]), space)

    def call(self, tool: Tool) -> str:
        """A call with all arguments that are required, and any of the others, in the schema's order."""
        form, schema = self._form, _schema(tool)
        types = ArgumentTypes(tool.parameters)
        head = json.dumps((form.prefixes or ("",))[0] + tool.name + form.name_end)
        last = json.dumps(form.last) if form.last else ""
        sets = []
        for arguments in arguments_of(tool.name, schema, schema):
            members = [
                self._argument(key, part, types) if required else f"({self._argument(key, part, types)})?"
                for key, part, required in arguments.members()
            ]
            sets.append(" ".join(members))
        return f"{head} ({' | '.join(sets)}) {last}" if any(sets) else f"{head} {last}"

    def _argument(self, key: str, schema: Any, types: ArgumentTypes) -> str:
        key_begin, key_end, value_begin, _ = self._form.tags
        begin = f"{self._literal(key_begin)} {json.dumps(key, ensure_ascii=False)} {self._literal(key_end)}"
        if value_begin:
            begin += rf" /\n?/ {self._literal(value_begin)}"
        return rf"{begin} {self.rules.argument(schema, types)} /\n?/"
