"""OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec

from app.serve.asking import (
    MOST_ITEMS,
    Content,
    Defaults,
    NaturalOrAll,
    ToolChoiceObject,
    answers_of,
    as_text,
    chosen,
    composed,
    last_question,
    merged,
    most_tokens,
    stops_of,
    thinking_of,
    timings,
    tool_of,
)
from app.serve.model_service import ModelService
from app.serve.openai_fields import DONE, SampledRequest, finish_reason, usage
from app.serve.replies import Refused, event_frame
from engine.ipc.messages import (
    MOST_LOGPROBS,
    Finished,
    Generate,
    Message,
    Piece,
    Sample,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
)

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


class CalledFunction(msgspec.Struct):
    """``input`` is what a tool without a schema was called with."""

    name: str | None = None
    arguments: Any = None
    input: str | None = None


class CalledTool(msgspec.Struct):
    """A call in the conversation so far."""

    id: str | None = None
    function: CalledFunction | None = None
    custom: CalledFunction | None = None

    def call(self) -> ToolCall:
        called = self.function or self.custom or CalledFunction()
        arguments = called.arguments if called.input is None else {"input": called.input}
        text = arguments if isinstance(arguments, str) else "" if arguments is None else as_text(arguments)
        return ToolCall(id=self.id or "", name=called.name or "", arguments=text)


class ChatMessage(msgspec.Struct):
    """``function_call`` is the older form of ``tool_calls``. Thoughts have one name or the other."""

    role: str
    content: Content = None
    tool_calls: Annotated[list[CalledTool], msgspec.Meta(max_length=MOST_ITEMS)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None

    def message(self, where: str, *, asked: bool, sees: bool) -> Message:
        """``asked``: it is what the person asks now. ``sees``: with its pictures. Raises Refused."""
        role = _ROLES.get(self.role, self.role)
        if role not in _KNOWN_ROLES:
            raise Refused(
                f"The role {self.role[:50]!r} is unknown: use system, user, assistant or tool.",
                parameter=f"{where}.role",
            )
        calls = [call.call() for call in self.tool_calls or ()]
        if self.function_call is not None and not calls:
            calls = [CalledTool(function=self.function_call).call()]
        thoughts = self.reasoning_content or self.reasoning
        read = composed(self.content, f"{where}.content", asked=asked, sees=sees and role == "user")
        return Message(
            role,  # type: ignore[arg-type]
            read.content,
            thoughts if role == "assistant" and isinstance(thoughts, str) else "",
            tool_calls=calls if role == "assistant" else [],
            tool_call_id=self.tool_call_id or "" if role == "tool" else "",
            pictures=read.pictures,
        )


class Function(msgspec.Struct):
    """A function as OpenAI describes it."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(msgspec.Struct):
    type: str = "function"
    function: Function | None = None


