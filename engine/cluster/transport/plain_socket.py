"""The plain socket: frames in plain text, each with a message authentication code (MAC).

Only for networks that the person calls trusted. A frame ends in the first 16 bytes of HMAC-SHA256 over its header and
payload, under a key of this connection and this direction. So no frame can be changed, replayed, reordered or sent back
to its sender unnoticed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Sequence

from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import GOODBYE, HEADER, FramedSocket, reason_of, seconds_left

TAG_BYTES = 16
_MOST_PARTS = 64
KEY_BYTES = 32
NONCE_BYTES = 32
_PROOF_BYTES = 32
_DIALLER_PROVES = b"privatellm link 1: dialler"
_ACCEPTOR_PROVES = b"privatellm link 1: acceptor"
_TO_ACCEPTOR = b"privatellm link 1: frames to the acceptor"
_TO_DIALLER = b"privatellm link 1: frames to the dialler"


class PlainSocket(FramedSocket):
    """A framed socket in plain text. ``send_key`` and ``receive_key`` [32 bytes each] belong to this connection alone
    and differ."""

    _tag_bytes = TAG_BYTES

    def __init__(self, connection: socket.socket, peer: str, rank: int, send_key: bytes, receive_key: bytes) -> None:
        super().__init__(connection, peer, rank)
        # Copying a keyed state is cheaper than a new one for every frame.
        self._send_code = hmac.new(send_key, digestmod="sha256")
        self._receive_code = hmac.new(receive_key, digestmod="sha256")

    def push(self, parts: Sequence[Buffer]) -> None:
        if len(parts) > _MOST_PARTS:
            parts = (b"".join(parts),)
        header, length = self._number_frame(parts)
        self._start_frame(header, parts, HEADER.size + length + TAG_BYTES)

    def _start_frame(self, header: bytes, parts: Sequence[Buffer], total: int) -> None:
        code = self._send_code.copy()
        code.update(header)
        for part in parts:
            code.update(part)
        pieces = [header, *parts, code.digest()[:TAG_BYTES]]
        count = 0
        if not self._outgoing:
            try:
                count = self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
            except OSError as error:
                raise self._lost_sending(error) from None
        if count < total:
            self._keep(pieces, count)

    def _keep(self, pieces: Sequence[Buffer], sent: int) -> None:
        for piece in pieces:
            view = memoryview(piece).cast("B") if memoryview(piece).nbytes else memoryview(b"")
            if sent >= len(view):
                sent -= len(view)
                continue
            self._outgoing.append(view[sent:])
            sent = 0

    def _read_into(self, space: memoryview, wait: bool) -> int:
        return self._recv_into(space, wait)

    def _check(self, content: memoryview, tag: memoryview) -> None:
        code = self._receive_code.copy()
        code.update(content)
        if not hmac.compare_digest(code.digest()[:TAG_BYTES], tag):
            raise RingProtocolError(
                f"A frame on the link to {self.peer} was changed on its way, or is not from it.", kind="network"
            )

    def _push_goodbye(self) -> None:
        self._start_frame(HEADER.pack(GOODBYE, self._sent), (), HEADER.size + TAG_BYTES)
        self._sent += 1


def open_plain_socket(
    connection: socket.socket, key: bytes, about: bytes, accepting: bool, peer: str, rank: int, by: float
) -> PlainSocket:
    """Prove on both sides that the epoch's ``key`` is known, and derive this connection's own keys.

    ``about`` is the request for the link, and both ends must have the same. Whoever does not know the key gets a random
    number and nothing else. Raises PeerLost, RingProtocolError.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"an epoch's key has {KEY_BYTES} bytes, not {len(key)}")
    try:
        if accepting:
            mine = secrets.token_bytes(NONCE_BYTES)
            connection.settimeout(seconds_left(by))
            connection.sendall(mine)
            their_nonce = _read_exactly(connection, NONCE_BYTES, by)
            proof = _read_exactly(connection, _PROOF_BYTES, by)
            transcript = about + mine + their_nonce
            _check_proof(_derive(key, _DIALLER_PROVES, transcript), proof, peer)
            connection.sendall(_derive(key, _ACCEPTOR_PROVES, transcript))
        else:
            their_nonce = _read_exactly(connection, NONCE_BYTES, by)
            mine = secrets.token_bytes(NONCE_BYTES)
            transcript = about + their_nonce + mine
            connection.sendall(mine + _derive(key, _DIALLER_PROVES, transcript))
            proof = _read_exactly(connection, _PROOF_BYTES, by)
            _check_proof(_derive(key, _ACCEPTOR_PROVES, transcript), proof, peer)
    except OSError as error:
        raise PeerLost(f"{peer} broke off while the link was made ({reason_of(error)}).") from None
    to_acceptor, to_dialler = _derive(key, _TO_ACCEPTOR, transcript), _derive(key, _TO_DIALLER, transcript)
    if accepting:
        return PlainSocket(connection, peer, rank, to_dialler, to_acceptor)
    return PlainSocket(connection, peer, rank, to_acceptor, to_dialler)


def _derive(key: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + transcript, "sha256")


def _check_proof(expected: bytes, proof: bytes, peer: str) -> None:
    if not hmac.compare_digest(expected, proof):
        raise RingProtocolError(f"{peer} does not know this epoch's key.", kind="network")


def _read_exactly(connection: socket.socket, count: int, by: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(seconds_left(by))
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return bytes(data)
