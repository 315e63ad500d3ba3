"""The control plane's server: gRPC over mutual TLS. It answers paired machines only, which is checked on every call.

Bodies are msgpack (:mod:`.control_messages`). A method is one entry in a table. gRPC in Python verifies a client's
certificate against a list of roots only. So the roots are exactly the paired certificates, and every handler checks the
certificate itself before it does anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc
import msgspec
import psutil

from discovery.addresses import interface_of
from discovery.tls import shown_to_grpc
from engine.cluster.membership.control_messages import MESSAGE_LIMIT, SERVICE, CallKind, ControlBody, pack, unpack
from engine.cluster.transport.addresses import plain_ip
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.errors import ModelError

WORKERS = 24
MOST_CALLS = 48
MOST_CALLS_EACH = 12
"""Maximum simultaneous calls of one machine. The other machines must be answered whatever it does."""
MOST_CONNECTIONS = 64
HANDSHAKE_S = 5
"""Whole seconds after which a connection without a proven identity is closed."""
STOP_S = 0.5
"""Seconds that a closing server waits for its calls to end."""

PATIENT_KEEPALIVE_MS = 20_000
"""Milliseconds without an answer of the other system after which a connection counts as broken that a silence must not
end, such as one that carries weights over Wi-Fi. Heartbeats notice earlier that a machine is gone."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_metadata_size", 16 * 1024),
    # Two nodes must never share a port unknowingly.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MOST_CALLS),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", PATIENT_KEEPALIVE_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # A stranger can open connections, but must not use up the file descriptors of this process.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
    ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
)


@dataclass(frozen=True)
class Credentials:
    """The certificate and key that one side presents, and the certificates that it trusts, as PEM. Exactly these
    ``roots`` are trusted."""

    key: bytes = field(repr=False)
    certificate: bytes
    roots: bytes


@dataclass(frozen=True)
class Caller:
    """The calling machine, which is paired at this moment. ``address`` is the source of its connection."""

    node_id: str
    address: str
    active: Callable[[], bool]
    """False once the call was cancelled, or the caller is gone or forgotten."""


@dataclass(frozen=True)
class RpcMethod:
    """A method of the control plane.

    ``answer(caller, body)`` returns one answer for the kind ``one`` and yields answers for ``down``. For ``up`` it gets
    an iterator of bodies.
    """

    request: type[ControlBody]
    answer: Callable[[Caller, Any], Any]
    kind: CallKind = "one"


