"""Anthropic's ``/v1/messages`` and the count of a prompt's tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec

from app.serve.asking import (
    MOST_ITEMS,
    AnswerFormat,
    Defaults,
    Natural,
    NaturalOrAll,
    Share,
    Switch,
    Temperature,
    answers_of,
    last_question,
    line_for,
    merged,
    offered,
    result_text,
    sampling_of,
    stops_of,
    thinking_of,
    timings,
    tool_of,
)
from app.serve.model_service import ModelService
from app.serve.pictures import Composed, picture_file
from app.serve.replies import Refused, error_object, event_frame
from app.serve.segments import AnswerSegment, AnswerSegments, SegmentChange, segments_of
from engine.ipc.messages import Constraint, Finished, Generate, Message, Piece, Prefill, Sample, ToolCall

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_BILLING = "x-anthropic-billing-header:"
"""Beginning of a text that Claude Code puts before its system prompt, different with every request. It is for
Anthropic's own servers, and would make every prompt a new one for the prefix cache."""
_ANY_OBJECT = msgspec.Raw(b"{}")


class Block(msgspec.Struct):
    """A block of content; its ``type`` says which fields count."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = _ANY_OBJECT
    tool_use_id: str | None = None
    content: Any = None
    source: Any = None


Blocks = str | Annotated[list[Block], msgspec.Meta(max_length=MOST_ITEMS)]


class TurnMessage(msgspec.Struct):
    role: str
    content: Blocks | None = None

    @property
    def kind(self) -> str:
        """The role, but ``tool`` for a user's message with results of tools."""
        results = isinstance(self.content, list) and any(block.type == "tool_result" for block in self.content)
        return "tool" if results else self.role


class MessagesTool(msgspec.Struct):
    """``type`` is given for tools that Anthropic's own servers run."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessagesToolChoice(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str


class UserData(msgspec.Struct):
    user_id: str | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: AnswerFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The fields that make a prompt."""

    messages: Annotated[list[TurnMessage], msgspec.Meta(min_length=1, max_length=MOST_ITEMS)]
    model: str | None = None
    system: Blocks | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None
    metadata: UserData | None = None

    def generate(self, defaults: Defaults, *, sees: bool = False) -> Generate:
        """The request to the engine, with pictures if the model ``sees``. Raises Refused."""
        messages = [Message("system", _system_text(self.system))] if self.system else []
        asked = last_question([message.kind for message in self.messages])
        for number, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{number}]", asked=number == asked, sees=sees)
        messages = merged([message for message in messages if message.role != "system" or message.content])
        if not any(message.role != "system" for message in messages):
            raise Refused("The messages hold nothing to answer.", parameter="messages")
        config = self.output_config or OutputConfig()
        thinks = self.thinking.type != "disabled" if self.thinking is not None else defaults.thinking or False
        _, effort = thinking_of(config.effort, defaults)
        return Generate(
            id=0,
            messages=messages,
            continue_last=messages[-1].role == "assistant" and not messages[-1].tool_calls,
            sampling=defaults.sampling,
            max_tokens=1,
            constraint=self._constraint(config),
            **self._tools(),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            thinking=thinks,
            effort=effort,
        )

    def _constraint(self, config: OutputConfig) -> Constraint | None:
        form = config.format or self.output_format
        return form.constraint("output_config.format") if form is not None else None

    def _tools(self) -> dict[str, Any]:
        own = [tool for tool in self.tools or () if tool.type in (None, "custom")]
        tools = [tool_of(tool.name, tool.description, tool.input_schema) for tool in own]
        if self.tool_choice is None:
            return offered(tools, None)
        word = {"any": "required", "tool": None}.get(self.tool_choice.type, self.tool_choice.type)
        return offered(tools, word, self.tool_choice.name)

    @property
    def foreign_tools(self) -> list[str]:
        """Kinds of tools that only Anthropic's own servers run. The model is not told of them."""
        return [tool.type for tool in self.tools or () if tool.type not in (None, "custom")]


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Natural
    stream: Switch | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: NaturalOrAll | None = None
    stop_sequences: list[str] | None = None

    def generate(self, defaults: Defaults, *, sees: bool = False) -> Generate:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return msgspec.structs.replace(
            super().generate(defaults, sees=sees),
            sampling=sampling_of(defaults, given),
            max_tokens=self.max_tokens,
            stop=stops_of(self.stop_sequences, "stop_sequences"),
        )


# --- the conversation -----------------------------------------------------------------------------------------------


