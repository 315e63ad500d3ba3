"""Parts of requests and events about what an answer must be, and what it consists of besides its text."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
"""Why an answer ended. ``stop``: by itself, or at a stop string; ``length``: at its limit, or at the end of the
context; ``tool_calls``: by itself, after it had called tools."""
ToolChoice = Literal["auto", "none", "required"]
"""Whether the model may call tools, may not, or must call at least one."""
MOST_LOGPROBS = 20
"""Maximum likeliest tokens that are reported beside a token of an answer."""
MOST_SAMPLES = 16
"""Maximum answers to one question."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer must have. Thoughts before the answer are free.

    An answer that reaches its limit (finish reason ``length``) is only the beginning of something of that form.
    """

    kind: Literal["json", "schema", "regex", "grammar"]
    """``json``: any JSON object; ``schema``: what a JSON schema describes; ``regex``: what a regular expression
    matches as a whole; ``grammar``: what a context-free grammar in llguidance's form of Lark describes."""
    text: str = ""
    """The schema as JSON text, the regular expression or the grammar; empty for ``json``."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """JSON schema of its arguments as JSON text; empty: it has none."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a tool, made by the model."""

    id: str
    """Name of the call, unique in the conversation. The message with the tool's result repeats it."""
    name: str
    arguments: str
    """The arguments as JSON text."""


class ToolCallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call while it is generated."""

    index: int
    """Place of the call among those of its answer, from 0."""
    id: str = ""
    """Name of the call, in its first piece only."""
    name: str = ""
    """Name of the tool, in the call's first piece only."""
    arguments: str = ""
    """The next part of the arguments' JSON text."""


class LikelyToken(msgspec.Struct, frozen=True):
    """A token and its log-probability. ``data`` are its bytes, which need not be whole characters."""

    token: int
    text: str
    data: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of an answer with its natural log-probability, by the model's own distribution: before temperature,
    filters, penalties and constraints."""

    token: int
    text: str
    data: bytes
    """The token's bytes, which need not be whole characters."""
    logprob: float
    top: list[LikelyToken] = []
    """As many of the likeliest tokens as were asked for, the likeliest first."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One of several answers to a question. The fields are those of :class:`engine.ipc.messages.Finished`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    stop_string: str = ""
