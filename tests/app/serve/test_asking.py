"""Conversations that other programs made, in the three protocols: taken as they are."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from app.serve.anthropic_messages import MessagesRequest
from app.serve.application import decoded
from app.serve.asking import MOST_ITEMS, Defaults
from app.serve.openai_chat import ChatRequest
from app.serve.openai_responses import ResponsesRequest
from app.serve.replies import Refused
from engine.ipc.messages import Message, ToolCall
from tests.app.serve.served import MODEL

PICTURE = "[a picture that this model is not shown]"


def chat(*messages: dict[str, Any]) -> list[Message]:
    return decoded(json.dumps({"messages": messages}).encode(), ChatRequest).generate(Defaults()).messages or []


def turns(*messages: dict[str, Any]) -> list[Message]:
    body = {"messages": messages, "max_tokens": 1}
    return decoded(json.dumps(body).encode(), MessagesRequest).generate(Defaults()).messages or []


def items(*given: dict[str, Any]) -> list[Message]:
    return decoded(json.dumps({"input": given}).encode(), ResponsesRequest).generate(Defaults()).messages or []


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = ToolCall(id="c1", name="ls", arguments='{"a":1}')
LOOP = [
    Message("user", "look"),
    Message("assistant", "", "hm", tool_calls=[CALL]),
    Message("tool", "x", tool_call_id="c1"),
]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_thoughts_of_a_running_loop_go_back_in_a_chat(name: str) -> None:
    function = {"name": "ls", "arguments": '{"a":1}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    assert chat(user("look"), assistant(None, tool_calls=calls, **{name: "hm"}), result) == LOOP


def test_the_thoughts_of_a_running_loop_go_back_in_messages() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "tool_use", "id": "c1", "name": "ls", "input": {"a": 1}},
    ]
    found = turns(user("look"), assistant(blocks), user([{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]))
    assert [message.reasoning for message in found] == ["", "hm", ""]
    assert [message.content for message in found] == ["look", "", "x"]


@pytest.mark.parametrize(
    "thoughts",
    [
        {"content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
    ],
)
def test_the_thoughts_of_a_running_loop_go_back_in_responses(thoughts: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a":1}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    reasoning = {"type": "reasoning", **thoughts}
    assert items(user("look"), reasoning, call, result) == LOOP
    # The next step of the loop has thoughts of its own, and a text has those before it.
    found = items(user("look"), reasoning, call, reasoning, call, reasoning, assistant("So."), user("and?"))
    assert [(message.reasoning, len(message.tool_calls)) for message in found] == [
        ("", 0), ("hm", 1), ("hm", 1), ("hm", 0), ("", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"id": None, "function": {"name": "ls", "arguments": "{}"}}, ToolCall(id="", name="ls", arguments="{}")),
        ({"function": {"name": "ls", "arguments": {"a": 1}}}, ToolCall(id="", name="ls", arguments='{"a":1}')),
        ({"id": "c1", "function": {"name": "ls", "arguments": None}}, ToolCall(id="c1", name="ls", arguments="")),
        (
            {"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls"}},
            ToolCall(id="c1", name="sh", arguments='{"input":"ls"}'),
        ),
    ],
)
def test_calls_of_other_servers_are_taken(call: dict[str, Any], expected: ToolCall) -> None:
    found = chat(user("look"), assistant(None, tool_calls=[call]), {"role": "tool", "content": None})
    assert found[1].tool_calls == [expected] and found[2] == Message("tool", "")


def test_the_older_form_of_calls_is_taken() -> None:
    called = assistant(None, function_call={"name": "ls", "arguments": "{}"})
    found = chat(user("look"), called, {"role": "function", "name": "ls", "content": "x"})
    assert found[1:] == [
        Message("assistant", "", tool_calls=[ToolCall(id="", name="ls", arguments="{}")]),
        Message("tool", "x"),
    ]


def test_a_picture_is_refused_in_the_last_question_only() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    text = {"type": "text", "text": "what?"}
    for asked in ([user([picture, text])], [user("x"), assistant("y"), user([text, picture]), assistant("z")]):
        with pytest.raises(Refused, match="reads text only"):
            chat(*asked)
    found = chat(user([text, picture]), assistant("?"), user(["and", " now?"]))
    assert [message.content for message in found] == [f"what?\n{PICTURE}", "?", "and\n now?"]
    tool = {"role": "tool", "tool_call_id": "c1", "content": [picture]}
    calls = [{"id": "c1", "function": {"name": "ls"}}]
    found = chat(user("look"), assistant(None, tool_calls=calls), tool, user([picture]))
    assert [message.content for message in found[2:]] == [PICTURE, PICTURE]


def test_whatever_tools_give_is_a_line_in_messages() -> None:
    def result(*content: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": "c1", "content": list(content)}

    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    paper = {"type": "document", "source": {"type": "text", "data": "Words."}}
    scan = {"type": "document", "source": {"type": "base64", "data": "AA"}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "Found."}]}
    said = turns(
        user([picture, {"type": "text", "text": "look"}]),
        assistant(
            [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "tool_use", "id": "c1", "name": "ls", "input": {}},
            ]
        ),
        user([result(picture, paper, scan, found, {"type": "tool_reference", "tool_name": "rm"}), picture]),
    )
    assert said[2].role == "tool" and said[2].content.split("\n") == [
        PICTURE, "Words.", "[a document that this model cannot read]", "Found.", "[the tool rm]",
    ]  # fmt: skip
    assert said[0].content == f"{PICTURE}\nlook" and said[3] == Message("user", PICTURE)
    assert "web_search_tool_result" in said[1].content and len(said[1].tool_calls) == 1
    with pytest.raises(Refused, match="reads text only"):
        turns(user([picture]))
    assert turns(user([paper]))[0].content == "Words."


def test_items_of_all_kinds_are_taken_in_responses() -> None:
    found = items(
        user("look"),
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c1", "output": "x"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+ a"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "data:"}]},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "x", "stderr": ""}]},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "compaction", "encrypted_content": "x"},
    )
    assert [message.tool_calls[0] for message in found if message.tool_calls] == [
        ToolCall(id="c1", name="local_shell", arguments='{"type":"exec","command":["ls"]}'),
        ToolCall(id="c2", name="patch", arguments='{"input":"+ a"}'),
        ToolCall(id="c3", name="shell", arguments='{"commands":["ls"]}'),
    ]
    assert [(message.tool_call_id, message.content) for message in found if message.role == "tool"] == [
        ("c1", "x"), ("c2", PICTURE), ("c3", '{"stdout":"x","stderr":""}'),
    ]  # fmt: skip


def test_more_messages_than_a_template_is_given_are_refused() -> None:
    for ask in (chat, turns, items):
        assert len(ask(*[user("x")] * MOST_ITEMS)) == MOST_ITEMS
        with pytest.raises(Refused, match="length"):
            ask(*[user("x")] * (MOST_ITEMS + 1))
    with pytest.raises(Refused, match="length"):
        chat(user(["x"] * (MOST_ITEMS + 1)))


def test_whole_histories_are_answered(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """The model's template has no place for calls here, and tools are not offered."""
    calls = [{"id": None, "type": "function", "function": {"name": "ls", "arguments": {"a": 1}}}]
    messages: Any = [
        {"role": "system", "content": "Be brief."}, user("look"), assistant(None, tool_calls=calls),
        {"role": "tool", "content": [{"type": "image_url"}]},
        {"role": "developer", "content": "Be kind."}, user("and?"),
    ]  # fmt: skip
    answer = client.post(
        "/chat/completions", body={"model": None, "messages": messages, "max_tokens": 2}, cast_to=object
    )
    assert isinstance(answer, dict) and answer["model"] == MODEL
    said = client.responses.create(
        model=MODEL,
        max_output_tokens=2,
        input=[  # type: ignore[list-item]  # of a kind that the client does not send
            user("look"),
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        ],
    )
    assert said.usage is not None and said.usage.output_tokens == 2
    blocks: Any = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image"}]}]
    assert claude.messages.create(model=MODEL, max_tokens=2, messages=[user(blocks)]).usage.output_tokens == 2  # type: ignore[list-item]
