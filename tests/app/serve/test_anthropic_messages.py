"""``/v1/messages`` as Anthropic's own client uses it."""

from __future__ import annotations

import threading
from typing import Any

import anthropic
import msgspec
import pytest

from app.serve import replies
from app.serve.anthropic_messages import MessagesRequest, _block
from app.serve.application import decoded
from app.serve.asking import Defaults
from app.serve.segments import AnswerSegments, segments_of
from engine.ipc.messages import Message, Piece, Sample, Tool, ToolCall, ToolCallPiece
from tests.app.serve.served import MODEL, Served
from tests.support.eventually import eventually

QUESTION: Any = [{"role": "user", "content": "ab"}]


def test_a_message_and_its_events_say_the_same(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "system": [{"type": "text", "text": "x"}]}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == final.content[0].type == "text"
    assert whole.content[0].text == final.content[0].text == text != ""
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == final.usage.output_tokens == 8
    prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="x")
    assert counted.input_tokens == prompt == 5 + len("system\nxuser\nabassistant\n")


def test_a_count_takes_no_turn_and_is_no_answer(claude: anthropic.Anthropic, server: Served) -> None:
    before = dict(server.service.metrics.answers)
    tool: Any = {"name": "clock", "input_schema": {"type": "object"}}
    plain = claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert claude.messages.count_tokens(model=MODEL, messages=QUESTION, tools=[tool]).input_tokens > plain + 40
    assert (
        claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x" * 9000}]).input_tokens
        > 9000
    )
    with pytest.raises(anthropic.BadRequestError, match="at most 65,536"):
        long: Any = {**tool, "input_schema": {"type": "object", "title": "x" * 70_000}}
        claude.messages.count_tokens(model=MODEL, messages=QUESTION, tools=[long])
    assert server.service.metrics.answers == before


def test_the_models_are_known_to_this_client_too(claude: anthropic.Anthropic) -> None:
    assert MODEL in [model.display_name for model in claude.models.list()]


def test_the_events_in_their_order(claude: anthropic.Anthropic) -> None:
    events = list(claude.messages.create(model=MODEL, messages=QUESTION, max_tokens=2, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_silence_gives_events(claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients pass over pings, and take a stream without other events for dead."""
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 40}
    monkeypatch.setattr(replies, "PING_S", 0.0)
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    begun = kinds.index("content_block_start")
    # Before the answer, and within it while what is written is not certain: a call, in some formats.
    assert kinds[0] == "message_start" and set(kinds[1:begun]) == {"message_delta"}
    assert final.stop_reason == "max_tokens"
    (block,), (other,) = final.content, claude.messages.create(**asked).content
    assert block.type == other.type == "text" and block.text == other.text


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, anthropic.BadRequestError, "prompt is too long: The"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "text only"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, anthropic.BadRequestError, "wizard"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError, "no tool"),
    ],
)
def test_what_cannot_be_answered_is_said_in_the_form_of_the_protocol(
    claude: anthropic.Anthropic, wrong: dict[str, Any], error: type[anthropic.APIStatusError], said: str
) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, **wrong}
    with pytest.raises(error, match=said) as caught:
        claude.post("/v1/messages", body=body, cast_to=object)
    assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "error"


def test_a_conversation_with_tools() -> None:
    body = b"""{"max_tokens": 9, "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "be brief"}], "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "c1", "name": "ls", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "x"}]},
            {"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": "So"}],
        "tools": [{"name": "ls", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "w"}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "thinking": {"type": "enabled"}}"""
    request = decoded(body, MessagesRequest)
    asked = request.generate(Defaults())
    assert asked.messages == [
        Message("system", "be brief"),
        Message("user", "look"),
        Message("assistant", "I look.", "hm", tool_calls=[ToolCall(id="c1", name="ls", arguments='{"a": 1}')]),
        Message("tool", "x", tool_call_id="c1"),
        Message("user", "and?"),
        Message("assistant", "So"),
    ]
    assert asked.continue_last and asked.thinking and asked.max_tokens == 9
    assert asked.tools == [Tool(name="ls", parameters='{"type":"object"}')]
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)
    assert request.foreign_tools == ["web_search_20250305"]


def test_pieces_become_the_segments_of_the_whole_answer() -> None:
    pieces = [
        Piece(text="", tokens=1, reasoning="H"),
        Piece(text="A", tokens=2, reasoning="m."),
        Piece(text="B", tokens=3, tool_calls=[ToolCallPiece(index=0, id="c1", name="ls", arguments="{")]),
        Piece(text="", tokens=4, tool_calls=[ToolCallPiece(index=0, arguments="}"),
                                             ToolCallPiece(index=1, id="c2", name="rm")]),
        Piece(text="", tokens=5, tool_calls=[ToolCallPiece(index=1, arguments="[]")]),
    ]  # fmt: skip
    segments = AnswerSegments()
    changes = [change for piece in pieces for change in segments.take(piece)]
    changes += segments.end()
    calls = [ToolCall(id="c1", name="ls", arguments="{}"), ToolCall(id="c2", name="rm", arguments="[]")]
    whole = Sample(text="AB", token_ids=[], finish_reason="tool_calls", reasoning="Hm.", tool_calls=calls)
    assert segments.done == segments_of(whole)
    for number in range(4):
        own = [change.what for change in changes if change.segment.number == number]
        assert own[0] == "began" and own[-1] == "ended" and own.count("ended") == 1


def test_the_start_of_an_answer_that_had_to_wait_counts_its_prompt(claude: anthropic.Anthropic, server: Served) -> None:
    counts: list[int] = []

    def ask() -> None:
        with claude.messages.stream(
            model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "ab"}], metadata={"user_id": "another"}
        ) as stream:
            for event in stream:
                if event.type == "message_start":
                    usage = event.message.usage
                    counts.append(usage.input_tokens + (usage.cache_read_input_tokens or 0))

    long = claude.messages.create(
        model=MODEL,
        max_tokens=450,
        messages=[{"role": "user", "content": "ab"}],
        stream=True,
        stop_sequences=["\x00\x00\x00"],
    )
    next(iter(long))
    waiting = threading.Thread(target=ask)
    waiting.start()
    eventually(lambda: server.service.waiting == 1 or bool(counts))
    long.close()
    waiting.join(60)
    assert counts == [3 + len("user\nabassistant\n")]


@pytest.mark.parametrize(
    "content", [[], [{"type": "thinking", "thinking": "x", "signature": ""}]], ids=["no block", "thoughts only"]
)
def test_messages_without_text_are_refused(claude: anthropic.Anthropic, content: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="hold nothing to answer"):
        claude.messages.create(model=MODEL, max_tokens=2, messages=[{"role": "user", "content": content}])


def test_a_call_keeps_its_numbers_as_they_were_written() -> None:
    arguments = '{"id": 123456789012345678901234567890}'
    (segment,) = segments_of(
        Sample(
            text="",
            token_ids=[],
            finish_reason="tool_calls",
            tool_calls=[ToolCall(id="i", name="f", arguments=arguments)],
        )
    )
    assert f'"input":{arguments}'.encode() in msgspec.json.encode(_block(segment))
