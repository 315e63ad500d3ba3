"""Fields as ordinary clients fill them in, whatever OpenAI's own documents say."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from app.serve.application import decoded
from app.serve.asking import Defaults
from app.serve.openai_chat import ChatRequest
from app.serve.openai_completions import CompletionRequest
from app.serve.openai_responses import ResponsesRequest
from app.serve.replies import Refused
from engine.ipc.messages import Constraint, Generate, Sampling
from tests.app.serve.served import MODEL

QUESTION: Any = [{"role": "user", "content": "ab"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"z": {"enum": ["UTC"]}},
    "required": ["z"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("ls", "rm", "cp")]
MINE = Defaults(Sampling(seed=7, top_k=40), max_tokens=50, effort="low")


def asked(**fields: Any) -> Generate:
    return decoded(json.dumps({"messages": QUESTION, **fields}).encode(), ChatRequest).generate(MINE)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_as_other_servers_have_them(name: str) -> None:
    assert [asked(**{name: limit}).max_tokens for limit in (None, -1, 0, 9)] == [50, None, 0, 9]
    with pytest.raises(Refused):
        asked(**{name: -2})
    body = {"input": "x", "max_output_tokens": -1}
    assert decoded(json.dumps(body).encode(), ResponsesRequest).generate(MINE).max_tokens is None
    (one,) = decoded(b'{"prompt": "x", "max_tokens": -1}', CompletionRequest).generates(MINE)
    assert one.max_tokens is None


def test_sampling_that_says_all_or_any() -> None:
    assert asked(top_k=-1).sampling.top_k == 0 and asked(top_k=None).sampling.top_k == 40
    assert asked(seed=-1).sampling.seed == 7 and asked(seed=None).sampling.seed == 7
    assert asked(seed=-5).sampling.seed == 2**64 - 5 and asked(seed=2**64 - 1).sampling.seed == 2**64 - 1
    assert asked(seed=2**64 + 3).sampling.seed == 3


@pytest.mark.parametrize("stop", [None, "", [], [""]])
def test_stops_that_say_nothing(stop: Any) -> None:
    assert asked(stop=stop).stop == []
    assert asked(stop=["", "x"]).stop == ["x"]


def test_efforts_of_other_servers() -> None:
    efforts = {effort: asked(reasoning_effort=effort).effort for effort in (None, "default", "max", "minimal")}
    assert efforts == {None: "low", "default": "low", "max": "high", "minimal": "low"}


def test_switches_that_are_numbers() -> None:
    for value, expected in ((0, False), (1, True), (None, False), (True, True)):
        assert (
            bool(decoded(json.dumps({"messages": QUESTION, "stream": value}).encode(), ChatRequest).stream) is expected
        )


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize(
    ("choice", "names", "word", "forced"),
    [
        (None, ["ls", "rm", "cp"], "auto", ""),
        ("any", ["ls", "rm", "cp"], "required", ""),
        ({"type": "auto"}, ["ls", "rm", "cp"], "auto", ""),
        ({"type": "any"}, ["ls", "rm", "cp"], "required", ""),
        ({"type": "function", "function": {"name": "rm"}}, ["ls", "rm", "cp"], "required", "rm"),
        ({"type": "function", "name": "rm"}, ["ls", "rm", "cp"], "required", "rm"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "cp"}}]},
            },
            ["cp"], "required", "",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "rm"}, {"name": "ls"}]},
            ["rm", "ls"], "auto", "",
        ),
    ],
)  # fmt: skip
def test_choices_of_tools(responses: bool, choice: Any, names: list[str], word: str, forced: str) -> None:
    if responses:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
        body = json.dumps({"input": "x", "tools": tools, "tool_choice": choice}).encode()
        found = decoded(body, ResponsesRequest).generate(MINE)
    else:
        found = asked(tools=TOOLS, tool_choice=choice)
    assert ([tool.name for tool in found.tools], found.tool_choice, found.forced_tool) == (names, word, forced)


def test_tools_that_are_not_there_cannot_be_allowed() -> None:
    with pytest.raises(Refused, match="no tool 'mv'"):
        asked(tools=TOOLS, tool_choice={"type": "allowed_tools", "tools": [{"name": "mv"}]})


def test_tools_that_are_no_functions_are_left_out() -> None:
    request = decoded(
        json.dumps({"messages": QUESTION, "tools": [*TOOLS, {"type": "custom", "custom": {"name": "x"}}]}).encode(),
        ChatRequest,
    )
    assert len(request.generate(MINE).tools) == 3 and request.foreign_tools == ["custom"]


def test_an_object_with_a_schema_has_its_form(client: openai.OpenAI) -> None:
    assert asked(response_format={"type": "json_object"}).constraint == Constraint(kind="json")
    assert asked(response_format={"type": "json_object", "schema": {}}).constraint == Constraint(kind="json")
    form: Any = {"type": "json_object", "schema": SCHEMA}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=100, response_format=form)
    assert json.loads(answer.choices[0].message.content or "") == {"z": "UTC"}
    completion = client.completions.create(
        model=MODEL, prompt="ab", max_tokens=100, extra_body={"response_format": form}
    )
    assert json.loads(completion.choices[0].text) == {"z": "UTC"}


@pytest.mark.parametrize("name", ["json_schema", "grammar", "structured_outputs", "guided_json", "guided_regex"])
def test_other_spellings_of_a_form_are_refused_by_name(name: str) -> None:
    for empty in (None, "", {}):
        assert asked(**{name: empty}).constraint is None
    with pytest.raises(Refused, match=f"leave {name} out"):
        asked(**{name: {"type": "object"}})
    with pytest.raises(Refused, match=f"leave {name} out"):
        decoded(json.dumps({"prompt": "x", name: "x"}).encode(), CompletionRequest).generates(MINE)


def test_a_prompt_is_only_read_where_no_token_is_wanted(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    text = "something that nobody has said before"
    messages: Any = [{"role": "user", "content": text}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=0)
    assert whole.choices[0].message.content == "" and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 0
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, max_tokens=0, stream=True):
        assert not chunk.choices[0].delta.content
    message = claude.messages.create(model=MODEL, messages=messages, max_tokens=0)
    assert message.content == [] and message.usage.output_tokens == 0
    assert message.usage.cache_read_input_tokens == whole.usage.prompt_tokens
