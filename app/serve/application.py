"""The paths of the server, and what each does."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import PurePath
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.serve import anthropic_messages, openai_responses
from app.serve.anthropic_messages import CountRequest, MessageAnswer, MessagesRequest
from app.serve.asking import Defaults
from app.serve.gate import RequestGate, Rules
from app.serve.model_service import ModelService
from app.serve.openai_chat import ChatAnswers, ChatRequest
from app.serve.openai_completions import CompletionRequest, Completions
from app.serve.openai_fields import failure
from app.serve.openai_responses import ResponseAnswer, ResponsesRequest
from app.serve.replies import EventStream, Refused, WholeAnswer, json_response, protocol_of, refusal_response
from engine.ipc.messages import ModelFacts
from engine.planning.units import byte_size

_MOST_NOTES = 20
Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Application:
    """The server's paths over one model. ``note`` is told of mistakes of our own, without anything of the request."""

    def __init__(self, service: ModelService, defaults: Defaults, note: Callable[[str], None]) -> None:
        self._service = service
        self._defaults = defaults
        self._note = note
        self._left_out: set[str] = set()
        self.bodies = HeldBodies()
        self._paths: dict[str, tuple[str, Endpoint]] = {
            "/": ("GET", self._greeting),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._model),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/responses": ("POST", self._responses),
            "/v1/messages": ("POST", self._messages),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/embeddings": ("POST", self._embeddings),
        }

    def asgi(self, rules: Rules) -> ASGIApp:
        """The application behind its gate."""
        self._service.quotes = bool(rules.key_hash)
        routes = [Route(path, self._guarded(act), methods=[method]) for path, (method, act) in self._paths.items()]
        inner = Starlette(routes=routes, exception_handlers={HTTPException: self._not_here})
        app: ASGIApp = RequestGate(self._counted(inner), rules)
        if rules.origins:
            app = CORSMiddleware(
                app, allow_origins=list(rules.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        return app

    # --- the paths --------------------------------------------------------------------------------------------------

    async def _greeting(self, request: Request) -> ASGIApp:
        return Response(f"privatellm serves {self._service.names[0]} at /v1\n", media_type="text/plain")

    async def _health(self, request: Request) -> ASGIApp:
        ready = self._service.ready
        return json_response(msgspec.json.encode({"status": "ok" if ready else "loading"}), 200 if ready else 503)

    async def _metrics(self, request: Request) -> ASGIApp:
        service = self._service
        service.watch()
        text = service.metrics.text(waiting=service.waiting, running=service.running, loaded=service.ready)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> ASGIApp:
        names = self._service.names
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        models = [self._model_object(name) for name in names]
        return json_response(msgspec.json.encode({"object": "list", "data": models, **ends}))

    async def _model(self, request: Request) -> ASGIApp:
        name = self._service.check_name(request.path_params["name"])
        return json_response(msgspec.json.encode(self._model_object(name)))

    def _model_object(self, name: str) -> dict[str, object]:
        """A model in both protocols, whose fields do not contradict each other."""
        facts = self._service.facts
        loaded: dict[str, object] = {}
        if facts is not None:
            limit = facts.context_limit
            loaded = {"context_length": limit, "max_model_len": limit, "capabilities": _capabilities(facts)}
        started = self._service.started
        ours = {"object": "model", "created": started, "owned_by": "privatellm"}
        active = {"lifecycle": "active"}
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
        return {"id": name, **ours, "type": "model", "display_name": name, "created_at": when, **active, **loaded}

    async def _chat(self, request: Request) -> ASGIApp:
        body = await body_of(request, ChatRequest)
        self._leave_out(body.foreign_tools)
        answers = ChatAnswers(self._service, body, self._defaults, client_of(request, body.user))
        if body.stream:
            return EventStream(answers.chunks(), "openai", failure)
        return self._whole(answers.whole, request)

    async def _completions(self, request: Request) -> ASGIApp:
        body = await body_of(request, CompletionRequest)
        completions = Completions(self._service, body, self._defaults, client_of(request, body.user))
        if body.stream:
            return EventStream(completions.chunks(), "openai", failure)
        return self._whole(completions.whole, request)

    async def _responses(self, request: Request) -> ASGIApp:
        body = await body_of(request, ResponsesRequest)
        self._leave_out(body.foreign_tools)
        client = client_of(request, body.user or body.prompt_cache_key)
        answer = ResponseAnswer(self._service, body, self._defaults, client)
        if body.stream:
            return EventStream(answer.events(), "openai", openai_responses.failure)
        return self._whole(answer.whole, request)

    async def _messages(self, request: Request) -> ASGIApp:
        body = await body_of(request, MessagesRequest)
        self._leave_out(body.foreign_tools)
        client = client_of(request, body.metadata.user_id if body.metadata else None)
        answer = MessageAnswer(self._service, body, self._defaults, client)
        if body.stream:
            return EventStream(answer.events(), "anthropic", anthropic_messages.failure, ping=answer.ping)
        return self._whole(answer.whole, request)

    async def _count_tokens(self, request: Request) -> ASGIApp:
        body = await body_of(request, CountRequest)
        return self._whole(lambda: anthropic_messages.count_tokens(self._service, body, self._defaults), request)

    def _leave_out(self, kinds: list[str]) -> None:
        """Tell the person once of each kind of tool that the model is not told of."""
        for kind in kinds:
            if kind not in self._left_out and len(self._left_out) < _MOST_NOTES:
                self._left_out.add(kind)
                self._note(
                    f"a client offers the tool {kind[:50]}, which only its maker's own servers run: the model is not "
                    "told of it"
                )

    async def _embeddings(self, request: Request) -> ASGIApp:
        raise Refused("This server has a model that writes, and none that makes embeddings.", 404)

    # --- around them ------------------------------------------------------------------------------------------------

    def _whole(self, work: Callable[[], Awaitable[bytes]], request: Request) -> ASGIApp:
        async def answer() -> Response:
            try:
                return json_response(await work())
            except Refused as refused:
                return refusal_response(refused, protocol_of(request.url.path))
            except Exception as error:
                return self._failed(error, request)

        return WholeAnswer(answer)

    def _failed(self, error: Exception, request: Request) -> Response:
        """The answer to a request that met a mistake of ours, which is told to the person."""
        self._note(f"a request failed: {_place(error)}")
        refused = Refused("The server failed at this request; its own output says where.", 500)
        return refusal_response(refused, protocol_of(request.url.path))

    def _guarded(self, act: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """``act``, whose refusals and mistakes become errors of the protocol."""

        async def guarded(request: Request) -> Response:
            try:
                return await act(request)  # type: ignore[return-value]  # any ASGI application will do
            except Refused as refused:
                return refusal_response(refused, protocol_of(request.url.path))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return self._failed(error, request)

        return guarded

    async def _not_here(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        advice = "docs/serve.md lists the paths"
        if f"/v1{path}" in self._paths:
            advice = f"it is /v1{path}, so /v1 is missing at the end of the client's base URL"
        elif path.startswith("/v1/v1/") and path.removeprefix("/v1") in self._paths:
            advice = f"it is {path.removeprefix('/v1')}, so take /v1 from the end of the client's base URL"
        refused = Refused(f"There is no {request.method} {path[:200]} here: {advice}.", error.status_code)
        return refusal_response(refused, protocol_of(path))

    def _counted(self, app: ASGIApp) -> ASGIApp:
        """``app``, whose answers are counted by path and status. Unknown paths count together."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._service.metrics.requested(path if path in self._paths else "other", message["status"])
                await send(message)

            try:
                with self.bodies.request(scope):
                    await app(scope, receive, noting)
            except Exception as error:
                self._note(f"a request failed: {_place(error)}")
                raise

        return counted


def _capabilities(facts: ModelFacts) -> dict[str, object]:
    """What the model can do, in the form of Anthropic's protocol, of which every key must be there."""
    yes, no = {"supported": True}, {"supported": False}
    thinks = facts.reasoning is not None
    effort = yes if facts.reasoning is not None and facts.reasoning.effort else no
    return {
        "image_input": yes if facts.sight is not None else no,
        "structured_outputs": yes if facts.has_tokenizer else no,
        "effort": {**effort, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), effort)},
        "thinking": {
            "supported": thinks,
            "types": {"enabled": yes, "disabled": yes, "adaptive": yes, "between_tools": no},
        },
        **dict.fromkeys(("batch", "citations", "code_execution", "pdf_input", "context_management"), no),
        "server_tools": {**no, "code_execution": no, "web_search": no},
    }


def client_of(request: Request, user: str | None = None) -> str:
    """The client of a request, as far as it can be told. One client's requests delay another's by at most one.

    Programs that use the same package look alike. They are told apart by a digest of the key that they send, or by the
    field for the user.
    """
    address = request.client.host if request.client is not None else ""
    key = request.headers.get("authorization", "") + request.headers.get("x-api-key", "")
    digest = blake2b(key.encode(), digest_size=8).hexdigest()
    return "\0".join([address, request.headers.get("user-agent", "")[:200], digest, (user or "")[:200]])


def _place(error: Exception) -> str:
    """Kind and place of an error, without its text: that may hold some of a request."""
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {PurePath(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return f"{type(error).__name__}{where}"


# --- bodies of requests ----------------------------------------------------------------------------------------------


LARGEST = 72_000_000
"""Maximum bytes of a body: all pictures that a question may hold, in base64, and a context of a million tokens, which
takes about 5 MB."""
SECONDS = 30.0
"""Seconds within which a body must be complete."""
MOST_HELD = 256_000_000
"""Maximum bytes of the bodies of all requests that are being read, wait, or are being answered."""
_DRAINED = 4
"""Multiple of :data:`LARGEST` that is read and dropped, so that a client that sends too much can read the refusal."""
_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")

_HELD = "privatellm.held_body"
"""Key of a scope for what counts the request's body."""

T = TypeVar("T")


class HeldBodies:
    """Counts the bytes of bodies that are in memory, so that many clients together do not fill it."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def request(self, scope: Scope) -> Iterator[None]:
        """One request, whose body :func:`body_of` counts until the end of the context."""
        held = scope[_HELD] = _HeldBody(self)
        try:
            yield
        finally:
            held.add(-held.size)


class _HeldBody:
    def __init__(self, bodies: HeldBodies) -> None:
        self.size = 0
        self._bodies = bodies

    def add(self, size: int) -> None:
        """Raises Refused if there is too much already."""
        if size > 0 and self._bodies.total + size > MOST_HELD:
            raise Refused("Other requests take all the room there is for requests: try again later.", 429)
        self.size += size
        self._bodies.total += size


async def body_of(request: Request, kind: type[T]) -> T:
    """The body of ``request`` as a ``kind``. Fields that ``kind`` does not have are ignored.

    Raises Refused for a body that is too large, too slow, no JSON, or of wrong types; ClientDisconnect if its sender
    leaves.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise Refused(f"The body must be JSON: send it with Content-Type: application/json, not {media[:100]!r}.", 415)
    try:
        async with asyncio.timeout(SECONDS):
            body = await _read(request, LARGEST, request.scope[_HELD])
    except TimeoutError:
        raise Refused(f"The body did not arrive within {SECONDS:.0f} seconds.", 408) from None
    return decoded(body, kind)


def decoded(body: bytes, kind: type[T]) -> T:
    """Raises Refused, with the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _WHERE.search(text)
        where = found.group(1) if found else ""
        what = text[: found.start()] if found else text
        raise Refused(
            f"{where or 'The body'}: {what.replace('`', '')}.", parameter=where.split("[")[0] or None
        ) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"The body is not JSON: {error}.") from None


async def _read(request: Request, largest: int, held: _HeldBody) -> bytes:
    body = bytearray()
    dropped = 0
    async for chunk in request.stream():
        if not dropped and len(body) + len(chunk) <= largest:
            held.add(len(chunk))
            body += chunk
            continue
        dropped += len(body) + len(chunk)
        body.clear()
        if dropped > _DRAINED * largest:
            break
    if dropped:
        raise Refused(f"The body is larger than {byte_size(largest)}, the limit here.", 413)
    return bytes(body)
