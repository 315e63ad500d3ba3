"""TLS between paired machines: nobody else gets a byte, in either direction, by ssl or by gRPC."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest

from discovery.certificates import fingerprint
from discovery.peers import Peer
from discovery.tls import TLS_NAME, client_context, grpc_material, server_context, shown_to_grpc
from tests.discovery.discovery_machines import Machine

MakeMachine = Callable[[str], Machine]


class Answering:
    """The server's side of one connection, in a thread."""

    def __init__(self, connection: socket.socket, machine: Machine, peers: list[Peer]) -> None:
        self.node_id = ""
        """Of whoever got in."""
        self.error: OSError | None = None
        connection.settimeout(120)
        self._connection = connection
        self._context = server_context(machine.identity, peers)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._context.wrap_socket(self._connection, server_side=True) as secured:
                self.node_id = fingerprint(secured.getpeercert(binary_form=True) or b"")
                secured.sendall(secured.recv(100).upper())
        except OSError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


def exchanged(connection: socket.socket, context: ssl.SSLContext) -> bytes:
    """What comes back for "hello"; raises OSError where nothing does. In TLS 1.3 the client is through before the
    server has looked at its certificate."""
    connection.settimeout(120)
    with context.wrap_socket(connection, server_hostname=TLS_NAME) as secured:
        assert secured.version() == "TLSv1.3"
        secured.sendall(b"hello")
        got = secured.recv(100)
    if not got:
        raise ConnectionResetError("closed")
    return got


@pytest.fixture
def wire() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_paired_machines_talk(machine: MakeMachine, wire: tuple[socket.socket, socket.socket]) -> None:
    a, b, c = machine("A"), machine("B"), machine("C")
    server = Answering(wire[0], a, [c.as_peer(), b.as_peer()])
    assert exchanged(wire[1], client_context(b.identity, a.as_peer())) == b"HELLO"
    server.join()
    assert server.node_id == b.identity.node_id and server.error is None


def test_an_unpaired_machine_is_refused(machine: MakeMachine, wire: tuple[socket.socket, socket.socket]) -> None:
    a, b, stranger = machine("A"), machine("B"), machine("Stranger")
    server = Answering(wire[0], a, [b.as_peer()])
    with pytest.raises(OSError):
        exchanged(wire[1], client_context(stranger.identity, a.as_peer()))
    server.join()
    assert server.node_id == "" and server.error is not None


def test_with_nobody_paired_everybody_is_refused(
    machine: MakeMachine, wire: tuple[socket.socket, socket.socket]
) -> None:
    a = machine("A")
    server = Answering(wire[0], a, [])
    with pytest.raises(OSError):
        exchanged(wire[1], client_context(a.identity, a.as_peer()))
    server.join()
    assert server.node_id == ""


def test_a_wrong_server_is_refused_and_gets_nothing(
    machine: MakeMachine, wire: tuple[socket.socket, socket.socket]
) -> None:
    a, b, impostor = machine("A"), machine("B"), machine("Impostor")
    server = Answering(wire[0], impostor, [b.as_peer()])
    with pytest.raises(ssl.SSLCertVerificationError):
        exchanged(wire[1], client_context(b.identity, a.as_peer()))
    server.join()
    assert server.node_id == ""


def test_a_client_without_a_certificate_is_refused(
    machine: MakeMachine, wire: tuple[socket.socket, socket.socket]
) -> None:
    a, b = machine("A"), machine("B")
    server = Answering(wire[0], a, [b.as_peer()])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(OSError), context.wrap_socket(wire[1]) as connection:
        connection.settimeout(120)
        if connection.recv(1) == b"":
            raise OSError("closed")
    server.join()
    assert server.node_id == "" and server.error is not None


