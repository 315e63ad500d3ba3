"""Calls of tools in the formats of the families in use, in pieces of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.generation import tool_calls
from engine.generation.call_shapes import CallReader
from engine.generation.reasoning import ReasoningParser
from engine.generation.tool_calls import ID_LETTERS, ToolCallParser
from engine.ipc.messages import Tool, ToolCall
from engine.models.text.reasoning_formats import formats
from engine.models.text.tool_formats import (
    ToolFormat,
    offered_tools,
    rendered_calls,
    rendered_tools,
    takes_name,
    tool_formats,
)
from tests.engine.generation.written_calls import SAID
from tests.support.random_examples import examples

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [Tool(name="weather", parameters=json.dumps(SCHEMA)), Tool(name="clock")]
BY_NAME = {form.name: form for form in tool_formats()}
ARGUMENTS = {"city": "12", "days": 3}
BOTH = [("weather", ARGUMENTS), ("clock", {})]


def parsed(form: ToolFormat, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser(form, TOOLS, most)
    found = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls = [call for part in found for call in part.calls]
    assert calls == parser.calls
    assert all(len(call.id) == ID_LETTERS and call.id.isalnum() for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return "".join(part.text for part in found), [(call.name, json.loads(call.arguments)) for call in calls]


def split(text: str, seed: int) -> list[str]:
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=seed % 40))
    return [text[left:right] for left, right in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", SAID)
def test_a_call_that_is_cut_is_given_out_as_far_as_it_was_written(name: str) -> None:
    form, said = BY_NAME[name], SAID[name]
    begun = said.index("12") + 1  # in the middle of the first argument
    parser = ToolCallParser(form, TOOLS)
    text = parser.push(f"Look: {said[:begun]}" if not form.bare else said[:begun]).text
    rest = parser.flush(cut=True)
    (call,) = rest.calls
    assert (text + rest.text).strip() in ("Look:", "") and call.name == "weather"
    whole = json.dumps(ARGUMENTS)
    assert whole.startswith(call.arguments) and call.arguments != whole
    as_json = form.shape in ("json", "named", "parts")
    assert call.arguments if as_json else not call.arguments.endswith("}")


def test_what_is_cut_before_a_tools_name_stays_text() -> None:
    for said in ('<tool_call>{"na', '<tool_call>{"name": "unkn', '<tool_call>{"name": "unknown", "arguments": {'):
        parser = ToolCallParser(BY_NAME["hermes"], TOOLS)
        text = parser.push(said).text + parser.flush(cut=True).text
        assert text == said and not parser.calls
    parser = ToolCallParser(BY_NAME["phi"], TOOLS)
    parser.push(SAID["phi"][: SAID["phi"].index("clock")])
    (call,) = parser.flush(cut=True).calls
    assert json.loads(call.arguments) == ARGUMENTS


def test_every_format_has_an_example() -> None:
    assert set(SAID) == set(BY_NAME)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SAID)
def test_calls_are_read_whatever_the_pieces(name: str) -> None:
    form, said = BY_NAME[name], SAID[name]
    for seed in range(examples(12)):
        assert parsed(form, split(said, seed)) == ("", BOTH)
    assert parsed(form, list(said)) == ("", BOTH)
    if not form.bare:
        assert parsed(form, split(f"I look.\n\n{said}", 7)) == ("I look.", BOTH)
    assert parsed(form, [said], most=1) == ("", BOTH[:1])


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from(sorted(BY_NAME)),
    st.lists(st.sampled_from([*"a {\n<", *{m for f in tool_formats() for m in f.all_marks}]), max_size=8).map("".join),
    st.integers(0, 10**6),
)
def test_what_is_no_call_stays_text(name: str, text: str, seed: int) -> None:
    found, calls = parsed(BY_NAME[name], split(text, seed))
    assert (found, calls) == parsed(BY_NAME[name], [text]) and calls == []
    hidden = BY_NAME[name].hidden
    if not any(mark in text for mark in hidden):
        assert found == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "weather", "arguments": [</tool_call> and so on',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
        "<tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_shown(text: str) -> None:
    assert parsed(BY_NAME["hermes"], split(text, 5)) == (text, [])


def test_an_argument_may_hold_the_end_mark() -> None:
    body = json.dumps({"name": "weather", "arguments": {"city": "a</tool_call>b"}})
    said = f"<tool_call>{body}</tool_call>"
    assert parsed(BY_NAME["hermes"], list(said)) == ("", [("weather", {"city": "a</tool_call>b"})])


@pytest.mark.sampled
@pytest.mark.parametrize("name", SAID)
def test_an_argument_may_hold_the_marks_of_its_format(name: str) -> None:
    form = BY_NAME[name]
    # What separates everything from everything else is a control token that no value can be written with.
    marks = {mark for mark in form.all_marks if mark.strip() and form.shape not in ("elements", "braces")}
    for mark in marks:
        value = f"a{mark}b"
        written = json.dumps(value)[1:-1] if form.shape in ("json", "named", "parts") else value
        said = SAID[name].replace("12", written)
        found = ("", [("weather", {"city": value, "days": 3}), ("clock", {})])
        assert parsed(form, [said]) == parsed(form, list(said)) == found


def test_an_answer_in_braces_that_is_no_call_is_text() -> None:
    assert parsed(BY_NAME["llama"], ['{"name": ', '"Ada"}']) == ('{"name": "Ada"}', [])
    assert parsed(BY_NAME["llama"], ['Here: {"name": "clock"}']) == ('Here: {"name": "clock"}', [])


def test_a_part_for_a_tool_is_a_call() -> None:
    form = next(each for each in formats() if each.headers)
    said = (
        "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather json<|message|>{"city": "12", "days": 3}'
    )
    parser = ReasoningParser(form, recipients=True)
    pieces = [*(parser.push(letter) for letter in said), parser.flush()]
    assert "".join(piece.thoughts for piece in pieces) == "I need it."
    assert parsed(BY_NAME["gpt-oss"], [piece.answer for piece in pieces]) == ("", BOTH[:1])


@pytest.mark.parametrize(
    ("tools", "forced", "said"),
    [
        ([Tool(name="a", parameters="{")], "", "of the tool a are no JSON"),
        ([Tool(name="a", parameters="[1]")], "", "no JSON schema"),
        ([Tool(name="a", parameters=" " * 70_000)], "", "at most 65,536"),
        ([Tool(name=f"t{number}") for number in range(257)], "", "at most 256"),
        ([Tool(name="a")], "b", "The tool b must be called, but is not among"),
        ([Tool(name="a\nb")], "a\nb", "must be called, but the model cannot call a tool by that name"),
    ],
)
def test_malformed_tools_are_refused(tools: list[Tool], forced: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        offered_tools(tools, forced, BY_NAME["hermes"])
    assert caught.value.kind == "bad-input"


def test_tools_that_cannot_be_named_are_left_out_one_by_one() -> None:
    names = ["a", "", "a", "b\x1bc", "x" * 200, "b"]
    offered, left_out = offered_tools([Tool(name=name) for name in names], "", BY_NAME["hermes"])
    assert [tool.name for tool in offered] == ["a", "b"]
    assert len(left_out) == 4 and left_out[1] == "Two tools are called a: the model is told of the first one only."
    assert left_out[0].startswith("The model cannot call a tool by the name '':")
    assert all(sentence.isprintable() for sentence in left_out)


NAMES = ["get weather", "fs/read", "wetter_für_übermorgen", "a:b", "über/alle berge", "it's", "x>y", "a{b", "f(x)"]


@pytest.mark.parametrize("form", tool_formats(), ids=lambda form: form.name)
def test_a_name_that_is_offered_can_be_called(form: ToolFormat) -> None:
    taken = [name for name in NAMES if takes_name(form, name)]
    assert taken or form.shape in ("python", "braces", "elements")
    for name in taken:
        # A tool whose name is the beginning of another's is told from it.
        tools = [Tool(name=name, parameters=json.dumps(SCHEMA)), Tool(name="clock"), Tool(name=name[:2])]
        parser = ToolCallParser(form, tools)
        text = parser.push(SAID[form.name].replace("weather", name)).text + parser.flush().text
        called = [(call.name, json.loads(call.arguments)) for call in parser.calls]
        assert (text, called) == ("", [(name, ARGUMENTS), ("clock", {})])


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("null", {}),
        ("[]", {}),
        ('["a"]', {"arguments": ["a"]}),
        ("word", {"arguments": "word"}),
        ("{", {}),
        ('{"a', {}),
        ('{"a":', {}),
        ('{"a": "x y', {"a": "x y"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": "x\\ud83d', {"a": "x"}),
        ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": }}', {"arguments": '{"a": }}'}),
        pytest.param("{" * 100_000, {"arguments": "{" * 100_000}, id="nested"),
        pytest.param('{"a": [' * 20_000, {"arguments": '{"a": [' * 20_000}, id="nested members"),
    ],
)
def test_a_history_with_any_arguments_is_rendered(written: str, wanted: dict[str, Any]) -> None:
    (found,) = rendered_calls([ToolCall(id="c", name="f", arguments=written)])
    assert found["function"]["arguments"] == wanted


def test_templates_take_what_openai_takes() -> None:
    assert rendered_tools(TOOLS[1:]) == [
        {
            "type": "function",
            "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    parser = ToolCallParser(BY_NAME["hermes"], TOOLS)
    calls = parser.push(SAID["hermes"]).calls
    found = rendered_calls(calls)
    assert [each["function"] for each in found] == [{"name": name, "arguments": given} for name, given in BOTH]


def test_an_end_mark_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def counting(self: CallReader, body: str, last: bool = False) -> None:
        tried.append(body)

    monkeypatch.setattr(CallReader, "read", counting)
    form = next(each for each in tool_formats() if each.shape == "json" and each.begin and each.end)
    parser = ToolCallParser(form, [Tool(name="f")])
    written = form.begin + "{" + form.end * 50
    said = "".join(parser.push(letter).text for letter in written) + parser.flush().text
    assert len(tried) == 51 and said == written
    # A model that repeats the mark for ever is not read for ever.
    tried.clear()
    monkeypatch.setattr(tool_calls, "MOST_READ", 300)
    parser = ToolCallParser(form, [Tool(name="f")])
    assert parser.push(written).text + parser.flush().text == written
    assert 2 < len(tried) < 20 and sum(map(len, tried[:-1])) <= 300
