"""Gives the arguments of a call the types of the tool's JSON schema.

Between tags every value is text, and in JSON a model may quote a number or leave a text unquoted. Values that fit no
type of the schema stay as they were written.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_STEPS = 20_000
"""Maximum parts of a schema examined for one value. Beyond them, values stay as they are."""
DEEPEST_SCHEMA = 100
"""Maximum levels of a schema that are examined."""

_ANY: dict[str, Any] = {}
_NULLS = ("null", "None")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TYPE_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "None": "null",
}
"""JSON schema's names of types, by other names in schemas that were written by hand."""
_LEADING_ZEROS = re.compile(r"(?<![^\s-])0+(?=\d+(\.\d+)?\s*\Z)")
_WRAPPERS = ("arguments", "parameters", "properties", "input")
"""Names of a single argument in which models wrap all arguments."""
_WRONG, _ALMOST, _FITS = range(3)
"""Degrees to which a value fits a schema: its type is wrong, something inside it is, or nothing."""


class _Fit(NamedTuple):
    """A value converted to the types of a schema, and how well it fits."""

    value: Any
    how: int


class _WrittenFloat(float):
    """A number that keeps its spelling."""

    written = ""


class WrittenInteger(int):
    """An integer that keeps its spelling, with leading zeros."""

    written = ""

    @classmethod
    def of(cls, written: str) -> WrittenInteger:
        found = cls(written)
        found.written = written
        return found


class SchemaParts(NamedTuple):
    """The schema's own keywords, further schemas that must all hold, and schemas of which one must hold."""

    own: dict[str, Any]
    every: list[Any]
    one: list[Any]


