"""Calls of tools, as the clients of the three protocols read them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import openai

from tests.app.serve.served import MODEL, Served

SCHEMA: Any = {
    "type": "object",
    "properties": {"z": {"enum": ["UTC"]}},
    "required": ["z"],
    "additionalProperties": False,
}
ARGUMENTS = {"z": "UTC"}
# At temperature 0 the untrained model would write spaces between the parts of the JSON to the end.
QUESTION: Any = [{"role": "user", "content": "When?"}]
FUNCTION: Any = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}


def test_a_chat_calls_a_tool_and_reads_its_result(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [FUNCTION], "max_tokens": 200, "temperature": 2.0}
    forced: Any = {**asked, "messages": QUESTION, "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**forced).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "clock" and call.id
    assert json.loads(call.function.arguments) == ARGUMENTS
    named: Any = {**forced, "tool_choice": {"type": "function", "function": {"name": "clock"}}}
    with client.chat.completions.stream(**named) as stream:  # the client puts the call together from the pieces
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls is not None
    assert json.loads(final.message.tool_calls[0].function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    answer = client.chat.completions.create(
        **{**asked, "max_tokens": 2}, messages=[*QUESTION, choice.message.model_dump(exclude_none=True), result]
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_a_tool_that_no_call_can_name_is_left_out(client: openai.OpenAI, server: Served) -> None:
    odd = {"type": "function", "function": {"name": "a\nclock", "parameters": SCHEMA}}
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": [odd, FUNCTION, FUNCTION], "max_tokens": 200}
    for _ in range(2):
        (choice,) = client.chat.completions.create(**asked, temperature=2.0, tool_choice="required").choices
        assert choice.message.tool_calls is not None
        assert [call.function.name for call in choice.message.tool_calls] == ["clock"]
    assert len([note for note in server.notes if "is not told of that one" in note]) == 1
    assert len([note for note in server.notes if "Two tools are called clock" in note]) == 1


LETTER: Any = {"type": "object", "properties": {"text": {"type": "string", "minLength": 40, "maxLength": 60}},
               "required": ["text"], "additionalProperties": False}  # fmt: skip


def test_a_long_call_streams_its_arguments(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    tool: Any = {"type": "function", "function": {"name": "write", "parameters": LETTER}}
    asked: Any = {"model": MODEL, "max_tokens": 1000, "temperature": 2.0}
    chunks = list(client.chat.completions.create(
        **asked, messages=QUESTION, tools=[tool], tool_choice="required", stream=True))  # fmt: skip
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1) and len(calls) > 1
    assert {call.index for call in calls} == {0}
    jsonschema.validate(json.loads("".join(call.function.arguments or "" for call in calls if call.function)), LETTER)

    offered: Any = {"tools": [{"name": "write", "input_schema": LETTER}], "tool_choice": {"type": "any"}}
    asked_of_claude: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 1000, **offered}
    with claude.messages.stream(**asked_of_claude, extra_body={"temperature": 2.0}) as stream:
        parts = [event.delta.partial_json for event in stream
                 if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]  # fmt: skip
        (block,) = stream.get_final_message().content
    assert len(parts) > 1 and block.type == "tool_use" and block.input == json.loads("".join(parts))

    function: Any = {"type": "function", "name": "write", "parameters": LETTER}
    events = list(client.responses.create(
        model=MODEL, input="When?", max_output_tokens=1000, temperature=2.0, tool_choice="required", tools=[function],
        stream=True))  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 1 and "".join(deltas) == done


def test_a_message_calls_a_tool(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL, "messages": QUESTION, "max_tokens": 200, "tool_choice": {"type": "tool", "name": "clock"},
        "tools": [{"name": "clock", "input_schema": SCHEMA}], "extra_body": {"temperature": 2.0},
    }  # fmt: skip
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (claude.messages.create(**asked), streamed):
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert block.type == "tool_use" and (block.name, block.input) == ("clock", ARGUMENTS) and block.id


def test_a_response_calls_a_tool(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL, "input": "When?", "max_output_tokens": 200, "temperature": 2.0, "tool_choice": "required",
        "tools": [{"type": "function", "name": "clock", "parameters": SCHEMA}],
    }  # fmt: skip
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 1
    for response in (client.responses.create(**asked), streamed):
        (item,) = response.output
        assert item.type == "function_call" and item.name == "clock" and item.call_id
        assert json.loads(item.arguments) == ARGUMENTS


def test_a_call_that_reaches_the_limit_is_cut(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    long = {**SCHEMA, "properties": {"z": {"enum": ["U" * 120]}}}
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 130}
    function = {"type": "function", "function": {"name": "clock", "parameters": long}}
    chat: Any = {**asked, "tools": [function], "tool_choice": "required", "temperature": 2.0}
    (choice,) = client.chat.completions.create(**chat).choices
    assert choice.finish_reason == "length" and not choice.message.content and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "clock"
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, stream=True)]
    streamed = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in streamed if piece.function) == call.function.arguments
    assert chunks[-1].finish_reason == "length" and not any(chunk.delta.content for chunk in chunks)
    asked |= {"tool_choice": {"type": "any"}, "tools": [{"name": "clock", "input_schema": long}]}
    message = claude.messages.create(**asked, extra_body={"temperature": 2.0})
    (block,) = message.content
    assert message.stop_reason == "max_tokens" and block.type == "tool_use" and block.input == {}


def test_tools_in_a_namespace_are_called_by_their_own_names(client: openai.OpenAI) -> None:
    inner = {"type": "function", "name": "clock", "parameters": SCHEMA}
    body: Any = {
        "model": MODEL, "max_output_tokens": 200, "temperature": 2.0, "tool_choice": "required",
        "tools": [{"type": "namespace", "name": "mcp__time", "tools": [inner, {"type": "web_search"}]}],
    }  # fmt: skip
    (item,) = client.responses.create(input="When?", **body).output
    assert item.type == "function_call" and item.name == "clock" and item.to_dict()["namespace"] == "mcp__time"
    said: Any = [
        {"role": "user", "content": "When?"},
        item.to_dict(),
        {"type": "function_call_output", "call_id": item.call_id, "output": "noon"},
    ]
    assert client.responses.create(input=said, **body).output[0].type == "function_call"


def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for count in (1, 2):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=100, response_format=form, n=count, logprobs=True, top_logprobs=1
        )
        assert [json.loads(choice.message.content or "") for choice in answer.choices] == [ARGUMENTS] * count
        assert all(choice.logprobs and choice.logprobs.content for choice in answer.choices)


def test_text_is_continued_without_a_template(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 3, "logprobs": 1}
    whole = client.completions.create(**asked)
    assert whole.usage is not None and whole.usage.prompt_tokens == 3
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.tokens or []) == 3
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text
