"""Framed sockets: a connected socket that carries frames, and what all kinds of it share.

A frame is a header (length of the payload, number of the frame in its direction) and the payload. A frame in plain text
also ends in a message authentication code (:mod:`engine.cluster.transport.plain_socket`). In TLS the records are
protected by TLS itself (:mod:`engine.cluster.transport.tls_socket`).

A framed socket never waits unless it is asked to. Whoever has several of them polls
(:mod:`engine.cluster.transport.mesh`). One thread at a time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError

HEADER = struct.Struct(">IQ")
"""Length of the payload in bytes, and number of the frame in this direction, from 0."""
LARGEST_FRAME = 1 << 30
"""Maximum bytes of a payload, whatever a caller allows."""
GOODBYE = 0xFFFF_FFFF
"""Value in place of a length: the sender closes this socket in an orderly way, and nothing follows."""
READ_BYTES = 1 << 16
TURN_BYTES = 1 << 19
"""Maximum bytes sent or received before it is the other direction's turn, so that both directions of a link are in
use."""
GROWN_BYTES = 1 << 20
"""Initial bytes of a buffer for a large frame. It is doubled as bytes arrive, so a header alone takes no memory."""
KEPT_BYTES = 1 << 22
"""Maximum bytes of a buffer for large frames that is kept when frames become small again."""
SILENT_S = 4
"""Whole seconds after which a link counts as gone if the peer's kernel acknowledges nothing. Three packets in a row
would have to be lost for a false alarm."""
_DARWIN_CONNDROPTIME = 0x80
"""``TCP_RXT_CONNDROPTIME``, an option in seconds that the socket module does not name."""
_LAST_FRAMES = 3


CLOSE_WAIT_S = 0.25
"""Seconds that closing waits for a thread that was woken to leave the socket before the connection is cut hard."""


class FramedSocket(ABC):
    """Framing, buffers, and the meaning of the end of a connection, for plain and TLS sockets alike."""

    encrypted = False

    def __init__(self, connection: socket.socket, peer: str, rank: int = -1) -> None:
        connection.settimeout(None)
        _prepare(connection)
        self._socket = connection
        self.peer = peer
        self.rank = rank
        self.closing = False
        self._outgoing: deque[memoryview] = deque()
        self._sent = 0
        self._received = 0
        self._small = memoryview(bytearray(READ_BYTES))
        self._start = 0
        self._end = 0
        self._large: memoryview | None = None
        self._frame: memoryview | None = None
        self._total = 0
        self._filled = 0

    # Sending

    @property
    def unsent(self) -> bool:
        """Whether the kernel has not taken all of the pushed frames yet."""
        return bool(self._outgoing)

    @abstractmethod
    def push(self, parts: Sequence[Buffer]) -> None:
        """Begin to send one frame made of ``parts``, which must not change until nothing is unsent.

        Raises PeerLost, RingProtocolError (a frame too large).
        """

    def flush(self, wait: bool = False) -> None:
        """Send on, at most :data:`TURN_BYTES` unless ``wait``. Raises PeerLost."""
        self._write_out(wait)

    def _write_out(self, wait: bool) -> None:
        turn = 0
        flags = 0 if wait else socket.MSG_DONTWAIT
        while self._outgoing and (wait or turn < TURN_BYTES):
            head = self._outgoing[0]
            try:
                count = self._socket.send(head, flags)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost_sending(error) from None
            turn += count
            if count == len(head):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = head[count:]

    # Receiving

    @property
    def buffered(self) -> bool:
        """Whether bytes that were read already wait to be parsed."""
        return self._end > self._start

    def pull(self, limit: int, wait: bool = False) -> memoryview | None:
        """The next frame's payload, of at most ``limit`` bytes, or None if it is not complete yet.

        The view is valid until the next call. ``wait``: block until it is complete. Raises PeerLost, RingProtocolError.
        """
        if self._frame is None and not self._begin_frame(limit, wait):
            return None
        frame = self._frame
        assert frame is not None
        small = frame is self._small
        turn = 0
        while (self._end if small else self._filled) < self._total:
            if not small and self._filled == len(frame):
                frame = self._frame = self._grown(frame)
            space = self._small[self._end :] if small else frame[self._filled : self._total]
            count = self._read_into(space, wait)
            if not count:
                return None
            if small:
                self._end += count
            else:
                self._filled += count
                turn += count
                # Bytes that were already read must be parsed first: no poll would wake anybody for them.
                if turn >= TURN_BYTES and not wait and not self.buffered and self._filled < self._total:
                    return None
        return self._finish_frame(frame, small)

    def _begin_frame(self, limit: int, wait: bool) -> bool:
        """Read up to the next frame's header and choose the buffer for the frame; False if the header has not arrived
        yet."""
        rest = self._end - self._start
        if self._start:
            if rest:
                self._small[:rest] = bytes(self._small[self._start : self._end])
            self._start, self._end = 0, rest
        while self._end < HEADER.size:
            count = self._read_into(self._small[self._end :], wait)
            if not count:
                return False
            self._end += count
        length, number = HEADER.unpack_from(self._small)
        if number != self._received:
            raise RingProtocolError(
                f"{self.peer} sent frame {number} where {self._received} was expected: lost, repeated or reordered.",
                kind="network",
            )
        most = min(limit, LARGEST_FRAME)
        if length != GOODBYE and length > most:
            raise RingProtocolError(f"{self.peer} sent {length} bytes where {most} are allowed.", kind="network")
        self._total = HEADER.size + (0 if length == GOODBYE else length) + self._tag_bytes
        if self._total <= READ_BYTES:
            self._frame = self._small
        else:
            self._frame = self._large_buffer(self._total)
            self._frame[: self._end] = self._small[: self._end]
            self._filled, self._end = self._end, 0
        return True

    def _large_buffer(self, total: int) -> memoryview:
        """The existing buffer for a frame of ``total`` bytes, or the beginning of a new one."""
        have = 0 if self._large is None else len(self._large)
        if not have or have > max(KEPT_BYTES, 8 * total):
            self._large = None  # freed first, so that both buffers need not exist at once
            self._large = memoryview(bytearray(min(total, GROWN_BYTES)))
        assert self._large is not None
        return self._large

    def _grown(self, full: memoryview) -> memoryview:
        """A copy of ``full`` with twice the room."""
        larger = memoryview(bytearray(min(self._total, 2 * len(full))))
        larger[: len(full)] = full
        self._large = larger
        return larger

    def _finish_frame(self, frame: memoryview, small: bool) -> memoryview:
        length, _ = HEADER.unpack_from(frame)
        end = self._total - self._tag_bytes
        self._check(frame[:end], frame[end : self._total])
        self._received += 1
        self._frame = None
        if small:
            self._start = self._total
        if length == GOODBYE:
            raise PeerLost(f"{self.peer} left the ring.", reason="left the ring", noticed_at=self._ranks)
        return frame[HEADER.size : end]

    def _recv_into(self, space: memoryview, wait: bool) -> int:
        """Bytes read, 0 if there are none yet. Raises PeerLost."""
        if self.closing:
            raise self._lost(None)
        try:
            count = self._socket.recv_into(space, 0, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from None
        if not count or self.closing:
            raise self._lost(None)
        return count

    _tag_bytes = 0

    @abstractmethod
    def _read_into(self, space: memoryview, wait: bool) -> int:
        """Bytes of frames read into ``space``; 0 if there are none yet."""

    @abstractmethod
    def _check(self, content: memoryview, tag: memoryview) -> None:
        """Raises RingProtocolError if ``tag`` is not that of ``content``."""

    def _number_frame(self, parts: Sequence[Buffer]) -> tuple[bytes, int]:
        """The header of the next frame to send and its payload's length."""
        if self.closing:
            raise self._lost(None)
        length = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        if length > LARGEST_FRAME:
            raise RingProtocolError(
                f"A frame of {length} bytes is more than a link carries ({LARGEST_FRAME}).", kind="network"
            )
        header = HEADER.pack(length, self._sent)
        self._sent += 1
        return header, length

    # The end

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        """This machine's IP address on the link; empty if it has none."""
        return _ip(self._socket.getsockname)

    @property
    def remote_address(self) -> str:
        """The peer's IP address on the link; empty if it has none."""
        return _ip(self._socket.getpeername)

    def interrupt(self) -> None:
        """Wake the thread that waits in this socket, which raises PeerLost. Thread-safe."""
        self.closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def cut(self) -> None:
        """Wake a waiting sender as well, if :meth:`interrupt` was not enough. Thread-safe."""
        self.closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send a goodbye if that is possible at once, and close the socket. Not while another thread uses it."""
        if self._socket.fileno() < 0:
            return
        if not self.unsent:
            with contextlib.suppress(PeerLost, RingProtocolError, OSError):
                self._push_goodbye()
                self.flush()
        self.cut()
        self._outgoing.clear()
        self._socket.close()

    @abstractmethod
    def _push_goodbye(self) -> None: ...

    def _lost_sending(self, error: OSError) -> PeerLost:
        """The reason why the peer takes nothing any more. Its last frame may be an orderly goodbye."""
        try:
            for _ in range(_LAST_FRAMES):
                if self.pull(READ_BYTES) is None:
                    break
        except PeerLost as found:
            return found
        except RingProtocolError:
            pass
        return self._lost(error)

    def _lost(self, error: OSError | None) -> PeerLost:
        if self.closing:
            return PeerLost(f"The link to {self.peer} was closed.")
        why = f" ({error.strerror})" if error is not None and error.strerror else ""
        return PeerLost(f"{self.peer} is gone: its link ended{why}.", self._ranks, reason=f"its link ended{why}")

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The peer's rank, if it is known."""
        return (self.rank,) if self.rank >= 0 else ()


