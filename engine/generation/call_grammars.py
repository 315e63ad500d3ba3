"""Grammars for the values in calls that must satisfy their tool's JSON schema.

Within JSON, llguidance reads the schema itself. Between tags a string is written as it is, so its schema becomes a
terminal in llguidance's form of Lark. All other values are JSON there, too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelError
from engine.generation.constraints import WHITE_SPACE, refused
from engine.generation.tool_arguments import (
    DEEPEST_SCHEMA,
    ArgumentTypes,
    choices_of,
    named_types,
    schema_parts,
    target_of,
    type_names,
)
from engine.ipc.messages import Constraint, Tool
from engine.models.text.reasoning_formats import ReasoningFormat
from engine.models.text.tool_formats import ToolFormat

MOST_ALTERNATIVES = 64
"""Maximum alternatives of one schema that differ in their strings."""
_ANNOTATIONS = frozenset(["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"])
"""Keywords without any effect on which values are allowed."""
_NOT_KEPT = ("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "if", "not")
"""Keywords that are refused, because arguments between tags could violate them."""
_NO_STRINGS = ("array", "boolean", "integer", "null", "number", "object")
_DATE = "[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,5}}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,5}}",
    "uri": rf"https?:\/\/{_LABEL}(\.{_LABEL}){{0,5}}(\/[A-Za-z0-9._~?&=+-]*)*",
}
"""Regular expressions for the formats of strings. All matches have the format; some strings of the format may not
match."""


def json_value(schema: Any, root: Any) -> str:
    """The grammar of a JSON value of ``schema``, whose references point into ``root``."""
    options = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": True}
    return f"%json {json.dumps({**self_contained(schema, root), 'x-guidance': options})}"


def self_contained(schema: Any, root: Any) -> dict[str, Any]:
    """``schema`` with copies of the parts of ``root`` that it refers to, so that it can stand alone."""
    if not isinstance(schema, dict):
        return {} if schema is not False else {"not": {}}
    names: dict[str, str] = {}
    copies: dict[str, Any] = {}
    waiting: list[str] = []

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(each) for each in part]
        if not isinstance(part, dict):
            return part
        return {key: _moved_member(key, each) for key, each in part.items() if key not in ("$defs", "definitions")}

    def _moved_member(key: str, value: Any) -> Any:
        if key in ("const", "enum", "default", "examples"):
            return value
        if key == "type" and not isinstance(value, dict):
            return type_names(value)
        if key != "$ref" or not isinstance(value, str) or not value.startswith("#"):
            return moved(value)
        if value not in names:
            names[value] = str(len(names))
            waiting.append(value)
        return f"#/$defs/{names[value]}"

    found: dict[str, Any] = moved({key: value for key, value in schema.items() if key not in ("x-guidance", "$id")})
    while waiting:
        reference = waiting.pop()
        copies[names[reference]] = moved(target_of(reference, root))
    return {**found, "$defs": copies} if copies else found


@dataclass(frozen=True)
class TextForm:
    """One way for a string to satisfy a schema: it is one of ``choices`` (None: any string), and all ``terminals``
    match it."""

    choices: tuple[str, ...] | None = None
    terminals: tuple[str, ...] = ()

    def and_also(self, other: TextForm) -> TextForm:
        choices = self.choices if other.choices is None else other.choices
        if self.choices is not None and other.choices is not None:
            choices = tuple(choice for choice in self.choices if choice in other.choices)
        return TextForm(choices, tuple(dict.fromkeys((*self.terminals, *other.terminals))))


def text_forms(schema: Any, root: Any, depth: int = 0) -> list[TextForm]:
    """The ways for a string to satisfy ``schema``; empty if no string can. Raises ModelError (bad-input) if they are
    too many."""
    if schema is False or depth > DEEPEST_SCHEMA:
        return []
    own, every, alternatives = schema_parts(schema, root)
    types, choices = named_types(own), choices_of(own)
    if types is not None and "string" not in types:
        return []
    texts = None if choices is None else tuple(each for each in choices if isinstance(each, str))
    forms = [TextForm(texts, tuple(_terminals(own)))]
    for part in every:
        forms = _both(forms, text_forms(part, root, depth + 1))
    if alternatives:
        forms = _both(forms, [form for part in alternatives for form in text_forms(part, root, depth + 1)])
    return [form for form in forms if form.choices != ()]


def _both(left: Sequence[TextForm], right: Sequence[TextForm]) -> list[TextForm]:
    return _few(dict.fromkeys(one.and_also(other) for one, other in itertools.product(left, right)))


def _few(found: Any) -> list[Any]:
    if len(found) > MOST_ALTERNATIVES:
        raise refused("The schema of a tool", f"it has more than {MOST_ALTERNATIVES} alternatives")
    return list(found)


def _terminals(own: Mapping[str, Any]) -> Iterator[str]:
    """The terminals that match a string, by the schema's own keywords."""
    least, most = own.get("minLength", 0), own.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.{{{least},{most}}})/"
    if isinstance(own.get("pattern"), str):
        yield _terminal(_searched(own["pattern"]))
    if own.get("format") in _FORMATS:
        yield f"/{_FORMATS[own['format']]}/"


