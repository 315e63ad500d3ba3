"""Arguments of calls get the types of the tool's schema."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.generation.tool_arguments import ArgumentTypes, json_text, read_json
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import Tool
from engine.models.text.tool_formats import tool_formats
from tests.support.random_examples import examples

NULLABLE = {"type": ["string", "null"]}
EITHER = {"anyOf": [{"type": "string"}, {"type": "null"}]}
INTEGER = {"type": "integer"}
ENTRY = {"type": "object", "properties": {"n": INTEGER, "s": {"type": "string"}}, "required": ["n"]}


def types_of(schema: Any, **definitions: Any) -> ArgumentTypes:
    return ArgumentTypes(json.dumps({"type": "object", "properties": {"x": schema}, "$defs": definitions}))


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string"}, "4", "4"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}\n', '{"a": 1}\n'),
        (NULLABLE, "4", "4"),
        (NULLABLE, "null", None),
        (NULLABLE, "None", None),
        (NULLABLE, " null", " null"),
        ({"type": "string", "nullable": True}, "null", None),
        (EITHER, "true", "true"),
        (EITHER, "null", None),
        ({"anyOf": [{"type": "string"}, INTEGER]}, "4", 4),
        ({"anyOf": [{"type": "string"}, INTEGER]}, "4.5", "4.5"),
        ({"anyOf": [{"type": "string"}, INTEGER]}, "2 dollars", "2 dollars"),
        ({"type": ["string", "integer"], "enum": ["4", 5]}, "4", "4"),
        ({"type": ["string", "integer"], "enum": ["4", 5]}, "5", 5),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "object"]}, "{'a': None}", {"a": None}),
        ({"type": ["string", "object"]}, "{not valid json", "{not valid json"),
        ({"type": ["string", "object"]}, "[1]", "[1]"),
        ({"oneOf": [{"type": "string"}, ENTRY]}, '{"n": "1"}', {"n": 1}),
        ({"oneOf": [{"type": "string"}, ENTRY]}, '{"s": "a"}', '{"s": "a"}'),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": "str"}, "4", "4"),
        ({"type": "float"}, "3.5", 3.5),
        ({"type": "int"}, "4.0", 4),
        ({"type": "bool"}, "False", False),
        ({"type": "dict"}, "{'a': 1}", {"a": 1}),
        ({"type": "list"}, "[1]", [1]),
        ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "4", 4),
        ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "auto", "auto"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "perhaps", "perhaps"),
        (INTEGER, "5.0", 5),
        (INTEGER, " 5\n", 5),
        (INTEGER, "5.5", "5.5"),
        (INTEGER, "true", "true"),
        (INTEGER, "-007", -7),
        (INTEGER, "00", 0),
        (INTEGER, "0x7", "0x7"),
        ({"type": "number"}, "07.50", 7.5),
        ({"type": ["string", "integer"]}, "07", "07"),
        ({"type": "boolean"}, "01", "01"),
        ({}, "07", "07"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"enum": ["1"]}, "1", "1"),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "string", "enum": ["x y"]}, "x y\n", "x y"),
        ({"enum": ["null", None]}, "null", "null"),
        ({"enum": ["a", None]}, "null", None),
        ({"const": True}, "True", True),
        ({"const": "True"}, "True", "True"),
        ({"type": "object"}, "{'a': True, 'b': None, 'c': (1, 'x')}", {"a": True, "b": None, "c": [1, "x"]}),
        ({"type": "object"}, "{'a': {1}}", "{'a': {1}}"),
        ({"type": "array", "items": INTEGER}, '["1", 2.0]', [1, 2]),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"$ref": "#/$defs/Entry"}, '{"n": "3", "s": 4}', {"n": 3, "s": "4"}),
        ({"allOf": [{"$ref": "#/$defs/Entry"}]}, '{"n": 3.0}', {"n": 3}),
        ({"oneOf": [INTEGER, {"$ref": "#/$defs/Entry"}]}, "{'n': 1}", {"n": 1}),
        ({"$ref": "#/$defs/Absent"}, "7", 7),
        ({"$ref": "#/properties/x"}, "7", 7),
        ({}, "7", 7),
        ({}, "True", True),
        ({}, "word", "word"),
        ({}, '"word"', '"word"'),
        (True, "[1]", [1]),
        ({"type": "strange"}, "7", "7"),
    ],
)
def test_text_between_tags_gets_the_type_of_its_schema(schema: Any, text: str, wanted: Any) -> None:
    found = types_of(schema, Entry=ENTRY).from_text("x", text)
    assert found == wanted and type(found) in (type(wanted), *type(wanted).__subclasses__())


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [
        (INTEGER, "5", 5),
        (INTEGER, 5.0, 5),
        (INTEGER, "five", "five"),
        (INTEGER, None, None),
        ({"type": "boolean"}, "False", False),
        ({"type": "string"}, 4, "4"),
        ({"type": "string"}, True, "true"),
        ({"type": "string"}, {"a": 1}, {"a": 1}),
        (NULLABLE, 4, "4"),
        (NULLABLE, "null", "null"),
        (EITHER, True, "true"),
        (EITHER, None, None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"enum": ["1"]}, 1, "1"),
        ({"type": "string", "enum": ["1"]}, 1, "1"),
        ({"enum": [1]}, "1", 1),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"anyOf": [INTEGER, {"type": "string"}]}, "5", "5"),
        ({"type": "array", "items": ENTRY}, '[{"n": "1"}]', [{"n": 1}]),
        ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}]}, ["1", 1, "1"], [1, "1", "1"]),
        ({"type": "object", "additionalProperties": INTEGER}, {"a": "1"}, {"a": 1}),
        # What the first alternative lacks the second has.
        ({"anyOf": [{**ENTRY, "required": ["s"]}, ENTRY]}, {"n": "1"}, {"n": 1}),
        # None of them is satisfied, but one is nearly.
        ({"anyOf": [{**ENTRY, "required": ["s"]}, {"type": "null"}]}, {"n": "1"}, {"n": 1}),
    ],
)
def test_values_in_json_get_the_type_of_their_schema(schema: Any, value: Any, wanted: Any) -> None:
    found = types_of(schema).typed({"x": value, "other": "5"})
    assert json_text(found) == json_text({"x": wanted, "other": "5"})


def test_a_number_where_a_text_is_wanted_is_the_text_that_was_written() -> None:
    assert types_of({"type": "string"}).typed(read_json('{"x": 3.10}')) == {"x": "3.10"}
    assert types_of({"enum": ["3.1", "3.10"]}).typed(read_json('{"x": 3.10}')) == {"x": "3.10"}


def test_half_a_character_can_be_sent() -> None:
    assert json_text({"a": "\ud800", "b": "é"}).encode() == rb'{"a": "\ud800", "b": "\u00e9"}'
    assert json_text({"b": "é"}) == '{"b": "é"}'


def test_a_schema_that_never_ends_is_looked_at_for_a_limited_time() -> None:
    both = {f"D{level}": {"anyOf": [{"$ref": f"#/$defs/D{level + 1}"}] * 2} for level in range(90)}
    types = types_of({"$ref": "#/$defs/D0"}, **both)
    assert types.from_text("x", "4") == 4
    assert types.typed({"x": "4"}) == {"x": "4"}
    round_and_round = types_of({"$ref": "#/$defs/A"}, A={"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]})
    assert round_and_round.from_text("x", "4") == 4


# --- any schema and any value that satisfies it ---------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.sampled_from(["", "4", "true", "False", "null", "None", "1.0", "[1]", "{'a': 1}", " x\n", "ä<"]) | st.text(
    max_size=5
)
KEYS = st.sampled_from(["a", "b", "c"])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> tuple[dict[str, Any], Any]:
    """A schema, and a value that satisfies it."""
    kind = draw(
        st.sampled_from(
            ["scalar", "types", "enum", "const", "nullable"]
            + (["object", "array", "anyOf", "oneOf", "allOf", "$ref", "tuple"] if depth else [])
        )
    )
    match kind:
        case "scalar" | "types":
            by_type: dict[str, st.SearchStrategy[Any]] = {
                "string": TEXTS,
                "integer": st.integers(-99, 99) | st.integers(-9, 9).map(float),
                "number": st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False),
                "boolean": st.booleans(),
                "null": st.none(),
            }
            names = draw(st.lists(st.sampled_from(sorted(by_type)), min_size=1, max_size=3, unique=True))
            value = draw(by_type[names[0]])
            named = names if kind == "types" else names[0]
            return {"type": draw(st.permutations(named)) if isinstance(named, list) else named}, value
        case "enum":
            choices = draw(st.lists(SCALARS | TEXTS, min_size=1, max_size=4))
            return {"enum": choices}, draw(st.sampled_from(choices))
        case "const":
            value = draw(SCALARS | TEXTS)
            return {"const": value}, value
        case "nullable":
            return {"type": ["integer", "null"], "description": "x"}, draw(st.none() | st.integers())
        case "object":
            members = draw(st.dictionaries(KEYS, schemas(depth=depth - 1), max_size=3))
            schema = {"type": "object", "properties": {key: part for key, (part, _) in members.items()}}
            if draw(st.booleans()):
                schema |= {"required": sorted(members), "additionalProperties": False}
            return schema, {key: value for key, (_, value) in members.items()}
        case "array":
            part, value = draw(schemas(depth=depth - 1))
            return {"type": "array", "items": part}, [value] * draw(st.integers(0, 2))
        case "tuple":
            parts = draw(st.lists(schemas(depth=depth - 1), max_size=2))
            return {"type": "array", "prefixItems": [part for part, _ in parts]}, [value for _, value in parts]
        case "anyOf" | "oneOf":
            parts = draw(st.lists(schemas(depth=depth - 1), min_size=1, max_size=3))
            return {kind: [part for part, _ in parts]}, draw(st.sampled_from(parts))[1]
        case "allOf":
            part, value = draw(schemas(depth=depth - 1))
            return {"allOf": [part, {"title": "x"}]}, value
        case _:
            part, value = draw(schemas(depth=depth - 1))
            return {"$ref": "#/$defs/P", "$defs": {"P": part}}, value


def hoisted(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` with all its definitions in one table, as pydantic writes them."""
    if isinstance(schema, list):
        return [hoisted(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$defs" in schema:
        name = f"P{len(definitions)}"
        definitions[name] = None
        definitions[name] = hoisted(schema["$defs"]["P"], definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {key: hoisted(each, definitions) for key, each in schema.items()}


def same(left: Any, right: Any) -> bool:
    """Equal, with truth values apart from numbers."""
    return json_text(_floats(left)) == json_text(_floats(right))


def _floats(value: Any) -> Any:
    match value:
        case bool() | str() | None:
            return value
        case int() | float():
            return float(value) if math.isfinite(value) else value
        case list():
            return [_floats(each) for each in value]
        case _:
            return {key: _floats(each) for key, each in value.items()}


@settings(max_examples=examples(80), deadline=None)
@given(schemas())
def test_a_valid_value_that_a_template_writes_is_read_as_itself(example: tuple[dict[str, Any], Any]) -> None:
    part, value = example
    definitions: dict[str, Any] = {}
    root = {"type": "object", "properties": {"x": hoisted(part, definitions)}, "$defs": definitions}
    with_any_of = json.loads(json.dumps(root).replace('"oneOf"', '"anyOf"'))
    assume(not isinstance(value, float) or math.isfinite(value))
    types = ArgumentTypes(json.dumps(root))
    checked = jsonschema.Draft202012Validator(with_any_of)
    assert checked.is_valid({"x": value})

    assert same(types.typed(read_json(json.dumps({"x": value}))), {"x": value})
    for written in (json.dumps(value), str(value)) if not isinstance(value, str) else (value,):
        found = types.from_text("x", written)
        assert checked.is_valid({"x": found})
        if not same(found, value):
            # Where the text itself is valid, and what it looks like is, too, it does not say which one was meant.
            assert found == written or same(found, ArgumentTypes("").from_text("x", written))


@settings(max_examples=examples(60), deadline=None)
@given(schemas(), st.recursive(SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=2), max_leaves=4))
def test_what_fits_no_type_stays_as_it_was_written(example: tuple[dict[str, Any], Any], value: Any) -> None:
    part, _ = example
    definitions: dict[str, Any] = {}
    root = {"type": "object", "properties": {"x": hoisted(part, definitions)}, "$defs": definitions}
    found = ArgumentTypes(json.dumps(root)).typed({"x": value})["x"]
    if not same(found, value):
        assert isinstance(found, list) or jsonschema.Draft202012Validator(
            json.loads(json.dumps(root).replace('"oneOf"', '"anyOf"'))
        ).is_valid({"x": found})


@pytest.mark.parametrize("form", tool_formats(), ids=lambda form: form.name)
def test_calls_in_every_format_have_the_types_of_the_schema(form: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "note": NULLABLE,
            "tag": EITHER,
            "n": INTEGER,
            "all": {"type": "boolean"},
            "e": {"enum": ["1"]},
            "o": ENTRY,
        },
    }
    wanted = {"note": "4", "tag": "true", "n": 5, "all": False, "e": "1", "o": {"n": 1}}
    given = {"note": 4, "tag": True, "n": 5.0, "all": "False", "e": 1, "o": {"n": "1"}}
    written = json.dumps(given)
    parser = ToolCallParser(form, [Tool(name="f", parameters=json.dumps(schema))])
    match form.shape:
        case "json":
            body = json.dumps({"name": "f", "arguments": given})
        case "named" | "parts":
            separator = "<|message|>" if form.shape == "parts" else form.separator
            body = f"f{separator}{written}"
        case "python":
            body = f"[f({', '.join(f'{key}={value!r}' for key, value in given.items())})]"
        case "braces":
            body = f"call:f{written}"
        case "elements":
            mark = form.separator
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
            flat = "".join(f"{mark}<{key}>{text}{mark}</{key}>" for key, text in texts.items() if key != "o")
            body = f'f">{flat}{mark}<o>{mark}<n>1{mark}</n>{mark}</o>'
        case _:
            key_begin, key_end, value_begin, value_end = form.tags
            spelled = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
            pairs = "".join(f"{key_begin}{key}{key_end}{value_begin}{spelled[key]}{value_end}" for key in spelled)
            body = f"{(form.prefixes or ('',))[0]}f{form.name_end}{pairs}{form.last}"
    begin = "<|recipient|>" if form.shape == "parts" else form.begin
    parser.push(f"{begin}{body}{form.end}")
    parser.flush()
    (call,) = parser.calls
    assert call.arguments == json.dumps(wanted)