class ArgumentTypes:
    """The types of one tool's arguments. ``parameters``: their JSON schema as JSON text; empty: nothing is known."""

    def __init__(self, parameters: str) -> None:
        found = read_json(parameters)
        self.root: dict[str, Any] = found if isinstance(found, dict) else _ANY
        """The schema, into which its parts may refer."""
        self._steps = 0

    def typed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """``arguments``, read from JSON, with the schema's types, also in nested values."""
        self._steps = 0
        found: dict[str, Any] = self._fit(dict(arguments), self.root, 0).value
        return found

    def from_text(self, key: str, text: str) -> Any:
        """The value of the argument ``key``, written as ``text`` between tags.

        If the schema allows strings and other types, text that spells a value of another type is read as that. If the
        schema names no type, text that looks like JSON is read as JSON.
        """
        self._steps = 0
        schema = self._property(key, self.root, 0)
        types = self._types(schema, 0)
        if types is None:
            read = _read(text)
            return self._fit(text if isinstance(read, str) else read, schema, 0).value
        if "string" in types and len(types) > 1 and not self._names_choice(text, schema, 0):
            if text in _NULLS and "null" in types:
                return None
            read = None if text.strip() in _NULLS else _read(text)
            if read is not None and not isinstance(read, str) and _is_of(read, types):
                other = self._fit(read, schema, 0)
                if other.how == _FITS:
                    return other.value
        fit = self._fit(text, schema, 0)
        if fit.how < _FITS and text != text.strip():
            stripped = self._fit(text.strip(), schema, 0)
            return stripped.value if stripped.how == _FITS else fit.value
        return fit.value

    def unwrapped(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """``arguments`` without a single argument around all of them that the schema does not know."""
        for key, value in arguments.items() if len(arguments) == 1 else ():
            inner = _read(value) if isinstance(value, str) else value
            known = self.root.get("properties")
            if self.may_wrap(key) and isinstance(inner, dict) and inner and known and inner.keys() <= known.keys():
                return self.typed(inner)
        return arguments

    def may_wrap(self, key: str) -> bool:
        """Whether the argument ``key`` may wrap all the others: the schema has other arguments and not this one."""
        known = self.root.get("properties")
        return key in _WRAPPERS and isinstance(known, dict) and bool(known) and key not in known

    def is_text(self, key: str) -> bool:
        """Whether the argument ``key`` is a string, whatever is written between tags."""
        self._steps = 0
        schema = self._property(key, self.root, 0)
        types = self._types(schema, 0)
        return types is not None and types == {"string"} and not self._has_choices(schema, 0)

    @property
    def by_member(self) -> bool:
        """Whether the type of each argument is independent of the others."""
        parts = schema_parts(self.root, self.root)
        return not parts.every and not parts.one and choices_of(parts.own) is None

    def member(self, key: str, value: Any) -> Any:
        """``value``, read from JSON, with the type of the argument ``key``. Requires :attr:`by_member`."""
        self._steps = 0
        return self._fit(value, self._member(key), 1).value

    def keeps_strings(self, key: str) -> bool:
        """Whether a JSON string for the argument ``key`` stays unchanged. Requires :attr:`by_member`."""
        self._steps = 0
        schema = self._member(key)
        types = self._types(schema, 1)
        return (types is None or "string" in types) and not self._has_choices(schema, 1)

    def _member(self, key: str) -> Any:
        properties = self.root.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        return self.root.get("additionalProperties", _ANY) if "patternProperties" not in self.root else _ANY

    def allowed(self, schema: Any) -> frozenset[str] | None:
        """The names of the types that ``schema``, a part of the tool's, allows; None if it names none."""
        self._steps = 0
        return self._types(schema, 0)

    # --- schemas --------------------------------------------------------------------------------------------------

    def _parts(self, schema: Any, depth: int) -> SchemaParts:
        """The parts of ``schema``; see :func:`schema_parts`. Parts beyond the limits allow anything."""
        self._steps += 1
        if depth > DEEPEST_SCHEMA or self._steps > MOST_STEPS:
            return SchemaParts(_ANY, [], [])
        return schema_parts(schema, self.root)

    def _property(self, key: str, schema: Any, depth: int) -> Any:
        """The schema of the argument ``key``."""
        own, every, one = self._parts(schema, depth)
        properties = own.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        for other in (*every, *one):
            if (found := self._property(key, other, depth + 1)) is not _ANY:
                return found
        more = own.get("additionalProperties")
        return more if isinstance(more, dict) else _ANY

    def _types(self, schema: Any, depth: int) -> frozenset[str] | None:
        """The names of the types that ``schema`` allows; None if it names none."""
        own, every, alternative_schemas = self._parts(schema, depth)
        named = [accepted for part in every if (accepted := self._types(part, depth + 1)) is not None]
        if (types := named_types(own)) is not None:
            named.append(types)
        if (choices := choices_of(own)) is not None:
            named.append(frozenset(_type(choice) for choice in choices))
        alternatives = [self._types(part, depth + 1) for part in alternative_schemas]
        if alternatives and None not in alternatives:
            named.append(frozenset().union(*(accepted for accepted in alternatives if accepted is not None)))
        with_integers = [types | {"integer"} if "number" in types else types for types in named]
        return frozenset.intersection(*with_integers) if with_integers else None

    def _has_choices(self, schema: Any, depth: int) -> bool:
        own, every, one = self._parts(schema, depth)
        return choices_of(own) is not None or any(self._has_choices(part, depth + 1) for part in (*every, *one))

    def _names_choice(self, text: str, schema: Any, depth: int) -> bool:
        """Whether ``text`` is one of the values that ``schema`` lists."""
        own, every, one = self._parts(schema, depth)
        return text in (choices_of(own) or ()) or any(
            self._names_choice(text, part, depth + 1) for part in (*every, *one)
        )

    # --- values ---------------------------------------------------------------------------------------------------

    def _fit(self, value: Any, schema: Any, depth: int) -> _Fit:
        """``value`` converted to ``schema``. A value that satisfies it stays as it is."""
        own, every, alternatives = self._parts(schema, depth)
        if schema is False:
            return _Fit(value, _WRONG)
        value, how = _as_type(value, named_types(own))
        choices = choices_of(own)
        if choices is not None and how:
            value, chosen = _chosen(value, choices)
            how = min(how, chosen)
        for part in every:
            value, found = self._fit(value, part, depth + 1)
            how = min(how, found)
        if alternatives and how:
            fits = [self._fit(value, part, depth + 1) for part in alternatives]
            best = max(fits, key=lambda fit: (fit.how, _same(fit.value, value)))
            value, how = best.value, min(how, best.how)
        if isinstance(value, dict) and how:
            return self._members(value, own, how, depth)
        if isinstance(value, list) and how:
            return self._items(value, own, how, depth)
        return _Fit(value, how)

    def _members(self, value: dict[str, Any], own: dict[str, Any], how: int, depth: int) -> _Fit:
        properties = own.get("properties")
        known = properties if isinstance(properties, dict) else _ANY
        others = own.get("additionalProperties", _ANY) if "patternProperties" not in own else _ANY
        fits = {key: self._fit(each, known.get(key, others), depth + 1) for key, each in value.items()}
        whole = all(fit.how == _FITS for fit in fits.values()) and all(
            key in value for key in _listed(own.get("required"))
        )
        return _Fit({key: fit.value for key, fit in fits.items()}, how if whole else min(how, _ALMOST))

    def _items(self, value: list[Any], own: dict[str, Any], how: int, depth: int) -> _Fit:
        first, rest = _listed(own.get("prefixItems")), own.get("items", _ANY)
        if isinstance(rest, list):
            # The older spelling of prefixItems.
            first, rest = rest, own.get("additionalItems", _ANY)
        fits = [
            self._fit(each, first[place] if place < len(first) else rest, depth + 1) for place, each in enumerate(value)
        ]
        whole = all(fit.how == _FITS for fit in fits)
        return _Fit([fit.value for fit in fits], how if whole else min(how, _ALMOST))


def schema_parts(schema: Any, root: Any) -> SchemaParts:
    """The parts of ``schema``, whose references point into ``root``."""
    if not isinstance(schema, dict):
        return SchemaParts(_ANY, [], [])
    every = [target_of(schema["$ref"], root)] if "$ref" in schema else []
    every += _listed(schema.get("allOf"))
    # "if", "not" and the rest decide about no type.
    alternatives = [choice for key in ("anyOf", "oneOf") if (choice := _listed(schema.get(key)))]
    one = alternatives.pop() if alternatives else []
    return SchemaParts(schema, [*every, *({"anyOf": choice} for choice in alternatives)], one)


def target_of(reference: Any, root: Any) -> Any:
    """The part of the schema ``root`` to which a ``$ref`` points; a schema that allows anything if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return _ANY
    target: Any = root
    for escaped in reference[1:].split("/")[1:]:
        step = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, dict) and step in target:
            target = target[step]
        else:
            return _ANY
    return target


def read_json(text: str) -> Any:
    """The JSON value in ``text``; None if there is none.

    Strings may contain raw line breaks, and numbers keep their spelling.
    """
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, strict=False, parse_float=_number, parse_constant=_no_number)
    return None


def json_text(value: Any) -> str:
    """``value`` as JSON text. It can be encoded as UTF-8 even if ``value`` contains halves of characters."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _number(written: str) -> _WrittenFloat:
    found = _WrittenFloat(written)
    if not math.isfinite(found):
        raise ValueError(f"{written} is too large")
    found.written = written
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _read(text: str) -> Any:
    """The value of ``text`` as JSON or Python; ``text`` itself if it is neither."""
    word = text.strip()
    if word in _WORDS:
        return _WORDS[word]
    if (found := read_json(word)) is not None:
        return found
    if word[:1] in ("{", "["):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return json.loads(json.dumps(ast.literal_eval(word), allow_nan=False))
    return text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def named_types(own: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a schema names itself."""
    named = type_names(own.get("type"))
    types = [named] if isinstance(named, str) else [each for each in _listed(named) if isinstance(each, str)]
    if not types:
        return None
    return frozenset([*types, "null"] if own.get("nullable") is True else types)


def type_names(named: Any) -> Any:
    """The ``type`` of a schema, with JSON schema's names."""
    if isinstance(named, list):
        return [type_names(each) for each in named]
    return _TYPE_NAMES.get(named, named) if isinstance(named, str) else named


def choices_of(own: Mapping[str, Any]) -> Sequence[Any] | None:
    """The only values that a schema allows."""
    if "const" in own:
        return [own["const"]]
    return own["enum"] if isinstance(own.get("enum"), list) else None


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _is_of(value: Any, types: frozenset[str]) -> bool:
    own = _type(value)
    return own in types or (own == "integer" and "number" in types)


def _as_type(value: Any, types: frozenset[str] | None) -> _Fit:
    if types is None or _is_of(value, types):
        return _Fit(value, _FITS)
    read = _read(_LEADING_ZEROS.sub("", value)) if isinstance(value, str) else value
    if not isinstance(read, str) and _is_of(read, types):
        return _Fit(read, _FITS)
    if isinstance(read, float) and read.is_integer() and "integer" in types:
        return _Fit(int(read), _FITS)
    if "string" in types and isinstance(value, (bool, int, float)):
        return _Fit(_spelled(value), _FITS)
    return _Fit(value, _WRONG)


def _spelled(value: float) -> str:
    """The original spelling of a number or truth value."""
    return value.written if isinstance(value, _WrittenFloat | WrittenInteger) else json.dumps(value)


def _chosen(value: Any, choices: Sequence[Any]) -> _Fit:
    """The member of ``choices`` that ``value`` means."""
    if any(_same(choice, value) for choice in choices):
        return _Fit(value, _FITS)
    if isinstance(value, (bool, int, float)):
        for spelled in (_spelled(value), str(value)):
            if spelled in choices:
                return _Fit(spelled, _FITS)
    for choice in choices:
        if isinstance(value, str) and not isinstance(choice, str) and _same(choice, _read(value)):
            return _Fit(choice, _FITS)
    of_their_type = any(_type(choice) == _type(value) for choice in choices)
    return _Fit(value, _ALMOST if of_their_type else _WRONG)


def _same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal. 1 and true are not; 1 and 1.0 are."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)