def _searched(pattern: str) -> str:
    """A regular expression whose whole matches are the texts that contain ``pattern``."""
    ends = pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    return f"{begin}(?:{pattern.removeprefix('^')[: -1 if ends else None]}){'' if ends else '(?s:.*)'}"


def _terminal(pattern: str) -> str:
    import llguidance

    try:
        return f"/{llguidance.regex_to_lark(pattern, 'dw')}/"
    except ValueError as error:
        raise refused("The schema of a tool", f"its pattern cannot be used: {error}") from error


@dataclass
class TextRules:
    """The rules of values between tags, each written once.

    ``excluded``: marks that no free text contains. ``end`` follows a value: a literal, or a token.
    """

    excluded: Sequence[str]
    end: str
    space: str = ""
    """Terminal of the white space around a value, which is not part of it."""
    _names: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The rules as text."""
        return "".join(f"{name}: {rule}\n" for rule, name in self._names.items())

    def argument(self, schema: Any, types: ArgumentTypes) -> str:
        """The name of the rule for a value of ``schema`` with its end."""
        root = types.root
        allowed = types.allowed(schema)
        forms = text_forms(schema, root) if allowed is None or "string" in allowed else []
        if allowed is None and not _allows_anything(schema):
            # What a text looks like decides here about what it is.
            forms = [form for form in forms if form.choices is not None]
        free = any(form.choices is None for form in forms)
        if free and allowed is not None and "null" in allowed:
            forms.append(TextForm(("null",)))
        rules = [self._text(form) for form in forms]
        others = [name for name in _NO_STRINGS if allowed is None or name in allowed]
        if not free and others:
            without_strings = allowed is not None and "string" not in allowed
            narrowed = schema if without_strings else {"allOf": [schema, {"type": others}]}
            rules.append(self._rule("value", self.space, json_value(narrowed, root), self.space, self.end))
        return rules[0] if len(rules) == 1 else self._rule("value", " | ".join(rules))

    def _text(self, form: TextForm) -> str:
        parts = list(form.terminals)
        if form.choices is not None:
            parts.append("(" + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choices) + ")")
        else:
            parts.append(f"/{text_without(self.excluded)}/")
        space = self.space if form != TextForm() else ""
        if space:
            # A line break at either end would be taken for the one that belongs to the mark.
            parts.append(r"/([^\n]((?s:.*)[^\n])?)?/")
        terminal = self._rule("TEXT", " & ".join(parts))
        # As short as possible, so that it ends where its end mark begins; a token is no text anyway.
        options = "" if self.end.startswith("<") else "[lazy]"
        return self._rule("value", space, terminal, space, self.end, options=options)

    def _rule(self, kind: str, *parts: str, options: str = "") -> str:
        rule = " ".join(part for part in parts if part)
        return self._names.setdefault(rule, f"{kind}{len(self._names)}{options}").removesuffix("[lazy]")


def _allows_anything(schema: Any) -> bool:
    return not isinstance(schema, dict) or _ANNOTATIONS.issuperset(schema)


def text_without(marks: Sequence[str]) -> str:
    """A regular expression of the texts that contain none of ``marks``.

    The first letter of a mark must occur only there, in this mark and the others. The expression says what may follow
    each beginning of a mark. Negating an expression of the marks would mean the same, but if the length of the text is
    limited, llguidance would need too much work.
    """
    tree: dict[str, Any] = {}
    for mark in marks:
        node = tree
        for letter in mark:
            node = node.setdefault(letter, {})
    first = "".join(tree)

    def other(letters: str) -> str:
        return "[^" + "".join(map(_escaped, dict.fromkeys(letters))) + "]"

    def broken(node: Mapping[str, Any]) -> str:
        """What may follow the beginning of a mark without completing it."""
        longer = [_escaped(letter) + broken(after) for letter, after in node.items() if after]
        return f"(?:{'|'.join([other(first + ''.join(node)), *longer])})"

    def begun(node: Mapping[str, Any]) -> str:
        """An expression of any beginning of a mark."""
        found = [(_escaped(letter), begun(after)) for letter, after in node.items() if after]
        return "|".join(f"{letter}(?:{more})?" if more else letter for letter, more in found)

    ends = "|".join(_escaped(letter) + broken(after) for letter, after in tree.items())
    return f"(?:{other(first)}|(?:{begun(tree)})*(?:{ends}))*(?:{begun(tree)})*"


def _escaped(text: str) -> str:
    """``text`` as a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/\"-]", r"\\\g<0>", text)


