"""What strangers, and peers that misbehave, get from an envoy: nothing; and what an engine makes of nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.identity import Identity
from discovery.tls import TLS_NAME
from engine.cluster.transport.envoy import EnvoyExchange, connect_envoy
from engine.cluster.transport.envoy_process import (
    BYE,
    CONTROL,
    FRAME,
    LAST,
    MESSAGE_LIMIT,
    MORE,
    SERVICE,
    EnvoyPeer,
    EnvoyPorts,
    EnvoyReady,
    EnvoySetup,
    EnvoyTargets,
    _reason,
)
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from tests.engine.cluster.linked_nodes import LinkedNodes, make_identity
from tests.support.engine_forks import forked_module
from tests.support.eventually import eventually
from tests.support.random_examples import examples

EPOCH = "the epoch"
PATIENCE_S = 120.0
"""A test that hangs fails after so long."""


def envoy_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    descriptor = connection.fileno()
    return forked_module("engine.cluster.transport.envoy_process", [str(descriptor)], pass_fds=[descriptor])  # type: ignore[return-value]


def _rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class LoneEnvoy:
    """The envoy of rank 1 of two, driven by the test instead of an engine; the test plays rank 0 or a stranger."""

    def __init__(self) -> None:
        self.mine, self.identity = make_identity(), make_identity()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = envoy_process(theirs)
        members = tuple(
            Member(rank, one.node_id, one.certificate_pem) for rank, one in enumerate((self.mine, self.identity))
        )
        self.exchange = EnvoyExchange(Epoch(EPOCH, 1, members, bytes(32)), ours, self.process)
        peer = EnvoyPeer(rank=0, node_id=self.mine.node_id, certificate=self.mine.certificate_pem, name="zero")
        self.exchange.send_control(
            EnvoySetup(
                epoch=EPOCH,
                rank=1,
                certificate=self.identity.certificate_pem,
                private_key=self.identity.key_pem,
                peers=[peer],
                addresses=["192.0.2.1", "127.0.0.1"],  # nobody has the first: it is left out
                seconds=PATIENCE_S,
            )
        )
        self.ports = self.exchange.receive_control(EnvoyPorts, time.monotonic() + PATIENCE_S).ports
        self.port = self.ports["127.0.0.1"]
        self.exchange.send_control(EnvoyTargets(targets={}))

    def call(
        self,
        identity: Identity | None,
        messages: list[bytes] | None = None,
        epoch: str = EPOCH,
        rank: str = "0",
        method: str = SERVICE,
        wait: threading.Event | None = None,
    ) -> list[bytes]:
        """What the envoy answers to a stream; raises grpc.RpcError."""
        if identity is None:
            channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        else:
            credentials = grpc.ssl_channel_credentials(
                self.identity.certificate_pem, identity.key_pem, identity.certificate_pem
            )
            channel = grpc.secure_channel(
                f"127.0.0.1:{self.port}", credentials, (("grpc.ssl_target_name_override", TLS_NAME),)
            )

        def requests() -> Iterator[bytes]:
            yield from messages or ()
            if wait is not None:
                wait.wait(PATIENCE_S)

        with channel:
            stream = channel.stream_stream(method)
            return list(stream(requests(), metadata=(("epoch", epoch), ("rank", rank)), timeout=PATIENCE_S))

    def close(self) -> None:
        self.exchange.close()


@pytest.fixture
def envoy() -> Iterator[LoneEnvoy]:
    lone = LoneEnvoy()
    yield lone
    lone.close()


@pytest.fixture(scope="module")
def refusing() -> Iterator[LoneEnvoy]:
    """An envoy to which nobody comes who is let in."""
    lone = LoneEnvoy()
    yield lone
    lone.close()


def test_a_client_without_a_certificate_gets_nothing(refusing: LoneEnvoy) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        refusing.call(None)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_stranger_gets_nothing(refusing: LoneEnvoy) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        refusing.call(make_identity())
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "changes", [{"epoch": "another"}, {"rank": "1"}, {"rank": "7"}, {"rank": "zero"}, {"rank": ""}]
)
def test_a_peer_with_the_wrong_words_gets_nothing(refusing: LoneEnvoy, changes: dict[str, str]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        refusing.call(refusing.mine, **changes)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.details() == ""


@pytest.mark.parametrize("method", ["/privatellm.Envoy/Other", "/other/Exchange", "/privatellm.Control/Hello"])
def test_there_is_one_method(refusing: LoneEnvoy, method: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        refusing.call(refusing.mine, method=method)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_an_address_that_cannot_be_bound_is_left_out(refusing: LoneEnvoy) -> None:
    assert list(refusing.ports) == ["127.0.0.1"]


def test_a_second_stream_of_the_same_node_is_refused(envoy: LoneEnvoy) -> None:
    hold = threading.Event()
    first = threading.Thread(target=envoy.call, args=(envoy.mine, [bytes((BYE,))]), kwargs={"wait": hold})
    first.start()
    assert not envoy.exchange.receive_control(EnvoyReady, time.monotonic() + PATIENCE_S).problem
    with pytest.raises(grpc.RpcError) as refused:
        envoy.call(envoy.mine)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    hold.set()
    first.join(PATIENCE_S)
    assert not first.is_alive()


@pytest.mark.parametrize(
    "message",
    [b"", bytes((CONTROL,)), b"\xff nonsense", bytes((MORE,)) + bytes(MESSAGE_LIMIT)],
    ids=["empty", "control", "nonsense", "too large"],
)
def test_a_message_that_no_envoy_sends_ends_the_stream(envoy: LoneEnvoy, message: bytes) -> None:
    hold = threading.Event()

    def call() -> None:
        with contextlib.suppress(grpc.RpcError):
            envoy.call(envoy.mine, [message], wait=hold)

    thread = threading.Thread(target=call)
    thread.start()
    assert not envoy.exchange.receive_control(EnvoyReady, time.monotonic() + PATIENCE_S).problem
    envoy.exchange.send((b"mine",), 100)
    with pytest.raises(PeerLost) as lost:
        envoy.exchange.receive()
    assert lost.value.ranks == (0,)
    assert lost.value.reason == "its envoy ended the exchange"
    hold.set()
    thread.join(PATIENCE_S)


def test_a_peer_that_sends_ahead_without_end_is_refused(envoy: LoneEnvoy) -> None:
    hold = threading.Event()

    def call() -> None:
        with contextlib.suppress(grpc.RpcError):
            envoy.call(envoy.mine, [bytes((LAST,)) + b"more"] * 10, wait=hold)

    thread = threading.Thread(target=call)
    thread.start()
    assert not envoy.exchange.receive_control(EnvoyReady, time.monotonic() + PATIENCE_S).problem
    frame = FRAME.size + len(b"more")
    eventually(lambda: readable(envoy.exchange._socket) >= 10 * frame)
    with pytest.raises(RingProtocolError, match="more than the exchange asks for"):
        for _ in range(10):
            envoy.exchange.send((b"mine",), 100)
            envoy.exchange.receive()
    hold.set()
    thread.join(PATIENCE_S)


def readable(connection: socket.socket) -> int:
    """Bytes that have arrived and were not received yet."""
    return int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_random_bytes_on_its_port_do_not_end_it(envoy: LoneEnvoy) -> None:
    for seed in range(20):
        with socket.create_connection(("127.0.0.1", envoy.port)) as connection:
            connection.sendall(bytes((seed * 37 + index * 11) % 256 for index in range(500)))
    hold = threading.Event()
    hold.set()
    threading.Thread(target=envoy.call, args=(envoy.mine, [bytes((LAST,)) + b"hello"]), kwargs={"wait": hold}).start()
    assert not envoy.exchange.receive_control(EnvoyReady, time.monotonic() + PATIENCE_S).problem
    envoy.exchange.send((b"mine",), 100)
    assert [bytes(part) for part in envoy.exchange.receive()] == [b"hello", b"mine"]


def test_an_envoy_that_is_told_nonsense_ends() -> None:
    for said in (b"\xff" * 100, FRAME.pack(5, CONTROL, 0) + b"hello", FRAME.pack(3, LAST, 0) + b"abc", b""):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = envoy_process(theirs)
            theirs.close()
            ours.sendall(said)
            ours.shutdown(socket.SHUT_WR)
            assert process.wait(PATIENCE_S) == 0


def test_nobody_to_connect_to_is_said_in_time() -> None:
    lone = LoneEnvoy.__new__(LoneEnvoy)
    lone.mine, lone.identity = make_identity(), make_identity()
    ours, theirs = socket.socketpair()
    with theirs:
        process = envoy_process(theirs)
    exchange = EnvoyExchange(Epoch(EPOCH, 1, (), bytes(32)), ours, process)
    peer = EnvoyPeer(rank=0, node_id="0" * 64, certificate=lone.mine.certificate_pem, name="the laptop")
    exchange.send_control(
        EnvoySetup(
            epoch=EPOCH,
            rank=1,
            certificate=lone.identity.certificate_pem,
            private_key=lone.identity.key_pem,
            peers=[peer],
            addresses=["127.0.0.1"],
            seconds=0.3,
        )
    )
    exchange.receive_control(EnvoyPorts, time.monotonic() + PATIENCE_S)
    exchange.send_control(EnvoyTargets(targets={}))
    assert "the laptop" in exchange.receive_control(EnvoyReady, time.monotonic() + PATIENCE_S).problem
    exchange.close()
    assert process.poll() is not None


@settings(max_examples=examples(20), deadline=None)
@given(noise=st.binary(min_size=1, max_size=400))
def test_an_engine_refuses_what_no_envoy_says(noise: bytes) -> None:
    exchange, other = bare_exchange()
    other.sendall(noise)
    other.shutdown(socket.SHUT_WR)
    exchange.send((b"",), 10)
    try:
        exchange.receive()
    except (PeerLost, RingProtocolError):
        pass
    else:  # the noise happened to be a whole contribution
        assert FRAME.unpack_from(noise)[1] in (MORE, LAST)
    exchange.close()
    other.close()


def bare_exchange() -> tuple[EnvoyExchange, socket.socket]:
    """An engine's side whose envoy is the test."""
    members = tuple(Member(rank, str(rank) * 64, b"") for rank in range(2))
    ours, theirs = socket.socketpair()
    return EnvoyExchange(Epoch(EPOCH, 0, members, bytes(32)), ours, _Ended()), theirs  # type: ignore[arg-type]


