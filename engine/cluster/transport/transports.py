"""Which transports an exchange may use, how long each takes, and which one is chosen."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.cluster.transport.epochs import in_networks
from engine.cluster.transport.exchange import Exchange, RingProtocolError
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName

PREFERENCE: tuple[ExchangeName, ...] = ("tls", "socket", "mlx", "envoy", "gloo")
"""On a tie the earlier one: encrypted, then fewer processes and fewer ways to fail."""
TIE = 0.05
"""Medians that differ by less than this share are equal."""
IN_PLAIN_TEXT: frozenset[ExchangeName] = frozenset({"socket", "gloo", "mlx"})
RUNTIMES: Mapping[ExchangeName, str] = {"gloo": "torch", "mlx": "mlx"}
IN_STEP_ONLY: frozenset[ExchangeName] = frozenset({"gloo", "mlx"})
"""Not for central mode, where nodes wait between questions: gloo gives up a silent peer, mlx's ring spins."""
SPINNING: frozenset[ExchangeName] = frozenset({"mlx"})
"""Waiting takes a whole core of whoever waits."""
DECODE_BYTES = 12 * 1024
BETWEEN_BYTES = 4 << 20
_READING = struct.Struct("<d")
"""Seconds that the sender read."""
_LEAST_S = 1e-6


def allowed_exchanges(
    wanted: ExchangeName,
    addresses: Iterable[str],
    trusted: Sequence[str],
    available: Sequence[ExchangeName],
    runtime: str | None = None,
    together: bool = False,
) -> list[ExchangeName]:
    """The transports that may be tried between the machines at ``addresses`` (IP addresses, all nodes').

    Plain text only where every address is on a ``trusted`` network. ``available``: those that every node can run.
    With ``runtime`` named, auto leaves out what comes with another one: gloo is torch's, mlx is mlx's. ``together``:
    some nodes are processes of one machine, whose cores a node that waits must leave to the others, so auto leaves out
    what spins.
    Raises ModelError: ``wanted`` is not allowed, or not available.
    """
    outside = [address for address in addresses if not in_networks(address, trusted)]
    if wanted == "auto":
        if runtime is not None:
            available = [name for name in available if RUNTIMES.get(name, runtime) == runtime]
        if together:
            available = [name for name in available if name not in SPINNING]
        return [name for name in PREFERENCE if name in available and not (outside and name in IN_PLAIN_TEXT)]
    if wanted in IN_PLAIN_TEXT and outside:
        raise ModelError(
            f"The exchange “{wanted}” is plain text, and {outside[0]} is on no network that was called trusted: choose "
            "tls, or name the network in the ring's settings.",
            kind="network",
        )
    if wanted not in available:
        raise ModelError(
            f"The exchange “{wanted}” is not available on every node of this ring: choose auto or tls.", kind="network"
        )
    return [wanted]


def choose_exchange(medians: Mapping[ExchangeName, float]) -> ExchangeName:
    """The fastest by its median (seconds); of those within :data:`TIE` of it, the first in :data:`PREFERENCE`.

    Raises ModelError if none was measured.
    """
    if not medians:
        raise ModelError("No exchange could be connected between the nodes.", kind="network")
    fastest = min(medians.values())
    equal = [name for name in PREFERENCE if name in medians and medians[name] <= fastest * (1 + TIE)]
    return equal[0]


def measure_exchange(exchange: Exchange, nbytes: int = DECODE_BYTES, rounds: int = 50, warm: int = 10) -> float:
    """Median seconds of one exchange as it is in a step: every node reads memory first, as it would an expert's
    weights, then contributes ``nbytes``. From when the last node is done reading; all nodes call this at once.

    Raises PeerLost, RingProtocolError.
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
        # All began when the last exchange ended, so whoever read longest was waited for.
        longest: float = max(_READING.unpack_from(part)[0] for part in got)
        took.append(whole - longest)
    return max(_LEAST_S, statistics.median(took[warm:]))


def between_exchanges() -> Callable[[], None]:
    """Reads a few megabytes when it is called: in a pass the weights of experts go through the caches between two
    exchanges, and the processor has other things to do than to wait for an answer."""
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
