"""A machine that is not paired gets nothing: walked over every method of the control plane and every kind of the link
listener, while this machine is lent, holds a ring's epoch open and has a name that would be recognised."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import grpc
import msgspec
import pytest

from discovery.frames import Deadline, FrameError, receive_frame, send_frame
from discovery.identity import Identity
from discovery.link_listener import dial
from discovery.pairing import TypingSide
from discovery.peers import new_peer
from discovery.tls import TLS_NAME, client_context
from engine.cluster.membership.control_messages import LENDING, SERVICE
from engine.cluster.membership.node import Node
from engine.cluster.transport.epochs import Epoch, LinkRequest, Member, Purpose, Transport
from engine.cluster.worker.lending import ClusterWorker
from engine.ipc.messages import OpenNetwork
from tests.engine.cluster.paired_nodes import make_identity
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("no_keyring")

NAME = "Annas Geheimrechner"
FRIEND = "Bertas Freundin"
EPOCH = "0123456789abcdef"


@dataclass
class Target:
    node: Node
    friend: Identity
    stranger: Identity

    @property
    def control(self) -> tuple[str, int]:
        return "127.0.0.1", self.node.server.port

    @property
    def listener(self) -> tuple[str, int]:
        return "127.0.0.1", self.node.listener.port

    def secrets(self) -> list[bytes]:
        """What must not be in anything that a stranger receives."""
        paired = self.friend.certificate_der
        return [NAME.encode(), FRIEND.encode(), self.friend.node_id.encode(), paired[60:110], EPOCH.encode()]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("unpaired")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
        identity, peers = make_identity(folder / "anna")
        friend, _ = make_identity(folder / "berta")
        stranger, _ = make_identity(folder / "mallory")
        peers.add(new_peer(friend.certificate_der, FRIEND))
        node = Node(identity, peers, OpenNetwork(id=1, name=NAME, listen="127.0.0.1:0", lend=True))
        lender = ClusterWorker(node)
        node.show_code()
        # An epoch that is being formed: links of the friend are waited for, of every purpose and transport.
        member = Member(0, friend.node_id, friend.certificate_pem)
        here = Member(1, identity.node_id, identity.certificate_pem)
        epoch = Epoch(EPOCH, 1, (member, here), bytes(32), ("127.0.0.0/8",))
        for purpose, transport in itertools.product(get_args(Purpose), get_args(Transport)):
            node.links.expect(epoch, purpose, transport, member)
        yield Target(node, friend, stranger)
        lender.close()
        node.close()


def methods_of(node: Node) -> list[str]:
    """As the server has them, not as a list somewhere says."""
    return sorted(node._table_of_methods())


def test_the_walk_is_over_all_methods(target: Target) -> None:
    assert methods_of(target.node) == sorted(["Hello", "Beat", *LENDING])


CREDENTIALS = ("no TLS", "no certificate", "a certificate of its own", "the friend's certificate without its key")


def channel_of(target: Target, shown: str) -> grpc.Channel:
    address = f"127.0.0.1:{target.node.server.port}"
    options = (("grpc.ssl_target_name_override", TLS_NAME), ("grpc.enable_retries", 0))
    roots = target.node.identity.certificate_pem
    if shown == "no TLS":
        return grpc.insecure_channel(address, options)
    if shown == "no certificate":
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options)
    stranger = target.stranger
    certificate = stranger.certificate_pem if shown == CREDENTIALS[2] else target.friend.certificate_pem
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, stranger.key_pem, certificate), options)


@pytest.mark.parametrize("shown", CREDENTIALS)
@pytest.mark.parametrize("method", [*sorted(["Hello", "Beat", *LENDING]), "Nothing"])
def test_no_method_answers(target: Target, method: str, shown: str) -> None:
    bodies = iter([b"\x80"])
    with channel_of(target, shown) as channel:
        path = f"/{SERVICE}/{method}"
        for call in (channel.unary_unary(path), channel.unary_stream(path), channel.stream_unary(path)):
            with pytest.raises(grpc.RpcError) as refused:
                answer: Any = call(bodies if isinstance(call, grpc.StreamUnaryMultiCallable) else b"\x80", timeout=60)
                list(answer)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            told = str(refused.value.details()).encode()
            assert not any(secret in told for secret in target.secrets())
    assert target.node.table.view(target.stranger.node_id) is None
    assert target.node.lent().head == ""


def everything_from(connection: socket.socket, seconds: float = 1.0) -> bytes:
    connection.settimeout(seconds)
    received = bytearray()
    with contextlib.suppress(OSError):
        while piece := connection.recv(1 << 16):
            received += piece
    return bytes(received)


@pytest.mark.parametrize("kind", ["pair", "link", "known", "control", "exchange", "x", "PAIR"])
@pytest.mark.parametrize("body", [b"", b"\x80", bytes(1024)], ids=["empty", "a map", "zeros"])
def test_no_kind_of_listener_says_anything_first(target: Target, kind: str, body: bytes) -> None:
    with dial(target.listener, kind, body) as connection:
        assert everything_from(connection, 0.3) == b""


@pytest.mark.parametrize("transport", get_args(Transport))
@pytest.mark.parametrize("purpose", get_args(Purpose))
@pytest.mark.parametrize("claimed", ["itself", "the friend"])
def test_no_link_is_opened(target: Target, purpose: Purpose, transport: Transport, claimed: str) -> None:
    """Also with the right words: the epoch, the rank and the node id, as somebody who listens could have read them."""
    who = target.stranger if claimed == "itself" else target.friend
    request = LinkRequest(
        purpose=purpose, transport=transport, epoch=EPOCH, from_rank=0, to_rank=1, node_id=who.node_id
    )
    body = msgspec.msgpack.encode(request)
    with dial(target.listener, "link", body) as connection:
        if transport == "tls":
            received = _tls_as_stranger(target, connection)
        else:
            nonce = everything_from(connection, 0.3)
            assert len(nonce) in (0, 32)
            with contextlib.suppress(OSError):
                connection.sendall(bytes(64) + body)
            received = everything_from(connection)
        assert not any(secret in received for secret in target.secrets())
        assert received == b""


def _tls_as_stranger(target: Target, connection: socket.socket) -> bytes:
    """What is said inside TLS to who shows the stranger's certificate."""
    peer = new_peer(target.node.identity.certificate_der, "target")
    received = b""
    connection.settimeout(60)
    with contextlib.suppress(ssl.SSLError, OSError):
        secured = client_context(target.stranger, peer).wrap_socket(connection)
        with contextlib.suppress(ssl.SSLError, OSError):
            secured.sendall(bytes(100))
            while piece := secured.recv(1 << 16):
                received += piece
    return received


