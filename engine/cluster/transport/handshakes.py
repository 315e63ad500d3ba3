"""From a connected socket to a wire: who is at the other end is proved before any payload travels."""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import ssl
import time

from discovery.certificates import fingerprint
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import TLS_READ_BYTES, PlainWire, TlsWire, Wire

KEY_BYTES = 32
NONCE_BYTES = 32
_PROOF_BYTES = 32
_DIALLER_PROVES = b"privatellm link 1: dialler"
_ACCEPTOR_PROVES = b"privatellm link 1: acceptor"
_TO_ACCEPTOR = b"privatellm link 1: frames to the acceptor"
_TO_DIALLER = b"privatellm link 1: frames to the dialler"


def tls_wire(
    connection: socket.socket, context: ssl.SSLContext, accepting: bool, node_id: str, peer: str, rank: int, by: float
) -> TlsWire:
    """Shake hands in TLS; the other end must own the certificate whose fingerprint is ``node_id``.

    ``by``: time.monotonic() at which it is too late. Raises PeerLost, RingProtocolError.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_side=accepting)
    try:
        _shake_hands(connection, session, incoming, outgoing, by)
    except ssl.SSLError as error:
        raise RingProtocolError(
            f"{peer} is not the machine that was paired ({error.reason}).", kind="network"
        ) from None
    except OSError as error:
        raise PeerLost(f"{peer} broke off while the link was made ({_why(error)}).") from None
    certificate = session.getpeercert(binary_form=True)
    theirs = fingerprint(certificate or b"")
    if session.version() != "TLSv1.3" or not hmac.compare_digest(theirs, node_id):
        raise RingProtocolError(f"{peer} is not the machine that was paired: it shows {theirs[:16]}.", kind="network")
    return TlsWire(connection, peer, rank, session, incoming, outgoing)


def _shake_hands(
    connection: socket.socket, session: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, by: float
) -> None:
    while True:
        try:
            session.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        # After an error nothing is sent: an alert would tell a stranger how far it came.
        if outgoing.pending:
            connection.settimeout(_left(by))
            connection.sendall(outgoing.read())
        if done:
            return
        connection.settimeout(_left(by))
        data = connection.recv(TLS_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed")
        incoming.write(data)


def plain_wire(
    connection: socket.socket, key: bytes, about: bytes, accepting: bool, peer: str, rank: int, by: float
) -> PlainWire:
    """Prove on both sides that the epoch's ``key`` is known, and derive this connection's own keys.

    ``about`` is what the link was asked to be; both ends must have the same. Whoever does not know the key gets a
    random number and nothing else. Raises PeerLost, RingProtocolError.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"an epoch's key has {KEY_BYTES} bytes, not {len(key)}")
    try:
        if accepting:
            mine = secrets.token_bytes(NONCE_BYTES)
            connection.settimeout(_left(by))
            connection.sendall(mine)
            theirs = _read_exactly(connection, NONCE_BYTES, by)
            proof = _read_exactly(connection, _PROOF_BYTES, by)
            transcript = about + mine + theirs
            _check_proof(_derive(key, _DIALLER_PROVES, transcript), proof, peer)
            connection.sendall(_derive(key, _ACCEPTOR_PROVES, transcript))
        else:
            theirs = _read_exactly(connection, NONCE_BYTES, by)
            mine = secrets.token_bytes(NONCE_BYTES)
            transcript = about + theirs + mine
            connection.sendall(mine + _derive(key, _DIALLER_PROVES, transcript))
            proof = _read_exactly(connection, _PROOF_BYTES, by)
            _check_proof(_derive(key, _ACCEPTOR_PROVES, transcript), proof, peer)
    except OSError as error:
        raise PeerLost(f"{peer} broke off while the link was made ({_why(error)}).") from None
    to_acceptor, to_dialler = _derive(key, _TO_ACCEPTOR, transcript), _derive(key, _TO_DIALLER, transcript)
    if accepting:
        return PlainWire(connection, peer, rank, to_dialler, to_acceptor)
    return PlainWire(connection, peer, rank, to_acceptor, to_dialler)


def pull_by(wire: Wire, limit: int, by: float) -> bytes:
    """The next frame, which must come before ``by`` (time.monotonic()). Raises PeerLost, RingProtocolError."""
    poller = select.poll()
    poller.register(wire.fileno(), select.POLLIN)
    while True:
        frame = wire.pull(limit)
        if frame is not None:
            return bytes(frame)
        left = by - time.monotonic()
        if left <= 0 or not poller.poll(max(1, left * 1000)):
            raise PeerLost(f"{wire.peer} does not answer on its link.")


def _derive(key: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + transcript, "sha256")


def _check_proof(expected: bytes, proof: bytes, peer: str) -> None:
    if not hmac.compare_digest(expected, proof):
        raise RingProtocolError(f"{peer} does not know this epoch's key.", kind="network")


def _read_exactly(connection: socket.socket, count: int, by: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(by))
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return bytes(data)


def _left(by: float) -> float:
    left = by - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
