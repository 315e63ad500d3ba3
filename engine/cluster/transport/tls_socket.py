"""The TLS socket: frames within TLS 1.3, whose records protect them. Both sides pin the other's certificate."""

from __future__ import annotations

import hmac
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import cast

from discovery.certificates import fingerprint
from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import GOODBYE, HEADER, TURN_BYTES, FramedSocket, reason_of, seconds_left

TLS_READ_BYTES = 1 << 18


class TlsSocket(FramedSocket):
    """A framed socket in TLS over memory. It is read and written in large pieces, and never falls back to plain
    text."""

    encrypted = True

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        rank: int,
        session: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        super().__init__(connection, peer, rank)
        self._session = session
        self._incoming = incoming
        self._outgoing_records = outgoing
        self._unencrypted: deque[memoryview] = deque()
        self._raw = memoryview(bytearray(TLS_READ_BYTES))

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing or self._unencrypted)

    @property
    def buffered(self) -> bool:
        return self._end > self._start or self._incoming.pending > 0 or self._session.pending() > 0

    def push(self, parts: Sequence[Buffer]) -> None:
        header, length = self._number_frame(parts)
        if length <= TLS_READ_BYTES and not self._unencrypted:
            self._encrypt(b"".join((header, *parts)))
        else:
            self._unencrypted.append(memoryview(header))
            self._unencrypted.extend(memoryview(part).cast("B") for part in parts if memoryview(part).nbytes)
        self.flush()

    def flush(self, wait: bool = False) -> None:
        turn = 0
        while True:
            self._write_out(wait)
            if self._outgoing or not self._unencrypted or (turn >= TURN_BYTES and not wait):
                return
            turn += self._encrypt_more()

    def _encrypt_more(self) -> int:
        """Encrypt one piece of what waits, so that a frame of many megabytes is never in memory twice. Returns its
        bytes."""
        head = self._unencrypted.popleft()
        piece, rest = head[:TLS_READ_BYTES], head[TLS_READ_BYTES:]
        if rest:
            self._unencrypted.appendleft(rest)
        self._encrypt(piece)
        return len(piece)

    def _encrypt(self, content: bytes | memoryview) -> None:
        try:
            self._session.write(content)
        except ssl.SSLError as error:
            raise RingProtocolError(
                f"The link to {self.peer} encrypts nothing any more ({error.reason}).", kind="network"
            ) from None
        self._outgoing.append(memoryview(self._outgoing_records.read()))

    def _read_into(self, space: memoryview, wait: bool) -> int:
        while True:
            try:
                # With a buffer, read() gives the number of bytes; the annotations know a bytearray only.
                return cast(int, self._session.read(len(space), cast(bytearray, space)))
            except ssl.SSLWantReadError:
                count = self._recv_into(self._raw, wait)
                if not count:
                    return 0
                self._incoming.write(self._raw[:count])
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                raise self._lost(None) from None
            except ssl.SSLError as error:
                raise RingProtocolError(
                    f"What came on the link to {self.peer} is no TLS of this connection ({error.reason}).",
                    kind="network",
                ) from None

    def _check(self, content: memoryview, tag: memoryview) -> None:
        """TLS has authenticated the frame already."""

    def _push_goodbye(self) -> None:
        self._encrypt(HEADER.pack(GOODBYE, self._sent))
        self._sent += 1


def open_tls_socket(
    connection: socket.socket, context: ssl.SSLContext, accepting: bool, node_id: str, peer: str, rank: int, by: float
) -> TlsSocket:
    """Shake hands in TLS. The other end must own the certificate whose fingerprint is ``node_id``.

    ``by``: deadline (time.monotonic()). Raises PeerLost, RingProtocolError.
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
        raise PeerLost(f"{peer} broke off while the link was made ({reason_of(error)}).") from None
    certificate = session.getpeercert(binary_form=True)
    theirs = fingerprint(certificate or b"")
    if session.version() != "TLSv1.3" or not hmac.compare_digest(theirs, node_id):
        raise RingProtocolError(f"{peer} is not the machine that was paired: it shows {theirs[:16]}.", kind="network")
    return TlsSocket(connection, peer, rank, session, incoming, outgoing)


def _shake_hands(
    connection: socket.socket, session: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, by: float
) -> None:
    while True:
        try:
            session.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        # After an error nothing is sent: an alert would reveal to a stranger how far it came.
        if outgoing.pending:
            connection.settimeout(seconds_left(by))
            connection.sendall(outgoing.read())
        if done:
            return
        connection.settimeout(seconds_left(by))
        data = connection.recv(TLS_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed")
        incoming.write(data)
