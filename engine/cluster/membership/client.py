"""The control plane's client: a connection to one paired machine, whose certificate is the only trusted one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast, get_args

import grpc
import msgspec

from discovery.names import plain_text
from engine.cluster.membership.control_messages import MESSAGE_LIMIT, SERVICE, ControlBody, pack, unpack
from engine.cluster.membership.server import PATIENT_KEEPALIVE_MS, Credentials
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.errors import ErrorKind, ModelError

CALL_S = 10.0
"""Timeout in seconds of a call that neither measures nor loads anything."""

CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    # Connections are not shared within the process, as each machine has its own certificate. No proxy is used.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)

CONNECT_MS = 200
"""Milliseconds that connecting may take. One address after the other is tried."""
PATIENT_CONNECT_MS = 5_000
"""Milliseconds for connecting to a machine that is known to be present but may be busy."""
KEEPALIVE_MS = 3_000
"""Milliseconds without an answer of the other system after which a connection counts as broken."""

SILENT = ("timed out", "timeout", "no route to host", "unreachable", "host is down", "handshaker shutdown")
"""Words of gRPC for a connection that failed because nothing came back, as when a cable is out. The machine's program
may still run."""

Body = TypeVar("Body", bound=msgspec.Struct)


class Unreachable(Exception):
    """Nobody answers at the address, or the machine there is not the paired one."""


class NotInTime(Unreachable):
    """No answer came in time. It may still come: the connection was not closed."""


class NobodyListens(Unreachable):
    """No connection to the address can be made: the machine or its process is gone, or has not started yet."""


class CallGroup:
    """Calls that can be ended together. Calls that begin afterwards are ended at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self.ended = threading.Event()

    def add(self, call: Any) -> None:
        """Add ``call``, which has begun. Raises Unreachable if the group was ended."""
        with self._lock:
            self._running.add(call)
            ended = self.ended.is_set()
        call.add_done_callback(self._over)
        if ended:
            call.cancel()
            raise Unreachable("the call was ended here")

    def end(self) -> None:
        """End all calls, here and on the other machines. They raise Unreachable."""
        with self._lock:
            self.ended.set()
            running = list(self._running)
        for call in running:
            call.cancel()

    def _over(self, call: Any) -> None:
        with self._lock:
            self._running.discard(call)


class PeerClient:
    """Calls methods of one paired machine at one of its addresses (``HOST:PORT``). Thread-safe."""

    def __init__(self, address: str, credentials: Credentials, server_name: str, patient: bool = False) -> None:
        """``patient``: connecting may take longer, and silences are borne."""
        self.address = address
        self._identity = credentials, server_name
        secured = grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificate)
        options = (
            *CLIENT_OPTIONS,
            ("grpc.ssl_target_name_override", server_name),
            # To gRPC it is also the time in which a connection must be made.
            ("grpc.min_reconnect_backoff_ms", PATIENT_CONNECT_MS if patient else CONNECT_MS),
            ("grpc.keepalive_timeout_ms", PATIENT_KEEPALIVE_MS if patient else KEEPALIVE_MS),
        )
        self._channel = grpc.secure_channel(address, secured, options)
        self._closed = threading.Event()

    def call(
        self,
        method: str,
        body: ControlBody,
        answer: type[Body],
        timeout: float = CALL_S,
        calls: CallGroup | None = None,
    ) -> Body:
        """One question, one answer. It can be ended with ``calls``.

        Raises Unreachable. Raises ModelError with the machine's own sentence if it refused. Raises RingProtocolError if
        its answer does not belong to this version.
        """
        invoke = self._channel.unary_unary(_path(method))
        try:
            if calls is None:
                return unpack(cast(bytes, invoke(pack(body), timeout=timeout)), answer)
            return unpack(_result(invoke.future(pack(body), timeout=timeout), calls), answer)
        except (grpc.RpcError, ValueError) as error:
            raise _translated(error) from error

    def stream(
        self, method: str, body: ControlBody, answer: type[Body], timeout: float | None = None
    ) -> AnswerStream[Body]:
        """One question, many answers. Iteration raises as :meth:`call` does."""
        invoke = self._channel.unary_stream(_path(method))
        try:
            return AnswerStream(invoke(pack(body), timeout=timeout), answer)
        except ValueError as error:
            raise _translated(error) from error

    def upload(
        self,
        method: str,
        bodies: Iterable[ControlBody],
        answer: type[Body],
        calls: CallGroup,
        timeout: float | None = None,
    ) -> Body:
        """Many messages, one answer. Raises as :meth:`call` does, and what ``bodies`` raises."""
        failed: list[BaseException] = []

        def packed() -> Iterator[bytes]:
            try:
                for body in bodies:
                    yield pack(body)
            except GeneratorExit:
                raise  # the call ended before they did
            except BaseException as error:
                failed.append(error)
                raise

        invoke = self._channel.stream_unary(_path(method))
        try:
            return unpack(_result(invoke.future(packed(), timeout=timeout), calls), answer)
        except (grpc.RpcError, ValueError) as error:
            if failed:
                raise failed[0] from error
            raise _translated(error) from error

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def apart(self) -> PeerClient:
        """A client of the same machine with its own connection, which tolerates longer silences.

        Closing either one does not end the calls of the other.
        """
        return PeerClient(self.address, *self._identity, patient=True)

    def close(self) -> None:
        """Close the connection. Every running call raises Unreachable."""
        self._closed.set()
        self._channel.close()


class AnswerStream(Iterator[Body]):
    """The answers of a call as they arrive. :meth:`cancel` from any thread."""

    def __init__(self, call: Any, answer: type[Body]) -> None:
        self._call = call
        self._answer = answer

    def __next__(self) -> Body:
        try:
            return unpack(cast(bytes, next(self._call)), self._answer)
        except grpc.RpcError as error:
            raise _translated(error) from error

    def cancel(self) -> None:
        self._call.cancel()


def _result(call: Any, calls: CallGroup) -> bytes:
    calls.add(call)
    try:
        return cast(bytes, call.result())
    except grpc.FutureCancelledError:
        raise Unreachable("the call was ended here") from None


def _path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def _translated(error: Exception) -> Exception:
    """The exception for a failed call. gRPC raises ValueError for a channel that was closed here."""
    if not isinstance(error, grpc.RpcError):
        return Unreachable("the connection was closed here")
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = plain_text(str(error.details() or ""), 1000) if isinstance(error, grpc.Call) else ""
    match code:
        case grpc.StatusCode.FAILED_PRECONDITION:
            kind, separator, sentence = details.partition(": ")
            if separator and kind in get_args(ErrorKind):
                return ModelError(sentence, kind=cast(ErrorKind, kind))
            return ModelError(details or "The other machine refused.", kind="network")
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNIMPLEMENTED:
            return RingProtocolError(details or "The other machine does not understand this version.", kind="network")
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unreachable("this machine is not paired there any more")
        case grpc.StatusCode.ABORTED:
            return PeerLost(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return NotInTime("it did not answer in time")
        case grpc.StatusCode.INTERNAL if not details:  # as the other machine's program says it, see server.py
            return ModelError("The other machine failed; its log (`privatellm locate logs`) says why.", kind="network")
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:  # gRPC's own, such as "Stream removed"
            return Unreachable("the connection to it broke")
        case _:
            silent = any(word in details.lower() for word in SILENT)
            return (Unreachable if silent else NobodyListens)("it cannot be reached")
