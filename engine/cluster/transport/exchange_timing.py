"""How long one exchange takes: measured as in a decoding step, where the nodes read memory in between."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable

from engine.cluster.transport.exchange import Exchange, RingProtocolError

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
