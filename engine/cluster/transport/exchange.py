"""The exchange: every node sends its contribution to all others, once per MoE layer, in the same order everywhere."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.errors import ModelError, PeerLost

__all__ = ["Buffer", "Exchange", "Link", "PeerLost", "RingProtocolError"]

Buffer = bytes | bytearray | memoryview


class RingProtocolError(ModelError):
    """A peer sent what no node of this version sends: too large, out of order, or under a wrong key."""


class Exchange(Protocol):
    """All-gather among the ranks of an epoch. Not thread-safe.

    An exchange is one :meth:`send` and one :meth:`receive` on every node. A node may compute in between.
    """

    @property
    def name(self) -> str:
        """``tls``, ``socket``, ``envoy``, ``gloo`` or ``mlx``."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for the others since the exchange was opened: for the slowest node, and for the
        transfer."""
        ...

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        """Begin an exchange. ``parts``, one after the other, are this node's contribution, which may be empty.

        They may be reused when :meth:`receive` has returned. ``capacity``: bytes of the largest contribution that any
        other node may make in this exchange. Raises PeerLost.
        """
        ...

    def receive(self) -> list[memoryview]:
        """End the exchange: all contributions in rank order, this node's own included, valid until the next
        :meth:`send`.

        Waits as long as the others live. Raises PeerLost if one is gone. Raises RingProtocolError if one sent more than
        ``capacity`` or anything that is not the expected exchange. The exchange is over then. After
        PeerLost the others hear of it when :meth:`close` is called: by then this node must be able to say whom it lost.
        """
        ...

    def missing(self) -> Sequence[int]:
        """The ranks whose contributions :meth:`receive` waits for, as far as this exchange knows. Thread-safe."""
        ...

    def close(self) -> None:
        """Close every link. A :meth:`receive` that waits in another thread raises PeerLost. May be called twice."""
        ...


class Link(Protocol):
    """A connection to one peer that carries frames, authenticated and (except ``socket``) encrypted."""

    def send(self, *parts: Buffer) -> None:
        """Send one frame. Raises PeerLost."""
        ...

    def receive(self, limit: int) -> memoryview:
        """The next frame of at most ``limit`` bytes, valid until the next call. Waits.

        Raises PeerLost if the peer is gone or the link was closed here, RingProtocolError.
        """
        ...

    def close(self) -> None:
        """Close the link. Thread-safe. May be called twice."""
        ...


# --- how long an exchange takes --------------------------------------------------------------------------------------


DECODE_BYTES = 12 * 1024
"""Bytes of one node's contribution in a decoding step of the paper's model."""
BETWEEN_BYTES = 4 << 20
"""Bytes that a node reads between two exchanges."""
_READING = struct.Struct("<d")
"""Seconds that the sender spent reading."""
_LEAST_S = 1e-6


def measure_exchange(exchange: Exchange, nbytes: int = DECODE_BYTES, rounds: int = 50, warm: int = 10) -> float:
    """Median seconds of one exchange of ``nbytes`` from every node. All nodes call this at the same time.

    As in a step, every node first reads memory, as it would read an expert's weights. The time counts from the moment
    at which the last node has finished reading. Raises PeerLost, RingProtocolError.
    """
    between = between_exchanges()
    payload = bytes(max(0, nbytes - _READING.size))
    took: list[float] = []
    for _ in range(warm + rounds):
        began = time.perf_counter()
        between()
        reading = time.perf_counter() - began
        exchange.send((_READING.pack(reading), payload), _READING.size + len(payload))
        got = exchange.receive()
        whole = time.perf_counter() - began
        if [len(part) for part in got] != [_READING.size + len(payload)] * exchange.size:
            raise RingProtocolError("A measured exchange gave something else than was sent.", kind="network")
        # All nodes began when the last exchange ended, so the one that read longest was waited for.
        longest: float = max(_READING.unpack_from(part)[0] for part in got)
        took.append(whole - longest)
    return max(_LEAST_S, statistics.median(took[warm:]))


def between_exchanges() -> Callable[[], None]:
    """A function that reads :data:`BETWEEN_BYTES`.

    In a pass the weights of experts go through the caches between two exchanges, so the processor does not just wait.
    """
    import numpy as np

    words = np.ones(BETWEEN_BYTES // 8)

    def read() -> None:
        words.max()

    return read


def time_exchanges(exchange: Exchange, nbytes: int, rounds: int) -> list[float]:
    """Seconds of each of ``rounds`` exchanges of ``nbytes`` from every node. Raises PeerLost, RingProtocolError."""
    payload = bytes([exchange.rank]) * nbytes
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        exchange.send((payload,), nbytes)
        got = exchange.receive()
        times.append(time.perf_counter() - began)
        if [len(part) for part in got] != [nbytes] * exchange.size:
            raise RingProtocolError("A measured exchange gave something else than was sent.", kind="network")
    return times
