"""The link listener: what it lets in, what it closes silently, how many at a time, and the two ports."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import link_listener as listeners
from discovery.errors import LinkListenerError
from discovery.frames import MAX_FRAME, Deadline, FrameError, receive_exactly, receive_frame, send_frame
from discovery.link_listener import MAX_BODY, LinkListener, bind_pair, dial
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.random_examples import examples


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    opened = LinkListener.open("127.0.0.1")
    yield opened
    opened.close()


def echo(connection: socket.socket, body: bytes, address: tuple[str, int]) -> None:
    with contextlib.closing(connection):
        connection.sendall(body + address[0].encode())


def all_of(connection: socket.socket) -> bytes:
    connection.settimeout(PATIENCE_S)
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(4096):
            received += piece
    return received


def test_each_kind_goes_to_its_handler(listener: LinkListener) -> None:
    listener.register("echo", echo)
    listener.register("other", lambda connection, body, address: (connection.sendall(b"other"), connection.close())[1])
    for kind, body, answer in (("echo", b"x" * MAX_BODY, b"x" * MAX_BODY + b"127.0.0.1"), ("other", b"", b"other")):
        with contextlib.closing(dial(("127.0.0.1", listener.port), kind, body)) as connection:
            assert all_of(connection) == answer


def test_a_handler_that_fails_ends_its_connection_alone(
    listener: LinkListener, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(connection: socket.socket, body: bytes, address: tuple[str, int]) -> None:
        raise ZeroDivisionError("of one connection")

    failed: list[threading.ExceptHookArgs] = []
    listener.register("bad", fail)
    listener.register("echo", echo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        for kind, answer in (("bad", b""), ("echo", b"x127.0.0.1")):
            with contextlib.closing(dial(("127.0.0.1", listener.port), kind, b"x")) as connection:
                assert all_of(connection) == answer
    assert not failed and "of one connection" in caplog.text


def test_a_connection_that_was_handed_on_stays_open(listener: LinkListener) -> None:
    kept: list[socket.socket] = []
    taken = threading.Event()
    listener.register("link", lambda connection, body, address: (kept.append(connection), taken.set())[1])
    with contextlib.closing(dial(("127.0.0.1", listener.port), "link")) as connection:
        assert taken.wait(PATIENCE_S)
        listener.close()
        kept[0].sendall(b"still here")
        assert receive_exactly(connection, 10, Deadline(10)) == b"still here"
        kept[0].close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"pvLM\x01\x04\x00\x00nope",
        b"pvLM\x02\x04\x00\x00echo",
        b"pvLM\x01\x00\x00\x00",
        b"pvLM\x01\x11\x00\x00" + b"e" * 17,
        b"pvLM\x01\x04\x04\x01echo" + b"x" * 1025,
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_whatever_is_no_preamble_is_closed_without_a_word(listener: LinkListener, sent: bytes) -> None:
    listener.register("echo", echo)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S) as connection:
        with contextlib.suppress(OSError):  # it may be closed before all of this is sent
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        assert all_of(connection) == b""


def test_a_kind_that_nobody_serves_is_closed(listener: LinkListener) -> None:
    with contextlib.closing(dial(("127.0.0.1", listener.port), "echo")) as connection:
        assert all_of(connection) == b""


def test_who_says_nothing_is_cut_off(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "PREAMBLE_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S) as silent:
        silent.sendall(b"pv")
        assert all_of(silent) == b""


def test_one_machine_cannot_take_all_places(listener: LinkListener) -> None:
    listener.register("echo", echo)
    held = [
        socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S)
        for _ in range(listeners._MAX_PER_ADDRESS)
    ]
    try:
        eventually(lambda: len(listener._open) == listeners._MAX_PER_ADDRESS)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S) as refused:
            assert all_of(refused) == b""
        with socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S, ("127.0.0.2", 0)) as another:
            another.sendall(b"pvLM\x01\x04\x00\x02echohi")
            assert all_of(another) == b"hi127.0.0.2"
    finally:
        for connection in held:
            connection.close()


def test_closing_leaves_no_thread_and_no_port(listener: LinkListener) -> None:
    listener.register("echo", echo)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S) as waiting:
        eventually(lambda: listener._open)
        listener.close()
        listener.close()
        assert all_of(waiting) == b""
    with pytest.raises(LinkListenerError, match="Nobody answers"):
        dial(("127.0.0.1", listener.port), "echo", seconds=2)
    eventually(lambda: not any(thread.name.startswith("link-listener") for thread in threading.enumerate()))
    LinkListener.open("127.0.0.1", listener.port).close()


def test_the_two_ports_are_neighbours_and_both_free() -> None:
    pair = bind_pair("127.0.0.1", 0)
    with contextlib.closing(pair.listener), socket.create_server(("127.0.0.1", pair.control)):
        assert pair.listener.getsockname()[1] == pair.control + 1
        with pytest.raises(LinkListenerError, match=f"Port {pair.control} or {pair.control + 1} .* is in use"):
            bind_pair("127.0.0.1", pair.control)


def test_a_second_process_takes_the_next_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    base = bind_pair("127.0.0.1", 0)
    monkeypatch.setattr(listeners, "USUAL_PORT", base.control)
    base.listener.close()
    first = bind_pair("127.0.0.1")
    with contextlib.closing(first.listener):
        assert first.control == base.control
        second = bind_pair("127.0.0.1")
        with contextlib.closing(second.listener):
            assert second.control >= first.control + 2 and (second.control - first.control) % 2 == 0


def test_all_addresses_are_listened_on_by_default() -> None:
    pair = bind_pair(port=0)
    listener = LinkListener(pair.listener)
    try:
        listener.register("echo", echo)
        with contextlib.closing(dial(("127.0.0.1", listener.port), "echo", b"4")) as connection:
            assert all_of(connection).endswith(b"127.0.0.1")
        if socket.has_dualstack_ipv6():
            with contextlib.closing(dial(("::1", listener.port), "echo", b"6")) as connection:
                assert all_of(connection) == b"6::1"
    finally:
        listener.close()


@pytest.mark.parametrize(("host", "port", "match"), [("192.0.2.77", 0, "no.* address"), ("127.0.0.1", 65535, "65534")])
def test_what_cannot_be_listened_on_is_named(host: str, port: int, match: str) -> None:
    with pytest.raises(LinkListenerError, match=match):
        bind_pair(host, port)


def test_too_large_a_body_is_not_sent(listener: LinkListener) -> None:
    with pytest.raises(ValueError, match="1024"):
        dial(("127.0.0.1", listener.port), "echo", bytes(MAX_BODY + 1))


@settings(max_examples=examples(12), deadline=None)
@given(st.binary(max_size=40), st.integers(0, 30))
def test_frames_come_whole_or_not_at_all(content: bytes, limit: int) -> None:
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, content, Deadline(5))
        if len(content) <= limit:
            assert receive_frame(right, Deadline(5), limit) == content
        else:
            with pytest.raises(FrameError, match="where"):
                receive_frame(right, Deadline(5), limit)


def test_a_frame_cut_short_a_slow_one_and_a_large_one() -> None:
    left, right = socket.socketpair()
    with right:
        with left:
            with pytest.raises(ValueError, match="8193"):
                send_frame(left, bytes(MAX_FRAME + 1), Deadline(5))
            with pytest.raises(FrameError, match="too long"):
                receive_frame(right, Deadline(0.05))
            left.sendall(b"\x00\x05abc")
        with pytest.raises(FrameError, match="closed"):
            receive_frame(right, Deadline(5))


class DarwinListener(socket.socket):
    """A listener that gives its first connection as Darwin gives one that was reset before it was accepted, fails with
    its second, and is not woken by being closed."""

    taken = 0

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        self.taken += 1
        if self.taken == 2:
            connection.close()
            raise RuntimeError("on purpose")
        return connection, None if self.taken == 1 else address

    def shutdown(self, how: int) -> None:
        raise OSError(57, "Socket is not connected")


def test_a_connection_without_an_address_does_not_end_the_link_listener() -> None:
    listener = DarwinListener(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    opened = LinkListener(listener)
    opened.register("echo", echo)
    try:
        for answer in (b"", b"", b"x127.0.0.1"):
            with (
                contextlib.suppress(LinkListenerError),
                contextlib.closing(dial(("127.0.0.1", opened.port), "echo", b"x")) as one,
            ):
                assert all_of(one) == answer
        assert listener.taken == 3
    finally:
        opened.close()
    assert not opened._thread.is_alive()
    eventually(lambda: opened._open == {})
