"""OpenAI's ``/v1/responses``, as far as coding clients need it: nothing is kept between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec

from app.serve.asking import (
    MOST_ITEMS,
    AnswerFormat,
    Content,
    Defaults,
    NaturalOrAll,
    Share,
    Switch,
    Temperature,
    ToolChoiceObject,
    answers_of,
    as_text,
    chosen,
    composed,
    last_question,
    merged,
    most_tokens,
    result_text,
    sampling_of,
    thinking_of,
    timings,
    tool_of,
)
from app.serve.model_service import ModelService
from app.serve.openai_fields import reasoning_tokens
from app.serve.replies import Refused, error_object, event_frame
from app.serve.segments import AnswerSegment, AnswerSegments, SegmentChange, segments_of
from engine.ipc.messages import Finished, Generate, Message, Piece, ToolCall


class ResponseTool(msgspec.Struct):
    """A function, or a namespace, which holds functions as ``tools``: Codex's form of an MCP server's tools."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None


class ResponseText(msgspec.Struct):
    format: AnswerFormat | None = None


class ResponseReasoning(msgspec.Struct):
    effort: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MOST_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: NaturalOrAll | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: Switch | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    def generate(self, defaults: Defaults, *, sees: bool = False) -> Generate:
        """The request to the engine, with pictures if the model ``sees``. Raises Refused for unsupported fields."""
        for name in ("previous_response_id", "conversation", "background"):
            if getattr(self, name):
                raise Refused(
                    f"Nothing is kept between requests here: leave {name} out, and send the whole conversation as "
                    "input.",
                    parameter=name,
                )
        thinking, effort = thinking_of(self.reasoning.effort if self.reasoning else None, defaults)
        form = self.text.format if self.text else None
        return Generate(
            id=0,
            messages=self._messages(sees),
            sampling=sampling_of(defaults, {"temperature": self.temperature, "top_p": self.top_p}),
            max_tokens=most_tokens(self.max_output_tokens, usual=defaults.max_tokens),
            constraint=form.constraint("text.format") if form else None,
            **self._tools(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking=thinking,
            effort=effort,
        )

    def _tools(self) -> dict[str, Any]:
        tools = [tool_of(name, tool.description, tool.parameters) for name, (_, tool) in self.functions.items()]
        return chosen(tools, self.tool_choice)

    @property
    def functions(self) -> dict[str, tuple[str, ResponseTool]]:
        """The functions by the name that the model calls them by, each with the namespace that it is in."""
        functions: dict[str, tuple[str, ResponseTool]] = {}
        for tool in self.tools or ():
            if tool.type == "function":
                functions[tool.name] = "", tool
            elif tool.type == "namespace":
                functions |= {
                    qualified(tool.name, inner.name): (tool.name, inner)
                    for inner in tool.tools or ()
                    if inner.type == "function"
                }
        return functions

    @property
    def foreign_tools(self) -> list[str]:
        """Kinds of tools that only OpenAI's own servers run. The model is not told of them."""
        return [tool.type for tool in self.tools or () if tool.type not in ("function", "namespace")]

    def _messages(self, sees: bool) -> list[Message]:
        messages = [Message("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, Message("user", self.input)]
        messages += messages_of(self.input, sees=sees)
        if not any(message.role != "system" for message in messages):
            raise Refused("The input holds no message to answer.", parameter="input")
        return merged(messages)


class ResponseAnswer:
    """The answer to one request, as a whole or as events."""

    def __init__(self, service: ModelService, request: ResponsesRequest, defaults: Defaults, client: str) -> None:
        self._model = service.check_name(request.model)
        self._service = service
        self._request = request
        self._client = client
        self._generate = request.generate(defaults, sees=service.sees)
        self._functions = request.functions
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: dict[int, str] = {}
        self._number = -1

    async def whole(self) -> bytes:
        """The response. Raises Refused."""
        finished = await self._service.finished(self._generate, self._client)
        segments = segments_of(answers_of(finished)[0])
        return msgspec.json.encode(self._response(segments, finished))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises Refused before the first one only."""
        segments = AnswerSegments()
        begun = False
        try:
            async with aclosing(self._service.answer(self._generate, self._client)) as events:
                async for event in events:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield self._event(kind, response=self._response([], None))
                    if isinstance(event, Piece):
                        for change in segments.take(event):
                            for made in self._changed(change):
                                yield made
                    elif isinstance(event, Finished):
                        for change in segments.end():
                            for made in self._changed(change):
                                yield made
                        response = self._response(segments.done, event)
                        yield self._event(f"response.{response['status']}", response=response)
        except Refused as refused:
            if not begun:
                raise
            failed = self._response(segments.done, None)
            failed |= {"status": "failed", "error": {"code": "server_error", "message": str(refused)}}
            yield self._event("response.failed", response=failed)

    # --- events -------------------------------------------------------------------------------------------------------

    def _changed(self, change: SegmentChange) -> Iterator[bytes]:
        segment = change.segment
        place = {"output_index": segment.number, "item_id": self._item_id(segment)}
        part = {**place, "content_index": 0}
        match change.what, segment.kind:
            case "began", kind:
                item = {**self._item(segment), "status": "in_progress"}
                if kind != "call":
                    item["content"] = []
                yield self._event("response.output_item.added", output_index=segment.number, item=item)
                if kind != "call":
                    yield self._event("response.content_part.added", **part, part=self._part(segment))
            case "added", "text":
                yield self._event("response.output_text.delta", **part, delta=change.added, logprobs=[])
            case "added", "thoughts":
                yield self._event("response.reasoning_text.delta", **part, delta=change.added)
            case "added", _:
                yield self._event("response.function_call_arguments.delta", **place, delta=change.added)
            case _, "call":
                item = self._item(segment)
                yield self._event(
                    "response.function_call_arguments.done", **place, arguments=segment.text, name=item["name"]
                )
                yield self._event("response.output_item.done", output_index=segment.number, item=item)
            case _:
                if segment.kind == "text":
                    yield self._event("response.output_text.done", **part, text=segment.text, logprobs=[])
                else:
                    yield self._event("response.reasoning_text.done", **part, text=segment.text)
                yield self._event("response.content_part.done", **part, part=self._part(segment))
                yield self._event("response.output_item.done", output_index=segment.number, item=self._item(segment))

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        value = {"type": kind, "sequence_number": self._number, **fields}
        return event_frame(value, kind)

    # --- objects ------------------------------------------------------------------------------------------------------

    def _item_id(self, segment: AnswerSegment) -> str:
        kind = {"thoughts": "rs", "text": "msg", "call": "fc"}[segment.kind]
        return self._items.setdefault(segment.number, f"{kind}_{uuid.uuid4().hex}")

    def _part(self, segment: AnswerSegment) -> dict[str, object]:
        if segment.kind == "thoughts":
            return {"type": "reasoning_text", "text": segment.text}
        return {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": []}

    def _item(self, segment: AnswerSegment) -> dict[str, object]:
        head: dict[str, object] = {"id": self._item_id(segment), "status": "completed"}
        match segment.kind:
            case "thoughts":
                return {**head, "type": "reasoning", "summary": [], "content": [self._part(segment)]}
            case "text":
                return {**head, "type": "message", "role": "assistant", "content": [self._part(segment)]}
            case _:
                namespace, tool = self._functions.get(segment.name, ("", ResponseTool("function", segment.name)))
                call = {"call_id": segment.id, "name": tool.name, "arguments": segment.text}
                within = {"namespace": namespace} if namespace else {}
                return {**head, "type": "function_call", **within, **call}

    def _response(self, segments: list[AnswerSegment], finished: Finished | None) -> dict[str, object]:
        """The response object; without ``finished`` as it is in progress."""
        request = self._request
        cut = finished is not None and finished.finish_reason == "length"
        effort = request.reasoning.effort if request.reasoning else None
        form = request.text.format if request.text and request.text.format else AnswerFormat()
        forced = self._generate.forced_tool
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if finished is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": [self._item(segment) for segment in segments],
            "parallel_tool_calls": self._generate.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _form_object(form)},
            "tool_choice": {"type": "function", "name": forced} if forced else self._generate.tool_choice,
            "tools": [_tool_object(tool) for _, tool in self._functions.values()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if finished is None else _usage(finished),
            "timings": None if finished is None else timings(finished),
            "metadata": {},
        }


def failure(refused: Refused) -> bytes:
    """An error in the middle of a stream."""
    value = {"type": "error", **error_object(refused, "openai")}
    return event_frame(value, "error")


def _form_object(form: AnswerFormat) -> dict[str, object]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "name": form.name or "answer", "schema": form.schema, "strict": True}


def _tool_object(tool: ResponseTool) -> dict[str, object]:
    said = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", **said, "strict": False}


def _usage(finished: Finished) -> dict[str, object]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(finished)},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


# --- items of a request ----------------------------------------------------------------------------------------------


_ROLES = {"developer": "system"}
_KNOWN_ROLES = ("system", "user", "assistant")


class InputItem(msgspec.Struct):
    """One item; its ``type`` says which fields count."""

    type: str = "message"
    role: str = "user"
    content: Any = None
    summary: Any = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    operation: Any = None
    output: Any = None

    @property
    def is_call(self) -> bool:
        """Whether the client was called. Calls of tools that ran elsewhere have no result for the model to read."""
        return self.type.endswith("_call") and bool(self.call_id)

    @property
    def is_result(self) -> bool:
        return self.type.endswith("_output")

    def call(self) -> ToolCall:
        name = self.name or self.type.removesuffix("_call")
        given = self.arguments
        if given is None and self.input is not None:
            given = {"input": self.input}
        if given is None:
            given = self.action if self.action is not None else self.operation
        text = given if isinstance(given, str) else "" if given is None else as_text(given)
        return ToolCall(id=self.call_id or "", name=qualified(self.namespace or "", name), arguments=text)


def messages_of(items: Sequence[InputItem], *, sees: bool = False) -> list[Message]:
    """The conversation, with pictures if the model ``sees``. Items that say nothing to a model are left out. Raises
    Refused for an unknown role, and for what the model cannot read in the person's last question."""
    asked = last_question(["tool" if item.is_result else item.role if item.type == "message" else "" for item in items])
    messages: list[Message] = []
    thoughts = ""
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item.type == "reasoning":
            thoughts = result_text(item.content) or result_text(item.summary)
        elif item.type == "message":
            message = _message(item, where, thoughts, asked=number == asked, sees=sees)
            thoughts = ""
            messages.append(message)
        elif item.is_call:
            if not messages or messages[-1].role != "assistant" or thoughts:
                messages.append(Message("assistant", "", thoughts))
            thoughts = ""
            messages[-1].tool_calls.append(item.call())
        elif item.is_result:
            messages.append(Message("tool", result_text(item.output), tool_call_id=item.call_id or item.id or ""))
        elif item.type == "item_reference":
            raise Refused(
                "Nothing is kept between requests here: send the item itself instead of its item_reference.",
                parameter=f"{where}.type",
            )
    return merged(messages)


def _message(item: InputItem, where: str, thoughts: str, *, asked: bool, sees: bool) -> Message:
    role = _ROLES.get(item.role, item.role)
    if role not in _KNOWN_ROLES:
        raise Refused(f"The role {item.role[:50]!r} is unknown.", parameter=f"{where}.role")
    try:
        content = msgspec.convert(item.content, Content)
    except msgspec.ValidationError as error:
        raise Refused(f"{where}.content: {error}.", parameter=f"{where}.content") from None
    said = composed(content, f"{where}.content", asked=asked, sees=sees and role == "user")
    own = thoughts if role == "assistant" else ""
    return Message(role, said.content, own, pictures=said.pictures)  # type: ignore[arg-type]


def qualified(namespace: str, name: str) -> str:
    """The one name by which the model knows the function ``name`` of a ``namespace`` (empty: none)."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name