def _prepare(connection: socket.socket) -> None:
    """Send without delay, and notice a link that carries nothing any more although both machines are still there.

    That happens when a cable is pulled while the control plane goes another way. The kernel checks, so no thread has to
    wake up for it. A peer that is only stopped or slow still answers.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _silence_options(sys.platform):
        with contextlib.suppress(OSError):  # this system's kernel may not know the option
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _silence_options(system: str) -> list[tuple[int, int]]:
    """TCP options and values with which ``system`` (``sys.platform``) ends a connection after ``SILENT_S``."""
    options = {
        "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENT_S - 1,
        "TCP_USER_TIMEOUT": SILENT_S * 1000,
    }
    found = [(int(getattr(socket, name)), value) for name, value in options.items() if hasattr(socket, name)]
    # Limits the time of unacknowledged data. Darwin has no TCP_USER_TIMEOUT.
    return [*found, (_DARWIN_CONNDROPTIME, SILENT_S)] if system == "darwin" else found


def _ip(of: Callable[[], Any]) -> str:
    """The IP address of a socket's name: an IPv4 one as such, a link-local one with its zone."""
    try:
        name = of()
    except OSError:
        return ""
    if not isinstance(name, tuple):
        return ""
    host = str(name[0]).removeprefix("::ffff:")
    return f"{host}%{name[3]}" if len(name) == 4 and name[3] and "%" not in host else host


