"""The server itself: clients that say no more, old ones, wrong addresses, and its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import openai
import pytest
from starlette.types import Receive, Scope, Send

from app.engine_client import EngineClient
from app.serve import server as http_server
from app.serve.listening import ListenAddress, listen
from app.serve.model_service import ModelService
from app.serve.replies import EventStream
from app.serve.server import HttpServer
from engine.ipc.messages import Load
from tests.app.serve.served import MODEL, Served, raw
from tests.support.eventually import eventually

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}).encode()


def half_closed(port: int, head: str, body: bytes = BODY) -> bytes:
    """The answer to a client that says at once that it sends no more."""
    lines = f"{head}\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(lines.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while data := connection.recv(65536):
            said += data
        return said


def test_a_client_that_sends_no_more_gets_its_answer(server: Served) -> None:
    for head in (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close",
        "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost",
        "POST /v1/chat/completions HTTP/1.0",
    ):
        said = half_closed(server.port, head)
        assert said.split(b" ", 2)[1] == b"200" and b"chat.completion" in said
    # Without its whole body there is nothing to answer.
    assert b" 200 " not in half_closed(server.port, "POST /v1/chat/completions HTTP/1.0", BODY[:-1])
    eventually(lambda: server.service.running == 0)


def test_only_a_request_of_the_first_version_may_name_no_host(server: Served) -> None:
    assert b" 200 " in raw(server.port, b"GET /health HTTP/1.0\r\n\r\n")
    assert b" 403 " in raw(server.port, b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n")
    assert b" 200 " not in raw(server.port, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "kind", "advice"),
    [
        ("/chat/completions", b'{"error":{', b"it is /v1/chat/completions, so /v1 is missing"),
        ("/models", b'{"error":{', b"it is /v1/models, so /v1 is missing"),
        ("/v1/v1/messages", b'{"type":"error"', b"it is /v1/messages, so take /v1 from the end"),
        ("/v1/rerank", b'{"error":{', b"docs/serve.md"),
    ],
)
def test_a_base_url_that_is_wrong_is_said(server: Served, path: str, kind: bytes, advice: bytes) -> None:
    said = raw(server.port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert b" 404 " in said and kind in said and advice in said


def test_no_name_tells_where_the_model_lies(server: Served, tmp_path: Path) -> None:
    said = raw(server.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    found = json.loads(said.partition(b"\r\n\r\n")[2])
    assert [model["id"] for model in found["data"]] == [MODEL, "other"]
    service = ModelService(EngineClient(), Load(id=1, model=str(tmp_path)), names=["mine"])
    assert service.names == (tmp_path.name, "mine")
    assert ModelService(EngineClient(), Load(id=1, model="maker/model")).names == ("maker/model",)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", b'{"error":{"message":"The server is being stopped."'),
        ("/v1/responses", b'{"error":{"message":"The server is being stopped."'),
        ("/v1/messages", b'{"type":"error","error":{"type":"overloaded_error"'),
    ],
)
def test_an_answer_that_the_end_cuts_says_so(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: bytes, streams: bool
) -> None:
    """Also where nothing was said before the time for it was over."""
    monkeypatch.setattr(http_server, "_GRACE_S", 0)

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if not streams:
            asked.set()
            await asyncio.Event().wait()

        async def frames() -> AsyncGenerator[bytes, None]:
            yield b"data: begun\n\n"
            asked.set()
            await asyncio.Event().wait()

        await EventStream(frames(), "openai", lambda refused: f"failed: {refused}".encode())(scope, receive, send)

    async def serve() -> bytes:
        listener = listen(ListenAddress("127.0.0.1", 0))
        server = HttpServer(endless)
        serving = asyncio.create_task(server.run_on(listener))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await asyncio.wait_for(asked.wait(), 60)
        server.leave()
        said = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await serving
        return said

    asked = asyncio.Event()
    said = asyncio.run(serve())
    if streams:
        assert (
            b"data: begun" in said and b"failed: The server is being stopped." in said and said.endswith(b"0\r\n\r\n")
        )
    else:
        assert said.startswith(b"HTTP/1.1 503 ") and kind in said


def test_every_prompt_is_looked_at_before_the_first_is_answered(server: Served) -> None:
    before = dict(server.service.metrics.answers)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wrong = (["x", ""], [[5], [999]], ["x", "y" * 600])
        for prompt, said in zip(wrong, ("empty", "999", "maximum context length"), strict=True):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=said):
                    client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, stream=stream)  # type: ignore[call-overload]
    assert server.service.metrics.answers == before
