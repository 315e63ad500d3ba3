"""Arguments of calls are given out while they are written, and never taken back."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation.argument_stream import ArgumentStream
from engine.generation.tool_arguments import ArgumentTypes, json_text, read_json
from engine.generation.tool_calls import ToolCallParser
from engine.ipc.messages import Tool
from engine.models.text.tool_formats import tool_formats
from tests.engine.generation.written_calls import SAID
from tests.support.random_examples import examples

BY_NAME = {form.name: form for form in tool_formats()}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "note": {"type": ["string", "null"]},
        "n": {"type": "integer"},
        "mode": {"enum": ["1", "b"]},
        "list": {"type": "array", "items": {"type": "integer"}},
    },
}
TEXTS = st.text(st.sampled_from('a"\\/{}[],: \nä日😀\u2028<'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["5", "1", "true"]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.sampled_from(["text", "note", "n", "mode", "list", "other"]) | TEXTS, VALUES, max_size=5)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[left:right] for left, right in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.soak
@settings(max_examples=examples(80), deadline=None)
@given(OBJECTS, st.lists(st.integers(0, 10**6), max_size=30), st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_what_is_given_out_is_the_beginning_of_the_whole(
    arguments: dict[str, Any], cuts: list[int], ascii_only: bool, indent: int | None, raw: bool
) -> None:
    types = ArgumentTypes(json.dumps(SCHEMA))
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    if raw:
        # Models write line breaks within strings as they are.
        written = written.replace("\\n", "\n") if "\\\\n" not in written else written
    whole = json_text(types.typed(read_json(written)))
    stream = ArgumentStream(types)
    for piece in pieces(written, cuts):
        stream.push(piece)
        assert whole.startswith(stream.text)
        assert not stream.text or isinstance(json.loads(stream.closed()), dict)
    assert (stream.text, stream.whole) == (whole, True)


def test_a_text_is_given_out_letter_by_letter() -> None:
    stream = ArgumentStream(ArgumentTypes(json.dumps(SCHEMA)))
    grown = []
    for letter in '{"text":"a\\n\\ud83d\\ude00b","n":"5","mode":1}':
        stream.push(letter)
        grown.append(stream.text)
    ends = ["", '"text": "', "a", "\\n", "😀", "b", '"', ', "n": 5', ', "mode": "1"}']
    assert list(dict.fromkeys(grown)) == ["{" + "".join(ends[: count + 1]) for count in range(len(ends))]


@pytest.mark.parametrize(
    "written", ['{"n": 1,, "text": "a"}', '{"text": "\\x"}', "{'n': 1}", '{"n" 1}', '{"n": wrong}']
)
def test_what_is_broken_ends_what_is_certain(written: str) -> None:
    stream = ArgumentStream(ArgumentTypes(json.dumps(SCHEMA)))
    for letter in written:
        stream.push(letter)
    assert not stream.whole and stream.begun().startswith(stream.text)
    assert isinstance(json.loads(stream.closed()), dict)


GROWING = [name for name, form in BY_NAME.items() if form.shape in ("json", "named", "parts") and name != "apertus"]
TOOLS = [
    Tool(
        name="weather", parameters=json.dumps({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    ),
    Tool(name="clock"),
]


def followed(name: str, said: str) -> tuple[ToolCallParser, str, dict[str, list[str]]]:
    """The parser, the text, and what was given out of each call, by its id, letter by letter."""
    parser = ToolCallParser(BY_NAME[name], TOOLS)
    text, grown = "", {}
    for letter in said:
        text += parser.push(letter).text
        if parser.begun is not None:
            grown.setdefault(parser.begun.id, []).append(parser.begun.arguments.text)
    text += parser.flush().text
    return parser, text, grown


@pytest.mark.parametrize("name", GROWING)
def test_a_call_grows_in_every_format_that_writes_json(name: str) -> None:
    said = SAID[name].replace('"12"', '"Mexico City, in the long and winding streets"')
    parser, text, grown = followed(name, said)
    assert text == "" and [call.name for call in parser.calls] == ["weather", "clock"]
    first = parser.calls[0]
    assert first.id in grown and len(set(grown[first.id])) > 40
    for call in parser.calls:
        assert all(call.arguments.startswith(each) for each in grown.get(call.id, []))
    assert json.loads(first.arguments) == {"city": "Mexico City, in the long and winding streets", "days": 3}


TAGGED = ["qwen-coder", "seed", "glm", "hunyuan", "minimax", "muse", "minicpm"]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "city", ["Mexico City, in the long and winding streets", "a < b </para\n\n<p> </arg </b", "x\n"]
)
def test_a_text_grows_between_tags(name: str, city: str) -> None:
    said = SAID[name].replace("\n12\n", "12").replace("12", f"\n{city}\n" if BY_NAME[name].lines else city)
    parser, text, grown = followed(name, said)
    assert text == "" and [call.name for call in parser.calls] == ["weather", "clock"]
    first = parser.calls[0]
    assert first.arguments == json_text({"city": city, "days": 3})
    assert all(first.arguments.startswith(each) for each in grown[first.id])
    assert len(set(grown[first.id])) > len(city) - 20 and first.arguments[:-2] not in ("", grown[first.id][0])


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*GROWING, *TAGGED])
@pytest.mark.parametrize("cut", [True, False])
def test_a_call_that_was_begun_is_one_of_the_calls_wherever_it_ends(name: str, cut: bool) -> None:
    parser = ToolCallParser(BY_NAME[name], TOOLS)
    grown: dict[str, list[str]] = {}
    for letter in SAID[name]:
        ended = copy.deepcopy(parser)
        ended.flush(cut)
        calls = {call.id: call for call in ended.calls}
        assert set(grown) <= set(calls)
        assert all(calls[id_].arguments.startswith(each) for id_, texts in grown.items() for each in texts)
        parser.push(letter)
        if parser.begun is not None:
            grown.setdefault(parser.begun.id, []).append(parser.begun.arguments.text)
    assert grown


def test_a_broken_call_that_was_begun_is_given_out_as_it_was_written() -> None:
    said = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", days: 3}}</tool_call> That was it.'
    parser, text, grown = followed("hermes", said)
    (call,) = parser.calls
    assert call.arguments == '{"city": "Rome", days: 3}}' and text == "That was it."
    assert call.id in grown
    # A name that comes twice: what was said of the first one holds.
    parser, text, grown = followed(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1, "days": 2}}</tool_call>'
    )
    (call,) = parser.calls
    assert text == "" and all(call.arguments.startswith(each) for each in grown[call.id])
    assert json.loads(call.arguments) == {"days": 2}


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>{"name": "unknown", "arguments": {"city": "Rome"',
        '<tool_call>{"name": "weather", "arguments": "Rome"',
        '<tool_call>{"name": "weather", "city": {"arguments": {',
        '{"name": "weather", "arguments": {"city": "Rome"',
    ],
)
def test_what_may_be_no_call_is_not_announced(said: str) -> None:
    parser, text, grown = followed("hermes", said)
    assert text == said and not grown and not parser.calls


def test_a_schema_whose_arguments_decide_about_each_other_is_waited_for() -> None:
    schema = {"anyOf": [{"properties": {"city": {"type": "string"}}}, {"properties": {"city": {"type": "integer"}}}]}
    parser = ToolCallParser(BY_NAME["hermes"], [Tool(name="weather", parameters=json.dumps(schema))])
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": "R')
    assert parser.begun is None