def _system_text(system: Blocks | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [block.text for block in system if block.text]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _messages(message: TurnMessage, where: str, *, asked: bool, sees: bool) -> Iterator[Message]:
    """One message as messages for the engine: results of tools become separate messages.

    ``asked``: it is the current question. ``sees``: with pictures. Raises Refused.
    """
    if message.role not in ("user", "assistant", "system"):
        raise Refused(f"The role {message.role[:50]!r} is unknown: use user or assistant.", parameter=f"{where}.role")
    if not isinstance(message.content, list):
        yield Message(message.role, message.content or "")  # type: ignore[arg-type]
        return
    read = Composed()
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(message.content):
        match block.type:
            case "text":
                read.text(block.text or "")
            case "tool_use" if message.role == "assistant":
                arguments = bytes(block.input).decode()
                calls.append(ToolCall(id=block.id or "", name=block.name or "", arguments=arguments))
            case "tool_result":
                yield Message("tool", result_text(block.content), tool_call_id=block.tool_use_id or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case "document" if (
                isinstance(block.source, dict)
                and isinstance(block.source.get("data"), str)
                and (block.source.get("type") == "text")
            ):
                read.text(block.source["data"])
            case "image" if sees and message.role == "user":
                read.picture(picture_file(block.source, f"{where}.content[{number}]"))
            case _:
                read.text(line_for(block.type, f"{where}.content[{number}]", asked=asked, sees=sees))
    if calls or not read.empty:
        own = "\n".join(thoughts) if message.role == "assistant" else ""
        yield Message(message.role, read.content, own, tool_calls=calls, pictures=read.pictures)  # type: ignore[arg-type]


# --- the answer -----------------------------------------------------------------------------------------------------


async def count_tokens(service: ModelService, request: CountRequest, defaults: Defaults) -> bytes:
    """The number of tokens of the prompt, without waiting for anybody's answer. Raises Refused."""
    service.check_name(request.model)
    return msgspec.json.encode(
        {"input_tokens": await service.prompt_tokens(request.generate(defaults, sees=service.sees))}
    )


class MessageAnswer:
    """The answer to one request, as a whole or as events."""

    def __init__(self, service: ModelService, request: MessagesRequest, defaults: Defaults, client: str) -> None:
        self._model = service.check_name(request.model)
        self._service = service
        self._client = client
        self._generate = request.generate(defaults, sees=service.sees)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._is_open = False

    async def whole(self) -> bytes:
        """The message. Raises Refused."""
        finished = await self._service.finished(self._generate, self._client)
        answer = answers_of(finished)[0]
        content = [_block(segment) for segment in segments_of(answer)]
        ended = _ended(answer)
        return msgspec.json.encode({**self._message(content), **ended, **_figures(finished)})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises Refused."""
        segments = AnswerSegments()
        begun = False
        async with aclosing(self._service.answer(self._generate, self._client)) as events:
            async for event in events:
                if not begun:
                    begun = True
                    prompt = event if isinstance(event, Prefill) else Prefill(done=0, total=0)
                    yield self._start(prompt)
                    self._is_open = True
                if isinstance(event, Piece):
                    for change in segments.take(event):
                        yield _changed(change)
                elif isinstance(event, Finished):
                    self._is_open = False
                    for change in segments.end():
                        yield _changed(change)
                    delta = _ended(answers_of(event)[0])
                    yield _event("message_delta", delta=delta, **_figures(event))
                    yield _event("message_stop")

    def ping(self) -> bytes:
        """An event for silent phases.

        Clients ignore pings. Some, Claude Code among them, take a stream without any events for dead. Pings tell them,
        while a long prompt is read or uncertain text is written, that the message has not changed.
        """
        if not self._is_open:
            return PING
        unchanged = {"stop_reason": None, "stop_sequence": None}
        return PING + _event("message_delta", delta=unchanged, usage={"output_tokens": 0})

    def _start(self, prompt: Prefill) -> bytes:
        counts = {
            "input_tokens": prompt.total - prompt.reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt.reused,
            "output_tokens": 0,
        }
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event("message_start", message=message)

    def _message(self, content: list[dict[str, object]]) -> dict[str, object]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}


def _changed(change: SegmentChange) -> bytes:
    segment = change.segment
    match change.what:
        case "began":
            block = _block(segment)
            if segment.kind == "call":
                block["input"] = {}
            return _event("content_block_start", index=segment.number, content_block=block)
        case "added":
            kind, name = {
                "thoughts": ("thinking_delta", "thinking"),
                "text": ("text_delta", "text"),
                "call": ("input_json_delta", "partial_json"),
            }[segment.kind]
            return _event("content_block_delta", index=segment.number, delta={"type": kind, name: change.added})
        case _:
            stopped = _event("content_block_stop", index=segment.number)
            if segment.kind != "thoughts":
                return stopped
            signed = {"type": "signature_delta", "signature": ""}
            return _event("content_block_delta", index=segment.number, delta=signed) + stopped


def _block(segment: AnswerSegment) -> dict[str, object]:
    match segment.kind:
        case "thoughts":
            return {"type": "thinking", "thinking": segment.text, "signature": ""}
        case "text":
            return {"type": "text", "text": segment.text}
        case _:
            return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": _arguments(segment.text)}


def _arguments(text: str) -> object:
    """The arguments of a call as they were written; none of them where the answer's limit cut them off."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode())


def _ended(answer: Sample) -> dict[str, object]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish_reason, "end_turn")
    if answer.stop_string:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string or None}


def _figures(finished: Finished) -> dict[str, object]:
    return {"usage": _usage(finished), "timings": timings(finished)}


def _usage(finished: Finished) -> dict[str, object]:
    return {
        "input_tokens": finished.prefilled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": finished.cached_tokens,
        "output_tokens": finished.completion_tokens,
    }


def _event(kind: str, **fields: object) -> bytes:
    return event_frame({"type": kind, **fields}, kind)


def failure(refused: Refused) -> bytes:
    """An error in the middle of a stream."""
    return event_frame(error_object(refused, "anthropic"), "error")
