"""``/v1/completions`` and ``/v1/responses`` as OpenAI's own client uses them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from app.serve.application import decoded
from app.serve.asking import Defaults
from app.serve.openai_chat import ChatRequest
from app.serve.openai_responses import ResponsesRequest
from engine.ipc.messages import Constraint, Message, Tool, ToolCall
from tests.app.serve.served import MODEL


def test_a_response_and_its_events_say_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "instructions": "x", "input": "ab", "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == whole.output_text == last.response.output_text != ""
    assert whole.status == last.response.status == "incomplete"
    assert whole.usage is not None and whole.usage.output_tokens == 8
    with client.responses.stream(**asked) as stream:  # the client puts the answer together from the events
        assert [event.snapshot for event in stream if event.type == "response.output_text.delta"][-1] == text


def test_a_response_to_a_conversation_with_calls_of_tools() -> None:
    body = b"""{"model": "", "instructions": "be brief", "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "and kind"}]},
        {"type": "message", "role": "user", "content": "look"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "ls", "arguments": "{\\"a\\":1}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]}],
        "tools": [{"type": "function", "name": "ls", "parameters": {"type": "object"}}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "ls"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}}"""
    request = decoded(body, ResponsesRequest)
    asked = request.generate(Defaults())
    assert asked.messages == [
        Message("system", "be brief\n\nand kind"),
        Message("user", "look"),
        Message(
            "assistant",
            "",
            tool_calls=[
                ToolCall(id="c1", name="ls", arguments="{}"),
                ToolCall(id="c2", name="ls", arguments='{"a":1}'),
            ],
        ),
        Message("tool", "x", tool_call_id="c1"),
    ]
    assert asked.tools == [Tool(name="ls", parameters='{"type":"object"}')] and asked.forced_tool == "ls"
    assert asked.constraint == Constraint(kind="schema", text='{"type":"object"}')
    assert request.foreign_tools == ["web_search"]


def test_a_chat_with_tools_formats_and_penalties() -> None:
    body = b"""{"messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": null,
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "ls", "description": "lists"}}],
        "tool_choice": "required", "parallel_tool_calls": false, "n": 2, "logprobs": true, "top_logprobs": 3,
        "presence_penalty": 0.5, "logit_bias": {"17": -100}, "response_format": {"type": "json_object"},
        "reasoning_effort": "none"}"""
    asked = decoded(body, ChatRequest).generate(Defaults())
    assert asked.messages is not None and asked.messages[1:] == [
        Message("assistant", "", tool_calls=[ToolCall(id="c1", name="ls", arguments="{}")]),
        Message("tool", "x", tool_call_id="c1"),
    ]
    assert asked.tools == [Tool(name="ls", description="lists")]
    assert (asked.tool_choice, asked.parallel_tool_calls, asked.samples, asked.logprobs) == ("required", False, 2, 3)
    assert asked.sampling.presence_penalty == 0.5 and asked.sampling.logit_bias == {17: -100.0}
    assert asked.constraint == Constraint(kind="json") and asked.thinking is False


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"previous_response_id": "resp_1"}, "Nothing is kept"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
        ({"input": []}, "no message"),
    ],
)
def test_what_a_response_cannot_have_is_said(client: openai.OpenAI, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.post("/responses", body={"model": MODEL, "input": "ab", **wrong}, cast_to=object)


def test_completions_of_token_ids(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4}
    whole = client.completions.create(**asked)
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 8)
    for wrong in ({"suffix": "x"}, {"echo": True}, {"best_of": 3}, {"prompt": [1, "x"]}, {"prompt": [999]}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**asked, **wrong})


def test_a_completion_and_its_stream_have_the_same_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "prompt": ["abc", "x"],
        "max_tokens": 24,
        "logprobs": 1,
        "n": 2,
        "temperature": 1,
        "seed": 5,
    }
    whole = client.completions.create(**asked)
    tokens: dict[int, list[str]] = {}
    offsets: dict[int, list[int]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            found = choice.logprobs
            tokens.setdefault(choice.index, []).extend((found and found.tokens) or [])
            offsets.setdefault(choice.index, []).extend((found and found.text_offset) or [])
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert tokens[choice.index] == choice.logprobs.tokens and offsets[choice.index] == choice.logprobs.text_offset
    assert len(tokens) == 4