class FramedLink:
    """A :class:`engine.cluster.transport.exchange.Link` over a framed socket.

    One thread sends and receives. Any thread may close.
    """

    def __init__(self, framed: FramedSocket) -> None:
        self._framed = framed
        self._in_use = threading.Lock()
        self._closed = False

    @property
    def peer(self) -> str:
        return self._framed.peer

    @property
    def encrypted(self) -> bool:
        return self._framed.encrypted

    def send(self, *parts: Buffer) -> None:
        """See :class:`Link`. Waits until the frame is in the kernel's hands."""
        with self._in_use:
            self._usable()
            try:
                self._framed.push(parts)
                self._framed.flush(wait=True)
            except (PeerLost, RingProtocolError):
                self._end()
                raise

    def receive(self, limit: int) -> memoryview:
        """See :class:`Link`."""
        with self._in_use:
            self._usable()
            try:
                frame = self._framed.pull(limit, wait=True)
            except (PeerLost, RingProtocolError):
                self._end()
                raise
        assert frame is not None
        return frame

    def close(self) -> None:
        """See :class:`Link`."""
        self._closed = True
        self._framed.interrupt()
        free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if not free:
            self._framed.cut()
            free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if free:
            try:
                self._framed.close()
            finally:
                self._in_use.release()

    def _usable(self) -> None:
        if self._closed:
            raise PeerLost(f"The link to {self._framed.peer} was closed.")

    def _end(self) -> None:
        self._closed = True
        self._framed.close()


def pull_by(framed: FramedSocket, limit: int, by: float) -> bytes:
    """The next frame, which must arrive before ``by`` (time.monotonic()). Raises PeerLost, RingProtocolError."""
    poller = select.poll()
    poller.register(framed.fileno(), select.POLLIN)
    while True:
        frame = framed.pull(limit)
        if frame is not None:
            return bytes(frame)
        left = by - time.monotonic()
        if left <= 0 or not poller.poll(max(1, left * 1000)):
            raise PeerLost(f"{framed.peer} does not answer on its link.")


def seconds_left(by: float) -> float:
    left = by - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def reason_of(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