class ControlServer:
    """Listens from its construction on. ``paired(node_id)`` decides on every call whether a machine may call."""

    def __init__(
        self,
        address: str,
        credentials: Callable[[], Credentials],
        paired: Callable[[str], bool],
        methods: Mapping[str, RpcMethod],
    ) -> None:
        """Raises ModelError (network) if ``address`` cannot be listened at."""
        self._paired = paired
        self._credentials = credentials
        self._shown = credentials()
        self._calls: defaultdict[str, set[grpc.ServicerContext]] = defaultdict(set)
        self._lock = threading.Lock()
        self._crowds = CrowdLimit()
        self.port = 0
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="control")
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
        handlers = {name: self._handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        secured = grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._renewed, require_client_authentication=True
        )
        try:
            self.port = self._server.add_secure_port(address, secured)
        except RuntimeError as error:
            self._pool.shutdown(wait=False)
            raise ModelError(
                f"{address} cannot be listened at; another program may use it: choose another port.", kind="network"
            ) from error
        self._server.start()

    def cut(self, node_id: str) -> None:
        """End every running call of ``node_id``."""
        with self._lock:
            calls = list(self._calls.get(node_id, ()))
        for context in calls:
            context.cancel()

    def close(self) -> None:
        self._crowds.close()
        self._server.stop(0).wait(STOP_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates of the machines that are paired now. gRPC calls this for every new connection."""
        self._crowds.came(self.port)
        now = self._credentials()
        if now == self._shown:
            return None
        self._shown = now
        return _configuration(now)

    def _handler(self, method: RpcMethod) -> grpc.RpcMethodHandler:
        match method.kind:
            case "one":
                return grpc.unary_unary_rpc_method_handler(
                    lambda data, context: self._guarded(context, lambda caller: pack(_once(method, caller, data)))
                )
            case "down":
                return grpc.unary_stream_rpc_method_handler(
                    lambda data, context: self._streaming(context, method, data)
                )
            case "up":
                return grpc.stream_unary_rpc_method_handler(
                    lambda stream, context: self._guarded(
                        context,
                        lambda caller: pack(method.answer(caller, (unpack(data, method.request) for data in stream))),
                    )
                )

    def _streaming(self, context: grpc.ServicerContext, method: RpcMethod, data: bytes) -> Iterator[bytes]:
        caller = self._enter(context)
        try:
            for answer in method.answer(caller, unpack(data, method.request)):
                self._check_paired(caller)
                yield pack(answer)
            self._check_paired(caller)
        except GeneratorExit:
            raise
        except Exception as error:
            _refuse(context, error)
        finally:
            self._leave(caller, context)

    def _guarded(self, context: grpc.ServicerContext, answer: Callable[[Caller], bytes]) -> bytes:
        caller = self._enter(context)
        try:
            return answer(caller)
        except Exception as error:
            _refuse(context, error)
            raise AssertionError("a refused call has ended") from error
        finally:
            self._leave(caller, context)

    def _check_paired(self, caller: Caller) -> None:
        if not self._paired(caller.node_id):
            raise _Forgotten

    def _enter(self, context: grpc.ServicerContext) -> Caller:
        node_id = shown_to_grpc(context.auth_context())
        if not node_id or not self._paired(node_id):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
            raise AssertionError("a refused call has ended")
        with self._lock:
            many = len(self._calls[node_id]) >= MOST_CALLS_EACH
            if not many:
                self._calls[node_id].add(context)
        self._crowds.proved(*_end_of(context))
        if many:
            context.abort(grpc.StatusCode.UNAVAILABLE, "")
            raise AssertionError("a refused call has ended")
        return Caller(node_id, _end_of(context)[0], lambda: bool(context.is_active()) and self._paired(node_id))

    def _leave(self, caller: Caller, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._calls[caller.node_id].discard(context)
            if not self._calls[caller.node_id]:
                del self._calls[caller.node_id]


class _Forgotten(Exception):
    """The caller was unpaired while it was answered."""


def _once(method: RpcMethod, caller: Caller, data: bytes) -> msgspec.Struct:
    answer: msgspec.Struct = method.answer(caller, unpack(data, method.request))
    return answer


def _configuration(shown: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(((shown.key, shown.certificate),), shown.roots)


def _end_of(context: grpc.ServicerContext) -> tuple[str, int]:
    """The other end of the connection: its IP address (IPv6 without brackets) and port.

    A link-local address has the name of this machine's interface behind it, whose number gRPC says.
    """
    host, _, port = unquote(context.peer().partition(":")[2]).rpartition(":")
    ip, mark, scope = host.strip("[]").partition("%")
    return f"{ip}{mark}{interface_of(scope) if scope else ''}", int(port) if port.isdecimal() else 0


def _refuse(context: grpc.ServicerContext, error: Exception) -> None:
    """End the call with the sentence of ``error``. An unexpected error reveals nothing about this machine."""
    match error:
        case _Forgotten():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        case RingProtocolError():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        case ModelError():
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{error.kind}: {error}")
        case PeerLost():
            context.abort(grpc.StatusCode.ABORTED, str(error))
        case _ if context.is_active():
            # Details go to this machine's log. The caller learns only that something failed.
            traceback.print_exception(error)
            context.abort(grpc.StatusCode.INTERNAL, "")
        case _:
            raise error


# --- connections of strangers ----------------------------------------------------------------------------------------

MOST_EACH = 16
"""Maximum connections of one address without a proven identity.

No single address may take all the connections that strangers have to the control port. gRPC accepts connections itself
and limits only their sum. So shortly after a connection this process looks at its own sockets. If one address has too
many connections without a proven identity, it ends the oldest of them.
"""
LOOK_S = 0.1
"""Seconds from the first connection of a burst to the check."""
_MOST_PROVED = 1024

End = tuple[str, int]
"""The other end of a connection: IP address and port."""


class CrowdLimit:
    """Limits the connections of each address to the listening port. Thread-safe."""

    def __init__(self) -> None:
        self._proved: dict[End, None] = {}
        self._lock = threading.Lock()
        self._looking: threading.Timer | None = None
        self._closed = False

    def came(self, port: int) -> None:
        """A connection to ``port`` was opened."""
        with self._lock:
            if self._looking is None and not self._closed:
                self._looking = threading.Timer(LOOK_S, self._look, (port,))
                self._looking.daemon = True
                self._looking.start()

    def proved(self, address: str, port: int) -> None:
        """A paired machine called from this end."""
        with self._lock:
            self._proved[_without_scope(address), port] = None
            if len(self._proved) > _MOST_PROVED:
                del self._proved[next(iter(self._proved))]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            looking = self._looking
        if looking is not None:
            looking.cancel()

    def _look(self, port: int) -> None:
        with self._lock:
            self._looking = None
            proved = set(self._proved)
        with contextlib.suppress(psutil.Error, OSError):
            ends: dict[int, End] = {}
            for one in psutil.Process().net_connections("tcp"):
                if one.fd >= 0 and one.raddr and one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED:
                    ends[one.fd] = (_without_scope(one.raddr.ip), one.raddr.port)
            for descriptor in too_many(ends, proved):
                _end(descriptor, port, ends[descriptor])


def too_many(ends: Mapping[int, End], proved: Collection[End], most: int = MOST_EACH) -> Sequence[int]:
    """The descriptors that must be ended: all but the newest ``most`` unproven ones of each address.

    ``ends``: the other end by descriptor. Pure.
    """
    strangers: defaultdict[str, list[int]] = defaultdict(list)
    for descriptor, end in sorted(ends.items()):
        if end not in proved:
            strangers[end[0]].append(descriptor)
    return [descriptor for each in strangers.values() for descriptor in each[:-most]]


def _without_scope(address: str) -> str:
    """An IP address as the system's list of sockets has it."""
    return plain_ip(address).partition("%")[0]


def _end(descriptor: int, port: int, end: End) -> None:
    """Shut the connection down if the descriptor still belongs to it. Its owner closes it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        host, number = connection.getpeername()[:2]
        if (_without_scope(str(host)), number) == end and connection.getsockname()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