class _Ended:
    """A process that has ended already."""

    pid = 0

    def wait(self, _: float = 0.0) -> int:
        return 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_rpc_error(grpc.StatusCode.UNKNOWN, "Stream removed (recvmsg:Connection reset by peer (104))"), "broke"),
        (_rpc_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; ipv4:192.0.2.1:9"), "broke"),
        (_rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max"), "broke"),
        (_rpc_error(grpc.StatusCode.PERMISSION_DENIED, ""), "does not know this machine"),
        (asyncio.CancelledError("Cancelling all calls"), "its envoy was closed"),
        (TimeoutError(), "no answer in time"),
    ],
)
def test_why_a_stream_ended_is_told_in_words_of_ours(error: BaseException, words: str) -> None:
    told = _reason(error)
    assert words in told and not re.search(r"[(:\d]|stream", told.lower())


def test_control_messages_are_read_one_by_one() -> None:
    exchange, other = bare_exchange()
    payload = msgspec.msgpack.encode(EnvoyReady())
    other.sendall(FRAME.pack(len(payload), CONTROL, 0) + payload + FRAME.pack(3, LAST, 1) + b"abc")
    assert exchange.receive_control(EnvoyReady, time.monotonic() + PATIENCE_S).problem == ""
    exchange.send((b"",), 10)
    assert [bytes(part) for part in exchange.receive()] == [b"", b"abc"]
    other.sendall(struct.pack(">I", 3))
    with pytest.raises(PeerLost, match="does not answer"):
        exchange.receive_control(EnvoyReady, time.monotonic() + 0.2)
    exchange.close()
    other.close()


def test_a_folder_called_engine_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked_nodes: Callable[..., LinkedNodes]
) -> None:
    """The envoy is a process that is started wherever the person happens to be."""
    for package in ("engine", "engine/cluster", "engine/cluster/transport"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("open('run', 'w')\n", encoding="utf-8")
    (tmp_path / "msgspec.py").write_text("open('run', 'w')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ring = linked_nodes(2).everywhere(lambda node: connect_envoy(node.links, node.epoch))
    for exchange in ring:
        exchange.send((b"x",), 10)
    assert [[bytes(part) for part in exchange.receive()] for exchange in ring] == [[b"x", b"x"]] * 2
    for exchange in ring:
        exchange.close()
    assert not (tmp_path / "run").exists()