class TemplateArguments(msgspec.Struct):
    """Variables of chat templates, as other servers take them."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """The body. ``chat_template_kwargs`` is not OpenAI's, but what other servers have."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MOST_ITEMS)]
    max_completion_tokens: NaturalOrAll | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    audio: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateArguments | None = None

    def generate(self, defaults: Defaults, *, sees: bool = False) -> Generate:
        """The request to the engine, with pictures if the model ``sees``. Raises Refused for unsupported fields."""
        if self.functions:
            raise Refused("Functions are called as tools here: use tools.", parameter="functions")
        if self.audio is not None:
            raise Refused("This model writes text only: leave audio out.", parameter="audio")
        arguments = self.chat_template_kwargs or TemplateArguments()
        switch = arguments.enable_thinking if arguments.enable_thinking is not None else arguments.thinking
        thinking, effort = thinking_of(self.reasoning_effort, defaults, switch)
        beams, samples = self.widths()
        asked = last_question([_ROLES.get(message.role, message.role) for message in self.messages])
        messages = [
            message.message(f"messages[{number}]", asked=number == asked, sees=sees)
            for number, message in enumerate(self.messages)
        ]
        return Generate(
            id=0,
            messages=merged(messages),
            sampling=self.sampling(defaults),
            max_tokens=most_tokens(self.max_completion_tokens, self.max_tokens, usual=defaults.max_tokens),
            stop=stops_of(self.stop),
            samples=samples,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            constraint=self.constraint(),
            **self._tools(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            beams=beams,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            thinking=thinking,
            effort=effort,
        )

    def _tools(self) -> dict[str, Any]:
        own = [tool.function for tool in self.tools or () if tool.function is not None]
        tools = [tool_of(function.name, function.description, function.parameters) for function in own]
        return chosen(tools, self.tool_choice)

    @property
    def foreign_tools(self) -> list[str]:
        """Kinds of tools that are not functions. The model is not told of them."""
        return [tool.type for tool in self.tools or () if tool.function is None]


class ChatAnswers:
    """The answers to one request, as a whole or as chunks."""

    def __init__(self, service: ModelService, request: ChatRequest, defaults: Defaults, client: str) -> None:
        self._model = service.check_name(request.model)
        self._service = service
        self._client = client
        self._generate = request.generate(defaults, sees=service.sees)
        self._choices = request.n or 1
        self._with_usage = request.wants_usage
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> bytes:
        """The completion. Raises Refused."""
        finished = await self._service.finished(self._generate, self._client)
        choices = [self._choice(number, one) for number, one in enumerate(answers_of(finished, self._choices))]
        return msgspec.json.encode({**self._head("chat.completion"), "choices": choices, **_figures(finished)})

    def _choice(self, number: int, answer: Sample) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        logprobs = None if self._generate.logprobs is None else logprobs_object(answer.logprobs)
        reason = finish_reason(answer)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises Refused."""
        finished: Finished | None = None
        begun: set[int] = set()
        async with aclosing(self._service.answer(self._generate, self._client)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    finished = event
                    break
                number = event.sample if isinstance(event, Piece) else 0
                if number not in begun:
                    begun.add(number)
                    yield self._chunk(number, {"role": "assistant", "content": ""})
                if isinstance(event, Piece) and self._generate.beams == 1:
                    delta = delta_of(event)
                    if delta or event.logprobs:
                        yield self._chunk(number, delta, logprobs=event.logprobs)
        assert finished is not None
        for number, answer in enumerate(answers_of(finished, self._choices)):
            if self._generate.beams > 1:
                thoughts = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
                yield self._chunk(number, {"role": "assistant", **thoughts, "content": answer.text})
            yield self._chunk(number, {}, finish_reason(answer))
        if self._with_usage:
            yield event_frame({**self._head("chat.completion.chunk"), "choices": [], **_figures(finished)})
        yield DONE

    def _chunk(
        self,
        number: int,
        delta: dict[str, object],
        reason: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> bytes:
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": logprobs_object(logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        usage_yet: dict[str, object] = {"usage": None} if self._with_usage else {}
        return event_frame({**self._head("chat.completion.chunk"), "choices": [choice], **usage_yet})

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def _figures(finished: Finished) -> dict[str, object]:
    return {"usage": usage(finished), "timings": timings(finished)}


def delta_of(piece: Piece) -> dict[str, object]:
    """The delta for a piece. Text that turned out to be thoughts cannot be withdrawn, and is not repeated."""
    delta: dict[str, object] = {}
    if piece.reasoning and not piece.withdrawn:
        delta["reasoning_content"] = piece.reasoning
    if piece.text:
        delta["content"] = piece.text
    if piece.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
    return delta


def _call_delta(call: ToolCallPiece) -> dict[str, object]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def logprobs_object(logprobs: list[TokenLogprob]) -> dict[str, object]:
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.data),
            "top_logprobs": [
                {"token": other.text, "logprob": other.logprob, "bytes": list(other.data)} for other in token.top
            ],
        }
        for token in logprobs
    ]
    return {"content": content, "refusal": None}
