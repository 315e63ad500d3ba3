"""The envoy: ``python -m engine.cluster.transport.envoy_process FD`` sends and receives for one engine, in its own
process.

This is section 4.3 of the paper. The engine's interpreter never runs the network's event loop: a second process holds
asynchronous gRPC streams to the other nodes' envoys. Here they use mutual TLS with pinned certificates, with one
bidirectional stream per pair of nodes. The engine holds the other end of the pair of Unix sockets whose descriptor is
the only argument. The process ends with the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
import msgspec

from discovery.addresses import shown_address
from discovery.tls import TLS_NAME, shown_to_grpc
from engine.cluster.transport.framed_socket import SILENT_S
from engine.system.processes import keep_to_owner

SERVICE = "/privatellm.Envoy/Exchange"
PIECE_BYTES = 1 << 20
"""Maximum bytes of a piece of a contribution. Each piece is one gRPC message and one frame to the engine."""
MESSAGE_LIMIT = PIECE_BYTES + 1024
CONTROL_LIMIT = 1 << 16
"""Maximum bytes of a frame before the exchange begins: certificates and addresses."""

FRAME = struct.Struct(">IBB")
"""Header between engine and envoy: bytes of the payload, its kind, rank of the node it is from."""
MORE, LAST, BYE, LOST, CONTROL = range(5)
"""Kinds of a frame or message: a piece with more to come, the last piece of a contribution, an orderly end, a lost node
(with the reason as text), or a control message such as :class:`EnvoySetup`."""
KNOWN_KINDS = frozenset((MORE, LAST, BYE, LOST, CONTROL))


class EnvoyPeer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another node of the epoch. ``certificate`` is PEM."""

    rank: int
    node_id: str
    certificate: bytes
    name: str


class EnvoySetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First message to an envoy. It listens on ``addresses`` (IP) and answers with :class:`EnvoyPorts`."""

    epoch: str
    rank: int
    certificate: bytes
    private_key: bytes
    peers: list[EnvoyPeer]
    addresses: list[str]
    seconds: float


class EnvoyPorts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ports of the envoy by IP address."""

    ports: dict[str, int]


class EnvoyTargets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The envoys that this one dials, ``HOST:PORT`` by rank. It answers with :class:`EnvoyReady`."""

    targets: dict[int, str]


class EnvoyReady(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The envoy is connected to every peer, or has a ``problem``."""

    problem: str = ""


_READ_BYTES = MESSAGE_LIMIT + FRAME.size
_MOST_WAITING = 64
"""Maximum pieces that wait to be sent to one peer. Reading from the engine's socket pauses at this number."""
_GOODBYE_S = 0.25
_GREETING = b"privatellm envoy"
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 8),
    # Strangers may knock: they are cut off soon, and are few at a time.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_allowed_incoming_connections", 64),
    # A link that carries nothing any more is noticed: at once where data waits for an acknowledgement, else by pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", SILENT_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.optimization_target", "latency"),
)

Write = Callable[[bytes], Awaitable[Any]]


class EngineGone(Exception):
    """The engine closed its end, died, or sent something invalid."""