def test_a_certificate_signed_by_a_paired_machine_is_not_that_machine(
    machine: MakeMachine, wire: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    """A pinned certificate is trusted for itself, not as an authority."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    a, b = machine("A"), machine("B")
    issuer_key = serialization.load_pem_private_key(b.identity.key_pem, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(b.identity.certificate_pem)
    key = ec.generate_private_key(ec.SECP256R1())
    issued = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "child")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2090, 1, 1, tzinfo=datetime.UTC))
        .sign(issuer_key, hashes.SHA256())
    )
    pem = tmp_path / "child.pem"
    pem.write_bytes(
        issued.public_bytes(serialization.Encoding.PEM)
        + b.identity.certificate_pem
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=a.identity.certificate_pem.decode())
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_cert_chain(pem)
    server = Answering(wire[0], a, [b.as_peer()])
    with contextlib.suppress(OSError), context.wrap_socket(wire[1]) as connection:
        connection.settimeout(120)
        connection.recv(1)
    server.join()
    assert server.node_id == "" and server.error is not None


def test_older_tls_is_refused(machine: MakeMachine, wire: tuple[socket.socket, socket.socket]) -> None:
    a, b = machine("A"), machine("B")
    server = Answering(wire[0], a, [b.as_peer()])
    context = client_context(b.identity, a.as_peer())
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):
        context.wrap_socket(wire[1])
    server.join()
    assert server.node_id == ""


def test_garbage_instead_of_a_handshake(machine: MakeMachine, wire: tuple[socket.socket, socket.socket]) -> None:
    a, b = machine("A"), machine("B")
    server = Answering(wire[0], a, [b.as_peer()])
    with wire[1]:
        wire[1].sendall(os.urandom(3000))
    server.join()
    assert server.error is not None


def test_a_session_cannot_be_resumed_past_the_pinning(machine: MakeMachine) -> None:
    a, b = machine("A"), machine("B")
    server, client = server_context(a.identity, [b.as_peer()]), client_context(b.identity, a.as_peer())
    left, right = socket.socketpair()
    done = threading.Thread(target=lambda: server.wrap_socket(left, server_side=True).sendall(b"x"))
    done.start()
    with client.wrap_socket(right) as secured:
        assert secured.recv(1) == b"x"
        assert secured.session is None or not secured.session.has_ticket
    done.join(120)


def test_the_private_key_is_left_nowhere(machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system has no files in memory, as on macOS."""
    a, b = machine("A"), machine("B")
    descriptors = Path("/proc/self/fd")
    open_before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    server_context(a.identity, [b.as_peer()])
    if open_before:
        assert len(list(descriptors.iterdir())) == open_before
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modes: list[int] = []
    load = ssl.SSLContext.load_cert_chain

    def watching(context: ssl.SSLContext, path: str) -> None:
        modes.append(Path(path).stat().st_mode & 0o777)
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watching)
    before = set(tmp_path.iterdir())
    server_context(a.identity, [b.as_peer()])
    assert modes == [0o600]
    assert set(tmp_path.iterdir()) == before


def test_grpc_takes_the_same_pins(machine: MakeMachine) -> None:
    grpc = pytest.importorskip("grpc")
    a, b, stranger = machine("A"), machine("B"), machine("Stranger")
    callers: list[str] = []

    def answer(request: bytes, context: object) -> bytes:
        callers.append(shown_to_grpc(context.auth_context()))  # type: ignore[attr-defined]
        return request

    def serve(peers: list[Peer]) -> tuple[object, int]:
        handler = grpc.method_handlers_generic_handler("S", {"m": grpc.unary_unary_rpc_method_handler(answer)})
        server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(handler,))
        key, certificate, accepted = grpc_material(a.identity, peers)
        credentials = grpc.ssl_server_credentials([(key, certificate)], accepted, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return server, port

    def call(port: int, caller: Machine, expected: Peer) -> bytes | None:
        key, certificate, accepted = grpc_material(caller.identity, [expected])
        credentials = grpc.ssl_channel_credentials(accepted, key, certificate)
        options = [("grpc.ssl_target_name_override", TLS_NAME)]
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            try:
                answered: bytes = channel.unary_unary("/S/m")(b"x", timeout=120)
                return answered
            except grpc.RpcError:
                return None

    server, port = serve([b.as_peer(), machine("C").as_peer()])
    alone, alone_port = serve([])
    try:
        assert call(port, b, a.as_peer()) == b"x"
        assert callers == [b.identity.node_id]
        assert call(port, stranger, a.as_peer()) is None
        assert call(port, b, stranger.as_peer()) is None
        assert call(alone_port, b, a.as_peer()) is None
        assert len(callers) == 1
    finally:
        server.stop(0)  # type: ignore[attr-defined]
        alone.stop(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "shown", [None, {}, {"x509_pem_cert": []}, {"x509_pem_cert": [b"a", b"b"]}, {"x509_pem_cert": [b"\xff"]}]
)
def test_whoever_shows_not_one_certificate_is_nobody(shown: dict[str, list[bytes]] | None) -> None:
    assert shown_to_grpc(shown) == ""
