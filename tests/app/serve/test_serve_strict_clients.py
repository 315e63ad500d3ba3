"""Clients that refuse an answer that lacks a field: OpenAI's and Anthropic's own, told to check what they get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.app.serve.served import MODEL, Served

QUESTION: Any = [{"role": "user", "content": "ab"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"z": {"enum": ["UTC"]}},
    "required": ["z"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "clock", "parameters": SCHEMA, "strict": False}


@pytest.fixture
def strict(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture
def strict_claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_chats_completions_and_models_have_every_field(strict: openai.OpenAI) -> None:
    function: Any = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 100, "temperature": 2.0}
    called: Any = {**asked, "tools": [function], "tool_choice": "required"}
    for kind in ({**asked, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}, called):
        assert strict.chat.completions.create(**kind).usage
        chunks = list(strict.chat.completions.create(**kind, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage
    assert strict.completions.create(model=MODEL, prompt="ab", max_tokens=2, logprobs=1).usage
    assert strict.models.list().data[0].owned_by == "privatellm"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"text": {"format": {"type": "json_schema", "name": "when", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 3},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "clock"}},
    ],
    ids=["text", "schema", "object", "required", "named"],
)
def test_responses_have_every_field_and_repeat_what_was_asked(strict: openai.OpenAI, more: Any) -> None:
    asked: Any = {"model": MODEL, "input": "ab", "max_output_tokens": 100, "temperature": 2.0, **more}
    whole = strict.responses.create(**asked)
    *_, last = strict.responses.create(**asked, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    for response in (whole, last.response):
        assert response.usage is not None and response.usage.input_tokens_details.cache_write_tokens == 0
        said = json.loads(response.to_json())
        assert [tool["parameters"] for tool in said["tools"]] == [tool["parameters"] for tool in more.get("tools", [])]
        assert said["tool_choice"] == more.get("tool_choice", "auto")
        form = more.get("text", {}).get("format", {"type": "text"})
        assert said["text"]["format"].items() >= form.items()


def test_messages_and_models_have_every_field(strict_claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 100}
    tool: Any = {"tools": [{"name": "clock", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
    for more in ({"max_tokens": 2}, {**tool, "extra_body": {"temperature": 2.0}}):
        assert strict_claude.messages.create(**{**asked, **more}).usage
        with strict_claude.messages.stream(**{**asked, **more}) as stream:
            assert stream.get_final_message().stop_reason
    assert strict_claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert [model.lifecycle for model in strict_claude.models.list()] == ["active"] * 2