# --- the arguments of a call ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """One set of arguments that a tool's schema allows: their schemas, and the names of the required ones."""

    schemas: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    others: Any = None
    """Schema of arguments that are not named."""

    def and_also(self, other: Arguments) -> Arguments:
        schemas = dict(self.schemas)
        for key, found in other.schemas.items():
            schemas[key] = (*schemas.get(key, ()), *found)
        required = tuple(dict.fromkeys((*self.required, *other.required)))
        return Arguments(schemas, required, self.others if other.others is None else other.others)

    def members(self) -> list[tuple[str, Any, bool]]:
        """Name and schema of each argument, and whether it is required."""
        named = {key: found[0] if len(found) == 1 else {"allOf": list(found)} for key, found in self.schemas.items()}
        named |= {key: {} if self.others is None else self.others for key in self.required if key not in named}
        return [(key, schema, key in self.required) for key, schema in named.items()]


def arguments_of(tool: str, schema: Any, root: Any, depth: int = 0) -> list[Arguments]:
    """The sets of arguments that the ``schema`` of ``tool`` allows.

    Raises ModelError (bad-input) for keywords that cannot be enforced.
    """
    own, every, alternatives = schema_parts(schema, root)
    if depth > DEEPEST_SCHEMA:
        return []
    if (broken := next((key for key in _NOT_KEPT if key in own), None)) is not None:
        raise refused(f"The schema of the tool {tool}", f"{broken} is not supported where a call must be made")
    properties, required, others = own.get("properties"), own.get("required"), own.get("additionalProperties")
    choices = [
        Arguments(
            {key: (part,) for key, part in properties.items()} if isinstance(properties, dict) else {},
            tuple(key for key in required if isinstance(key, str)) if isinstance(required, list) else (),
            others if isinstance(others, dict) else None,
        )
    ]
    for part in every:
        choices = _every(choices, arguments_of(tool, part, root, depth + 1))
    if alternatives:
        choices = _every(choices, [each for part in alternatives for each in arguments_of(tool, part, root, depth + 1)])
    return choices


def _every(left: Sequence[Arguments], right: Sequence[Arguments]) -> list[Arguments]:
    return _few([some.and_also(more) for some, more in itertools.product(left, right)])


# --- grammars of calls -----------------------------------------------------------------------------------------------


Literal = Callable[[str], str]
"""Function that makes the grammar of a mark."""


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    encode: Callable[[str], Sequence[int]],
    control: Collection[int],
    parts: ReasoningFormat | None = None,
) -> Constraint:
    """The form of an answer that is one call of one of ``tools``, with arguments of the tool's schema.

    ``encode`` gives the tokens of a mark; tokens in ``control`` are not text. ``parts``: the names of an answer's parts
    in the model's format, if a call is one of them. Then the form covers the whole answer, with free thoughts. Raises
    ModelError (bad-input) for a format whose calls cannot be enforced, and for an unsupported schema.
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
    """The beginning of an answer before its call, which may contain parts for thoughts, and its rules."""
    start, channel = map(literal, parts.headers)
    names = " | ".join(map(json.dumps, parts.thoughts))
    thoughts = f'{channel} ({names}) {literal(parts.body)} THOUGHTS {literal(parts.end)} {start} "assistant"'
    return "thoughts*", f"thoughts: {thoughts}\nTHOUGHTS: /(?s:.*)/\n"


def _part(form: ToolFormat, parts: ReasoningFormat, tool: Tool, literal: Literal) -> str:
    channel = literal(parts.headers[-1])
    name = json.dumps(f"commentary to={form.prefixes[0]}{tool.name} ")
    return f'{channel} {name} {literal("<|constrain|>")} "json" {literal(parts.body)} {_arguments(tool)}'


class _Tagged:
    """Calls whose arguments are keys and values between tags. ``rules`` are the rules of their values."""

    def __init__(self, form: ToolFormat, literal: Literal) -> None:
        self._form = form
        self._literal = literal
        space = r"/\n?/" if form.lines else ""
        self.rules = TextRules([*form.all_marks, *form.prefixes], literal(form.tags[3]), space)

    def call(self, tool: Tool) -> str:
        """A call with all required arguments and any of the others, in the schema's order."""
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
