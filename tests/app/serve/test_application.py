"""Clients that break the rules: the server says so, or closes, and goes on."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.serve import application
from app.serve import server as http_server
from app.serve.anthropic_messages import MessagesRequest
from app.serve.application import decoded
from app.serve.asking import Defaults, merged
from app.serve.openai_chat import ChatRequest
from app.serve.openai_completions import CompletionRequest
from app.serve.openai_responses import ResponsesRequest
from app.serve.replies import Refused
from engine.ipc.messages import Message
from tests.app.serve.served import MODEL, Served, raw
from tests.support.eventually import eventually
from tests.support.random_examples import examples

KINDS = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
QUESTION = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 1}


def post(server: Served, body: bytes, *more: str, length: int | None = None) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
        *more,
    ]
    return raw(server.port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def status(said: bytes) -> int:
    return int(said.split(b" ", 2)[1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(sorted({name for kind in KINDS for name in kind.__struct_fields__}))
bodies_of_all_kinds = st.dictionaries(fields, json_values, max_size=5)


@given(bodies_of_all_kinds, st.sampled_from(KINDS))
@settings(max_examples=examples(12))
def test_any_json_is_taken_or_refused(fuzzed: dict[str, Any], kind: Any) -> None:
    base: dict[str, Any] = {**QUESTION, "input": "x", "prompt": "x"}
    try:
        request = decoded(json.dumps({**base, **fuzzed}).encode(), kind)
        if isinstance(request, CompletionRequest):
            request.generates(Defaults())
        else:
            request.generate(Defaults())
    except Refused as refused:
        assert refused.status == 400 and str(refused).endswith(".")


@given(st.binary(max_size=60), st.sampled_from(KINDS))
@settings(max_examples=examples(10))
def test_any_bytes_are_taken_or_refused(body: bytes, kind: Any) -> None:
    with pytest.raises(Refused):
        decoded(body, kind)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"messages":' * 50_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
    ids=["nothing", "no text", "deep", "deeper", "half a pair"],
)
def test_bodies_that_are_no_json(server: Served, body: bytes) -> None:
    said = post(server, body)
    assert status(said) == 400 and b"invalid_request_error" in said


def test_a_body_that_is_too_large_is_not_kept(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "LARGEST", 100_000)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", b"x" * 1_000_000, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 413 and b"larger than" in answer.read()
    # One without end is cut off.
    endless = post(server, b"x" * 2_000_000, length=10**12)
    assert endless == b"" or status(endless) == 413


def test_many_bodies_together_do_not_fill_the_memory(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    question = json.dumps(QUESTION).encode()
    monkeypatch.setattr(application, "MOST_HELD", 2 * len(question))
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {3 * len(question)}\r\n"
        slow.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + b" " * (len(question) + 1))
        eventually(lambda: status(post(server, question)) == 429)
    eventually(lambda: status(post(server, question)) == 200)


def test_a_body_that_never_ends_is_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "SECONDS", 0.05)
    assert status(post(server, b"{", length=100)) == 408


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: lo"], ids=["silent", "slow"])
def test_a_connection_that_asks_nothing_is_closed(
    server: Served, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.05)
    assert raw(server.port, begun) == b""


def test_too_many_connections_are_refused_in_the_form_of_the_protocol(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 0)
    for path, kind in (("/v1/messages", b'{"type":"error"'), ("/v1/models", b'{"error":{')):
        said = raw(server.port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())  # which it then closes
        assert status(said) == 503 and kind in said and b"connections are open" in said


def test_requests_that_are_no_http(server: Served) -> None:
    assert status(raw(server.port, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")) == 400  # TLS, to a port without it
    assert status(raw(server.port, b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n")) in (400, 431)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["Origin: http://evil.example"], 403),
        (["Sec-Fetch-Site: cross-site"], 403),
        (["Content-Type: text/plain"], 415),
        (["Origin: null", "Content-Type: text/plain"], 403),
    ],
)
def test_what_a_web_page_can_send_is_refused(server: Served, more: list[str], expected: int) -> None:
    body = msgspec.json.encode({**QUESTION, "model": MODEL})
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", *more, f"Content-Length: {len(body)}"]
    if not any(line.startswith("Content-Type") for line in more):
        lines.append("Content-Type: application/json")
    said = raw(server.port, "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
    assert status(said) == expected and b"access-control" not in said.lower()


def test_unknown_paths_and_methods_are_refused_in_the_form_of_the_protocol(server: Served) -> None:
    for line, expected, kind in (
        ("GET /x", 404, b'{"error":{'),
        ("GET /v1/chat/completions", 405, b'{"error":{'),
        ("GET /v1/messages/x/y", 404, b'{"type":"error"'),
        ("GET /v1/../../etc/passwd", 404, b'{"error":{'),
    ):
        said = raw(server.port, f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert status(said) == expected and kind in said


def test_a_client_that_vanishes_in_the_middle_of_its_body_leaves_nothing(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert status(post(server, msgspec.json.encode({**QUESTION, "model": MODEL}))) == 200
    assert not any("secret" in note for note in server.notes) and server.notes == []


def test_more_stop_texts_than_can_be_compared_are_refused(server: Served) -> None:
    said = post(server, json.dumps({**QUESTION, "stop": [str(number) for number in range(65)]}).encode())
    assert status(said) == 400 and b"64 at most" in said


def test_long_conversations_are_read_in_one_pass() -> None:
    """Each of these took minutes when every item copied those before it."""
    system = Message("system", "x" * 50)
    assert len(merged([system] * 100_000)[0].content) == 100_000 * 52 - 2
    call = b'{"type":"function_call","call_id":"1","name":"f","arguments":"{}"},'
    body = b'{"input":[' + call * 9_999 + b'{"role":"user","content":"x"}]}'
    messages = decoded(body, ResponsesRequest).generate(Defaults()).messages
    assert messages is not None and [len(message.tool_calls) for message in messages] == [9_999, 0]