class EngineSocket(asyncio.BufferedProtocol):
    """Frames to and from the engine. Incoming bytes are parsed in the event loop's callback, without a task in between.

    Control frames are awaited with :meth:`control`. After :meth:`dispatch` was called, all others go to its function.
    """

    def __init__(self) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._controls: asyncio.Queue[bytes] = asyncio.Queue()
        self._dispatch: Callable[[int, bytes], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._end = 0
        self._writable = asyncio.Event()
        self._writable.set()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        start = 0
        while self._end - start >= FRAME.size:
            length, kind, _ = FRAME.unpack_from(self._buffer, start)
            if length > MESSAGE_LIMIT or kind not in KNOWN_KINDS:
                self._fail("something else than was expected")
                return
            stop = start + FRAME.size + length
            if stop > self._end:
                break
            self._take(kind, bytes(self._buffer[start + FRAME.size : stop]))
            start = stop
        if start:
            rest = bytes(self._buffer[start : self._end])
            self._buffer[: len(rest)] = rest
            self._end = len(rest)

    def eof_received(self) -> bool:
        self._fail("closed")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc or "closed"))
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == CONTROL and self._controls.qsize() < 2:
            self._controls.put_nowait(payload)
        elif kind != CONTROL and self._dispatch is not None:
            self._dispatch(kind, payload)
        else:
            self._fail("something else than was expected")

    def _fail(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)

    # For the envoy

    def dispatch(self, take: Callable[[int, bytes], None]) -> None:
        """Hand all further frames of the exchange to ``take(kind, payload)``."""
        self._dispatch = take

    def hold(self, stop: bool) -> None:
        """Pause reading while a peer accepts nothing. The engine's kernel buffer fills then, and the engine waits."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if stop else self._transport.resume_reading)()

    async def control(self, kind: type[Any]) -> Any:
        """The next control message. Raises EngineGone."""
        message = asyncio.ensure_future(self._controls.get())
        await asyncio.wait((message, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            message.cancel()
            raise EngineGone(self.gone.result())
        try:
            return msgspec.msgpack.decode(message.result(), type=kind)
        except msgspec.DecodeError as error:
            raise EngineGone(str(error)) from None

    async def write(self, kind: int, rank: int, payload: bytes | memoryview = b"") -> None:
        """Send a frame to the engine. While the engine does not read, the peer whose message this is waits as well.
        Raises EngineGone."""
        if self.gone.done() or self._transport is None:
            raise EngineGone("closed")
        self._transport.write(b"".join((FRAME.pack(len(payload), kind, rank), payload)))
        if not self._writable.is_set():
            await self._writable.wait()


class NodeStream:
    """The stream to one other node, and the messages that wait to be sent on it."""

    def __init__(self, facts: EnvoyPeer, go: asyncio.Event) -> None:
        self.facts = facts
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.taken = False
        self._go = go
        self._left = False

    async def serve(self, write: Write, messages: AsyncIterator[bytes], engine: EngineSocket) -> None:
        """Carry both directions until one of them ends, then notify the engine."""
        await self._go.wait()  # not before the engine knows that the exchange begins
        writer = asyncio.create_task(self._send(write, engine), name=f"to {self.facts.rank}")
        reason = "its envoy ended the exchange"
        try:
            async for message in messages:
                if not await self._received(message, engine):
                    break
        except (grpc.RpcError, asyncio.CancelledError, EngineGone) as error:
            reason = _reason(error)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer
            self.ended.set()
            with contextlib.suppress(EngineGone):
                if self._left:
                    await engine.write(BYE, self.facts.rank)
                else:
                    await engine.write(LOST, self.facts.rank, reason.encode()[:500])

    async def _received(self, message: bytes, engine: EngineSocket) -> bool:
        """Pass a message on to the engine. Returns whether more may come."""
        kind = message[0] if message else -1
        if kind in (MORE, LAST):
            await engine.write(kind, self.facts.rank, memoryview(message)[1:])
            return True
        self._left = kind == BYE
        return False

    async def _send(self, write: Write, engine: EngineSocket) -> None:
        while True:
            message = await self.waiting.get()
            await write(message)
            if self.waiting.qsize() == _MOST_WAITING // 2:
                engine.hold(False)


class Envoy:
    """The streams of one epoch. ``run`` returns when the engine is gone or has said goodbye."""

    def __init__(self, engine: EngineSocket, setup: EnvoySetup) -> None:
        self._engine = engine
        self._setup = setup
        self._go = asyncio.Event()
        self._peers = {peer.rank: NodeStream(peer, self._go) for peer in setup.peers}
        self._server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=16)
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._said_goodbye = False

    async def run(self) -> None:
        """Listen, connect, and dispatch. Raises EngineGone."""
        try:
            await self._engine.write(CONTROL, self._setup.rank, msgspec.msgpack.encode(await self._listen()))
            targets = cast(EnvoyTargets, await self._engine.control(EnvoyTargets))
            problem = await self._connect(targets.targets)
            self._engine.dispatch(self._dispatch)
            await self._engine.write(CONTROL, self._setup.rank, msgspec.msgpack.encode(EnvoyReady(problem=problem)))
            if not problem:
                self._go.set()
                await self._engine.gone
        finally:
            await self._close()

    async def _listen(self) -> EnvoyPorts:
        handler = grpc.stream_stream_rpc_method_handler(self._accept)
        service, _, method = SERVICE.strip("/").partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        roots = b"".join(peer.certificate for peer in self._setup.peers) or self._setup.certificate
        credentials = grpc.ssl_server_credentials(
            [(self._setup.private_key, self._setup.certificate)], roots, require_client_auth=True
        )
        ports = {}
        for address in self._setup.addresses:
            # An address cannot be bound while its interface comes up, or once it is gone.
            with contextlib.suppress(RuntimeError):
                ports[address] = self._server.add_secure_port(shown_address(address, 0), credentials)
        await self._server.start()
        return EnvoyPorts(ports=ports)

    async def _accept(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serve a stream. Only the node of the presented certificate is accepted, once and in this epoch."""
        said = dict(context.invocation_metadata() or ())
        peer = self._peers.get(int(said["rank"])) if str(said.get("rank", "")).isdigit() else None
        right = (
            peer is not None
            and said.get("epoch") == self._setup.epoch
            and not peer.taken
            and hmac.compare_digest(shown_to_grpc(context.auth_context()), peer.facts.node_id)
        )
        if peer is None or not right:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "")
            return
        peer.taken = True
        await context.write(_GREETING)
        _settle(peer.connected)
        await peer.serve(context.write, requests, self._engine)

    async def _connect(self, targets: dict[int, str]) -> str:
        """Connect to all peers. Returns a sentence if that failed."""
        for rank, target in targets.items():
            peer = self._peers.get(rank)
            if peer is None:
                return f"There is no node {rank} in this epoch."
            task = asyncio.create_task(self._dial(peer, target), name=f"stream to {rank}")
            self._tasks.add(task)
        everybody = asyncio.gather(*(peer.connected for peer in self._peers.values()))
        await asyncio.wait(
            (everybody, self._engine.gone), timeout=self._setup.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if everybody.done():
            failure = everybody.exception()
        else:
            everybody.cancel()
            failure = TimeoutError()
        if self._engine.gone.done():
            raise EngineGone(self._engine.gone.result())
        missing = [peer.facts.name for peer in self._peers.values() if not _settled(peer.connected)]
        if failure is None:
            return ""
        return f"The envoy of {', '.join(missing) or 'a node'} cannot be reached ({_reason(failure)})."

    async def _dial(self, peer: NodeStream, target: str) -> None:
        credentials = grpc.ssl_channel_credentials(
            peer.facts.certificate, self._setup.private_key, self._setup.certificate
        )
        options = (*OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))
        channel = grpc.aio.secure_channel(target, credentials, options)
        self._channels.append(channel)
        metadata = (("epoch", self._setup.epoch), ("rank", str(self._setup.rank)))
        call = channel.stream_stream(SERVICE)(metadata=metadata, wait_for_ready=True, timeout=None)
        messages = aiter(call)
        try:
            if await anext(messages) != _GREETING:
                raise ConnectionError("it is no envoy of this version")
        except (grpc.RpcError, StopAsyncIteration, ConnectionError) as error:
            if not peer.connected.done():
                peer.connected.set_exception(error if isinstance(error, grpc.RpcError) else TimeoutError(str(error)))
            return
        _settle(peer.connected)
        await peer.serve(call.write, messages, self._engine)
        call.cancel()

    def _dispatch(self, kind: int, payload: bytes) -> None:
        """Send a frame of the engine to all peers. After a goodbye the engine closes its end of the socket pair."""
        self._said_goodbye = kind == BYE
        message = b"".join((bytes((kind,)), payload))
        for peer in self._peers.values():
            peer.waiting.put_nowait(message)
            if peer.waiting.qsize() >= _MOST_WAITING:
                self._engine.hold(True)

    async def _close(self) -> None:
        streams = [
            asyncio.ensure_future(peer.ended.wait()) for peer in self._peers.values() if _settled(peer.connected)
        ]
        if streams and self._said_goodbye:
            await asyncio.wait(streams, timeout=_GOODBYE_S)  # the others end them when they have heard it
        for task in (*streams, *self._tasks):
            task.cancel()
        for channel in self._channels:
            await channel.close(0)
        await self._server.stop(0)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _settled(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _reason(error: BaseException) -> str:
    """The meaning of a failed stream in words, in place of gRPC's names and error numbers."""
    match error:
        case grpc.aio.AioRpcError() if error.code() == grpc.StatusCode.PERMISSION_DENIED:  # see _accept
            return "it does not know this machine"
        case grpc.RpcError():
            return "the connection to it broke"
        case asyncio.CancelledError():
            return "its envoy was closed"
        case _:
            return str(error) or "no answer in time"


async def main(descriptor: int) -> None:
    """Serve the engine at ``descriptor`` until it is gone."""
    keep_to_owner()
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    transport, engine = await asyncio.get_running_loop().create_connection(EngineSocket, sock=connection)
    try:
        with contextlib.suppress(EngineGone):
            setup = cast(EnvoySetup, await engine.control(EnvoySetup))
            await Envoy(engine, setup).run()
    finally:
        transport.close()


if __name__ == "__main__":
    # Ctrl-C reaches all processes of a terminal; what it means is the engine's decision, and this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(main(int(sys.argv[1])))
