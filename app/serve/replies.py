"""Answers over HTTP that end as soon as their client has left: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.ipc.messages import Failed

PING_S = 10.0
"""Seconds of silence after which a stream gets a comment. Before its first event it also fixes the status."""
_PING = b": the answer is being worked on\n\n"
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


_LINE_ENDS = {"\u2028": b"\\u2028", "\u2029": b"\\u2029", "\u0085": b"\\u0085"}
"""Characters that JSON may hold as they are, and at which many clients cut lines, with their escapes."""


def event_frame(value: object, kind: str = "") -> bytes:
    """``value`` as one server-sent event, of a ``kind`` if the protocol names them."""
    data = msgspec.json.encode(value)
    for character, escape in _LINE_ENDS.items():
        data = data.replace(character.encode(), escape)
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + data + b"\n\n"


def json_response(body: bytes, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    if status in (408, 413):
        # What is still on its way is not read.
        headers["connection"] = "close"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body, status, headers, media_type="application/json")


def refusal_response(refused: Refused, protocol: Protocol) -> Response:
    return json_response(error_json(refused, protocol), refused.status)


class WholeAnswer:
    """The response that ``work`` makes; cancelled if the client leaves before."""

    def __init__(self, work: Callable[[], Awaitable[Response]]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            response = await self._work()
            await response(scope, receive, send)

        await _unless_gone(answer(), receive)


class EventStream:
    """``frames`` as server-sent events. What is refused before the first frame gets its own status.

    ``ping`` gives what is sent in silence. ``failure`` makes the frame of an error in the middle of a stream.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        protocol: Protocol,
        failure: Callable[[Refused], bytes],
        *,
        ping: Callable[[], bytes] = lambda: _PING,
        ping_s: float | None = None,
    ) -> None:
        self._frames = frames
        self._protocol = protocol
        self._failure = failure
        self._ping = ping
        self._ping_s = PING_S if ping_s is None else ping_s
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            try:
                async with aclosing(self._frames):
                    await self._send_frames(send)
            except Refused as refused:
                if not self._begun:
                    await refusal_response(refused, self._protocol)(scope, receive, send)
                    return
                await self._send(send, self._failure(refused))
            except asyncio.CancelledError:
                if self._begun:  # the server ends; whoever has left hears nothing of it
                    await self._send(send, self._failure(Refused(STOPPED, 503)))
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await _unless_gone(answer(), receive)

    async def _send_frames(self, send: Send) -> None:
        following: asyncio.Task[bytes] | None = None
        try:
            while True:
                following = following or asyncio.create_task(self._next())
                done, _ = await asyncio.wait({following}, timeout=self._ping_s)
                if not done:
                    await self._send(send, self._ping())
                    continue
                frame, following = following.result(), None
                if not frame:
                    return
                await self._send(send, frame)
        finally:
            if following is not None:
                following.cancel()
                with suppress(asyncio.CancelledError, Refused):
                    await following

    async def _next(self) -> bytes:
        """The next frame; empty at the end."""
        return await anext(self._frames, b"")

    async def _send(self, send: Send, frame: bytes) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        await send({"type": "http.response.body", "body": frame, "more_body": True})


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Do ``work`` until the client leaves."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- refusals --------------------------------------------------------------------------------------------------------


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""``error.type`` of Anthropic's errors by status. Any other client's mistake is an ``invalid_request_error``."""


class Refused(Exception):
    """A request is not answered. The text is one sentence for the person who wrote or uses the client.

    ``status``: the HTTP status. ``code``: OpenAI's word for the case, if it has one. ``parameter``: the field that is
    wrong.
    """

    def __init__(self, text: str, status: int = 400, *, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.parameter = parameter


Protocol = Literal["openai", "anthropic"]


STOPPED = "The server is being stopped."
TOO_LONG = "context_length_exceeded"
_TOO_LONG_SAID: dict[Protocol, str] = {
    "openai": "This model's maximum context length is exceeded: ",
    "anthropic": "prompt is too long: ",
}
"""Beginnings by which clients know that they must shorten the conversation."""


def error_object(refused: Refused, protocol: Protocol) -> dict[str, object]:
    """The error's JSON in ``protocol``."""
    said = _TOO_LONG_SAID[protocol] if refused.code == TOO_LONG else ""
    message = f"{said}{refused}"
    if protocol == "anthropic":
        usual = "api_error" if refused.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(refused.status, usual)
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        refused.status, "server_error" if refused.status >= 500 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": refused.parameter, "code": refused.code}
    return {"error": error}


def error_json(refused: Refused, protocol: Protocol) -> bytes:
    return msgspec.json.encode(error_object(refused, protocol))


def protocol_of(path: str) -> Protocol:
    """The protocol whose errors a client of ``path`` can read."""
    return "anthropic" if path.startswith(("/v1/messages", "/v1/v1/messages")) else "openai"


def refused_by_engine(failed: Failed) -> Refused:
    """The engine's own sentence, with the status that its kind of failure has."""
    match failed.kind:
        case "context":
            return Refused(failed.error, 400, code=TOO_LONG, parameter="messages")
        case "bad-input" | "model":
            return Refused(failed.error, 400)
        case "memory":
            return Refused(failed.error, 503, code="insufficient_memory")
        case _:
            return Refused(failed.error, 500)
