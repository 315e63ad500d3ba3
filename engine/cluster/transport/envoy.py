"""The envoy's exchange: the engine's side, whose network is in another process
(:mod:`engine.cluster.transport.envoy_process`)."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from discovery.addresses import shown_address
from discovery.names import plain_text
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.collective import made_while_wanted
from engine.cluster.transport.connecting import connect_sockets
from engine.cluster.transport.envoy_process import (
    BYE,
    CONTROL,
    CONTROL_LIMIT,
    FRAME,
    KNOWN_KINDS,
    LAST,
    LOST,
    MESSAGE_LIMIT,
    MORE,
    PIECE_BYTES,
    EnvoyPeer,
    EnvoyPorts,
    EnvoyReady,
    EnvoySetup,
    EnvoyTargets,
)
from engine.cluster.transport.epochs import CONNECT_S, Epoch
from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import CLOSE_WAIT_S, LARGEST_FRAME, FramedSocket, pull_by
from engine.errors import ModelError
from engine.system.processes import ONLY_TLS_1_3, ModuleStarter, start_module

END_S = 1.0
"""Seconds that a closed envoy has to end before it is killed."""
_READ_BYTES = 1 << 18
_Message = TypeVar("_Message")


class EnvoyExchange:
    """An :class:`engine.cluster.transport.exchange.Exchange` through an envoy. Made by :func:`connect_envoy`."""

    def __init__(self, epoch: Epoch, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._epoch = epoch
        self._process = process
        self._socket = connection
        self._names = {member.rank: member.called for member in epoch.members}
        self._others = [member.rank for member in epoch.members if member.rank != epoch.rank]
        self._unsent: deque[memoryview] = deque()
        self._raw = memoryview(bytearray(_READ_BYTES))
        self._input = bytearray()
        self._pieces: dict[int, list[bytes]] = {rank: [] for rank in self._others}
        self._complete: dict[int, deque[bytes]] = {rank: deque() for rank in self._others}
        self._ended: dict[int, PeerLost] = {}
        self._capacity = 0
        self._own = memoryview(b"")
        self._in_use = threading.Lock()
        self._closed = False
        self.idle_s = 0.0

    @property
    def name(self) -> str:
        return "envoy"

    @property
    def rank(self) -> int:
        return self._epoch.rank

    @property
    def size(self) -> int:
        return len(self._epoch.members)

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        """See :class:`Exchange`."""
        with self._in_use:
            self._usable()
            self._capacity = capacity
            own = b"".join(parts)
            self._own = memoryview(own)
            if self._others:
                self._queue(own)
                self._write_out()

    def _queue(self, own: bytes) -> None:
        if len(own) > LARGEST_FRAME:
            raise RingProtocolError(f"{len(own)} bytes are more than an envoy carries.", kind="network")
        whole = memoryview(own)
        for start in range(0, max(1, len(own)), PIECE_BYTES):
            piece = whole[start : start + PIECE_BYTES]
            kind = LAST if start + PIECE_BYTES >= len(own) else MORE
            self._unsent.append(memoryview(FRAME.pack(len(piece), kind, self._epoch.rank)))
            if piece:
                self._unsent.append(piece)

    def _write_out(self) -> None:
        while self._unsent:
            some = [self._unsent[index] for index in range(min(16, len(self._unsent)))]
            try:
                count = self._socket.sendmsg(some, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                raise self._envoy_lost() from None
            while self._unsent and count >= len(self._unsent[0]):
                count -= len(self._unsent.popleft())
            if count:
                self._unsent[0] = self._unsent[0][count:]

    def receive(self) -> list[memoryview]:
        """See :class:`Exchange`."""
        with self._in_use:
            self._usable()
            try:
                while self._unsent or not all(self._complete.values()):
                    self._check_ended()
                    self._step()
                frames = [memoryview(self._complete[rank].popleft()) for rank in self._others]
                for rank, frame in zip(self._others, frames, strict=True):
                    if len(frame) > self._capacity:
                        raise RingProtocolError(
                            f"{self._names[rank]} sent {len(frame)} bytes where {self._capacity} are allowed.",
                            kind="network",
                        )
            except PeerLost:
                self._closed = True
                raise
            except RingProtocolError:
                self._end()
                raise
        frames.insert(self._epoch.rank, self._own)
        return frames

    def missing(self) -> list[int]:
        """See :class:`Exchange`."""
        return [rank for rank in self._others if not self._complete[rank]]

    def _check_ended(self) -> None:
        """Raise the loss of a node whose contribution is missing. A node that left after its contribution matters only
        in the next exchange."""
        for rank, end in self._ended.items():
            if not self._complete[rank]:
                raise end

    def _step(self) -> None:
        """Wait until the envoy accepts or delivers something."""
        wait = True
        began = time.perf_counter()
        if self._unsent:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN | select.POLLOUT)
            events = poller.poll()[0][1]
            if events & select.POLLOUT:
                self._write_out()
            if not events & ~select.POLLOUT:
                return
            wait = False
        try:
            count = self._socket.recv_into(self._raw, 0, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            raise self._envoy_lost() from None
        self.idle_s += time.perf_counter() - began
        if not count or self._closed:
            raise self._envoy_lost()
        self._input += self._raw[:count]
        self._take_frames()

    def _take_frames(self) -> None:
        start = 0
        with memoryview(self._input) as view:
            while len(view) - start >= FRAME.size:
                length, kind, rank = FRAME.unpack_from(view, start)
                if length > MESSAGE_LIMIT or kind not in KNOWN_KINDS:
                    raise RingProtocolError("The envoy of this machine sent something else.", kind="network")
                end = start + FRAME.size + length
                if end > len(view):
                    break
                self._take(kind, rank, bytes(view[start + FRAME.size : end]))
                start = end
        del self._input[:start]

    def _take(self, kind: int, rank: int, payload: bytes) -> None:
        name = self._names.get(rank, f"node {rank + 1}")
        if kind == CONTROL or rank not in self._pieces:
            raise RingProtocolError("The envoy of this machine sent something else.", kind="network")
        if kind == LOST:
            reason = plain_text(payload.decode("utf-8", "replace"))
            self._ended.setdefault(rank, PeerLost(f"{name} is gone: {reason}.", (rank,), reason=reason))
            return
        if kind == BYE:
            left = PeerLost(f"{name} left the ring.", reason="left the ring", noticed_at=(rank,))
            self._ended.setdefault(rank, left)
            return
        pieces, complete = self._pieces[rank], self._complete[rank]
        # Another node can be one exchange ahead of this one: one contribution is looked at, one may wait.
        pieces_fit = (len(pieces) + 1) * PIECE_BYTES <= LARGEST_FRAME and (len(payload) == PIECE_BYTES or kind == LAST)
        if len(complete) > 1 or not pieces_fit or len(payload) > PIECE_BYTES:
            raise RingProtocolError(f"{name} sends more than the exchange asks for, or less.", kind="network")
        pieces.append(payload)
        if kind == LAST:
            complete.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()

    def close(self) -> None:
        """See :class:`Exchange`. The envoy has ended when this returns."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if not free:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        try:
            self._end()
        finally:
            if free:
                self._in_use.release()

    def _usable(self) -> None:
        if self._closed:
            raise PeerLost("The ring's envoy was closed.")

    def _envoy_lost(self) -> PeerLost:
        if self._closed:
            return PeerLost("The ring's envoy was closed.")
        return PeerLost("This machine's envoy ended.", (self._epoch.rank,))

    def _end(self) -> None:
        """Send a goodbye if possible, and wait for the end of the process."""
        self._closed = True
        if self._socket.fileno() >= 0:
            if not self._unsent:
                with contextlib.suppress(OSError):
                    self._socket.send(FRAME.pack(0, BYE, self._epoch.rank), socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._socket.close()

    # Setting up

    def send_control(self, message: msgspec.Struct) -> None:
        """Send one control message to the envoy. Raises PeerLost."""
        payload = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(FRAME.pack(len(payload), CONTROL, self._epoch.rank) + payload)
        except OSError:
            raise self._envoy_lost() from None

    def receive_control(self, kind: type[_Message], by: float) -> _Message:
        """The envoy's next control message, which must arrive before ``by`` (time.monotonic()). Raises PeerLost,
        RingProtocolError."""
        data = b""
        try:
            while len(data) < FRAME.size or len(data) < FRAME.size + FRAME.unpack_from(data)[0]:
                self._socket.settimeout(max(0.001, by - time.monotonic()))
                # Never more than the message: what follows it belongs to the exchange.
                want = FRAME.size if len(data) < FRAME.size else FRAME.size + FRAME.unpack_from(data)[0]
                piece = self._socket.recv(min(CONTROL_LIMIT, want - len(data)))
                if not piece:
                    raise self._envoy_lost()
                data += piece
            self._socket.settimeout(None)
            return msgspec.msgpack.decode(data[FRAME.size :], type=kind)
        except OSError:
            raise PeerLost("This machine's envoy does not answer.", (self._epoch.rank,)) from None
        except msgspec.DecodeError as error:
            raise RingProtocolError(f"The envoy of this machine sent something else ({error}).") from None


def connect_envoy(
    links: Links, epoch: Epoch, seconds: float = CONNECT_S, start: ModuleStarter = start_module
) -> EnvoyExchange:
    """Start this node's envoy and connect it to the others'. Every node of ``epoch`` calls this at about the same time.

    The envoys' ports are exchanged over TLS links of our own, so no further port has to be known or open before. Raises
    ModelError (network).
    """
    by = time.monotonic() + seconds
    sockets = connect_sockets(links, epoch, "envoy", "tls", seconds)

    def wake() -> None:
        for framed in sockets.values():
            framed.cut()

    return made_while_wanted(epoch, lambda: _connected(links, epoch, sockets, by, start), EnvoyExchange.close, wake)


def _connected(
    links: Links, epoch: Epoch, sockets: Mapping[int, FramedSocket], by: float, start: ModuleStarter
) -> EnvoyExchange:
    exchange: EnvoyExchange | None = None
    try:
        exchange = _started(links, epoch, sockets, by, start)
        targets = _exchange_ports(exchange, epoch, sockets, by)
        exchange.send_control(EnvoyTargets(targets=targets))
        ready = exchange.receive_control(EnvoyReady, by + END_S)
        if ready.problem:
            raise ModelError(ready.problem, kind="network")
        return exchange
    except (PeerLost, RingProtocolError) as error:
        if exchange is not None:
            exchange.close()
        raise ModelError(f"The envoys cannot be connected: {error}", kind="network") from None
    except BaseException:
        if exchange is not None:
            exchange.close()
        raise
    finally:
        for framed in sockets.values():
            framed.close()


def _started(
    links: Links, epoch: Epoch, sockets: Mapping[int, FramedSocket], by: float, start: ModuleStarter
) -> EnvoyExchange:
    mine, child_end = socket.socketpair()
    with child_end:
        process = start(
            "engine.cluster.transport.envoy_process",
            [str(child_end.fileno())],
            {"GRPC_VERBOSITY": "NONE", **ONLY_TLS_1_3},
            pass_fds=(child_end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    exchange = EnvoyExchange(epoch, mine, process)
    peers = [
        EnvoyPeer(rank=other.rank, node_id=other.node_id, certificate=other.certificate, name=other.called)
        for other in epoch.members
        if other.rank != epoch.rank
    ]
    setup = EnvoySetup(
        epoch=epoch.epoch,
        rank=epoch.rank,
        certificate=links.identity.certificate_pem,
        private_key=links.identity.key_pem,
        peers=peers,
        addresses=sorted({framed.local_address for framed in sockets.values()}),
        seconds=max(0.1, by - time.monotonic()),
    )
    exchange.send_control(setup)
    return exchange


def _exchange_ports(
    exchange: EnvoyExchange, epoch: Epoch, sockets: Mapping[int, FramedSocket], by: float
) -> dict[int, str]:
    """Exchange the ports at which the envoys listen with every peer.

    Returns ``HOST:PORT`` by rank of the envoys that this one dials: those of higher ranks.
    """
    ports = exchange.receive_control(EnvoyPorts, by).ports
    unbound = sorted({framed.local_address for framed in sockets.values()} - ports.keys())
    if unbound:
        raise ModelError(f"The envoy of this machine cannot listen on {', '.join(unbound)}.", kind="network")
    for framed in sockets.values():
        framed.push((ports[framed.local_address].to_bytes(2, "big"),))
        framed.flush(wait=True)
    targets = {}
    for rank, framed in sockets.items():
        port = int.from_bytes(pull_by(framed, 2, by), "big")
        if rank > epoch.rank:
            targets[rank] = shown_address(framed.remote_address, port)
    return targets