def test_pairing_with_a_wrong_code_tells_no_name(target: Target) -> None:
    target.node.show_code()
    shown = target.node.pairing.code
    assert shown is not None
    wrong = str((int(shown.password) + 1) % 10**8).zfill(8).encode()
    received = bytearray()
    side = TypingSide(target.stranger.certificate_der, "Mallory", wrong)
    deadline = Deadline(60)
    with dial(target.listener, "pair") as connection, contextlib.suppress(FrameError):
        send_frame(connection, side.start(), deadline)
        received += (reply := receive_frame(connection, deadline))
        send_frame(connection, side.on_reply(reply), deadline)
        while True:
            received += receive_frame(connection, deadline)
    assert target.node.identity.certificate_der in received  # which anybody who connects is shown
    assert not any(secret in received for secret in target.secrets())
    assert target.node.peers.get(target.stranger.node_id) is None


def test_the_friend_is_still_answered(target: Target) -> None:
    options = (("grpc.ssl_target_name_override", TLS_NAME),)
    friend = target.friend
    secured = grpc.ssl_channel_credentials(target.node.identity.certificate_pem, friend.key_pem, friend.certificate_pem)
    with grpc.secure_channel(f"127.0.0.1:{target.node.server.port}", secured, options) as channel:
        hello = msgspec.msgpack.encode(
            msgspec.structs.replace(target.node.greeting(), node_id=friend.node_id, process="p")
        )
        answer = channel.unary_unary(f"/{SERVICE}/Hello")(hello, timeout=60)
    assert NAME.encode() in answer
    eventually(lambda: target.node.table.view(friend.node_id) is not None)
