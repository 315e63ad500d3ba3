"""One node of ``bench exchange``: ``python -m engine.bench.exchange_node`` reads its requests from stdin."""

from __future__ import annotations

import hashlib
import os
import queue
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import psutil

from discovery.certificates import der_of, fingerprint
from discovery.identity import Identity
from discovery.link_listener import LinkListener
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.exchange import Exchange, PeerLost, time_exchanges
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.system.processes import keep_to_owner

WAIT_S = 0.3
"""Time in seconds that a node is kept waiting to measure the CPU time of waiting."""


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Connect ``exchanges`` with ``neighbours`` (all nodes by rank); it answers with :class:`NodeConnected`."""

    epoch: str
    key: bytes
    neighbours: list[NeighbourNode]
    exchanges: list[ExchangeName]


class NodeConnected(msgspec.Struct, frozen=True, kw_only=True):
    exchanges: list[ExchangeName]
    problems: dict[str, str]


class NodeRound(msgspec.Struct, frozen=True, kw_only=True):
    """Measure ``exchanges`` in turn, each with all ``sizes``; it answers with :class:`ExchangeTimes`."""

    exchanges: list[ExchangeName]
    sizes: list[int]
    repeats: list[int]
    warm: int
    what: Literal["times", "waiting", "digests"] = "times"
    """The measurement: ``times`` of exchanges, processor use while ``waiting`` for the last rank, or ``digests`` of the
    received bytes, which differ by rank and size."""


class ExchangeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of every exchange, by its name and size; share of one core while waiting, by name."""

    seconds: dict[str, dict[str, list[float]]] = {}
    busy: dict[str, float] = {}
    digests: dict[str, str] = {}
    """SHA-256 of all that arrived, in the order of ranks and sizes, by name."""


class BenchNode:
    """The state of the process between two messages."""

    def __init__(self, setup: NodeSetup) -> None:
        self._links = NodeLinks(setup)
        self._exchanges: dict[ExchangeName, Exchange] = {}

    @property
    def port(self) -> int:
        return self._links.port

    def connect(self, plan: NodePlan) -> NodeConnected:
        problems: dict[str, str] = {}
        for name in plan.exchanges:
            epoch = self._links.epoch(f"{plan.epoch} {name}", plan.neighbours, plan.key)
            try:
                self._exchanges[name] = open_exchange(name, self._links.links, epoch)
            except (ModelError, PeerLost, OSError) as error:
                problems[name] = str(error)
        return NodeConnected(exchanges=list(self._exchanges), problems=problems)

    def measure(self, wanted: NodeRound) -> ExchangeTimes:
        """Raises PeerLost, RingProtocolError."""
        if wanted.what == "digests":
            return ExchangeTimes(
                digests={name: digest(self._exchanges[name], wanted.sizes) for name in wanted.exchanges}
            )
        if wanted.what == "waiting":
            return ExchangeTimes(
                busy={name: self._busy_while_waiting(self._exchanges[name]) for name in wanted.exchanges}
            )
        seconds: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for name in wanted.exchanges:
            for size, repeats in zip(wanted.sizes, wanted.repeats, strict=True):
                times = time_exchanges(self._exchanges[name], size, wanted.warm + repeats)
                seconds[name][str(size)] = times[wanted.warm :]
        return ExchangeTimes(seconds=seconds)

    def _busy_while_waiting(self, exchange: Exchange) -> float:
        exchange.send((b"x",), 1)
        exchange.receive()
        late = exchange.rank == exchange.size - 1
        if late:
            time.sleep(WAIT_S)
        exchange.send((b"x",), 1)
        began, busy = time.perf_counter(), _processor_seconds()
        exchange.receive()
        share = (_processor_seconds() - busy) / max(1e-9, time.perf_counter() - began)
        return 0.0 if late else share

    def close(self) -> None:
        for exchange in self._exchanges.values():
            exchange.close()
        self._links.close()


def contribution(rank: int, size: int) -> bytes:
    """A node's contribution for the comparison of digests: ``size`` minus ``rank`` bytes, different for each node."""
    return random.Random(f"{rank} of {size}").randbytes(max(0, size - rank))


def digest(exchange: Exchange, sizes: Sequence[int]) -> str:
    """SHA-256 of what all nodes contributed. Raises PeerLost, RingProtocolError."""
    received = hashlib.sha256()
    for size in sizes:
        exchange.send((contribution(exchange.rank, size),), size)
        for part in exchange.receive():
            received.update(len(part).to_bytes(8, "big"))
            received.update(part)
    return received.hexdigest()


def _processor_seconds() -> float:
    """Processor seconds used by this process and its children, such as an envoy."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children()):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def main() -> None:
    """Serve the bench until it closes this process's stdin."""
    keep_to_owner()
    requests = Requests()
    setup = requests.receive(NodeSetup)
    if setup is None:
        return
    node = BenchNode(setup)
    try:
        send(NodePort(port=node.port))
        plan = requests.receive(NodePlan)
        if plan is not None:
            send(node.connect(plan))
            while (wanted := requests.receive(NodeRound)) is not None:
                send(node.measure(wanted))
    finally:
        # An exchange of another library may hang: see above.
        threading.Timer(END_S, os._exit, (0,)).start()
        node.close()
        os._exit(0)


# --- what the processes of a benchmark's ring share ------------------------------------------------------------------


LOOPBACK = ("127.0.0.0/8", "::1/128")
MOST_LINE = 1 << 24
"""Bytes of the longest request: recorded routes are long."""
END_S = 2.0
"""Time in seconds after its benchmark at which a process ends, whatever hangs."""


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The node's own identity; it answers with :class:`NodePort`."""

    rank: int
    certificate: bytes
    private_key: bytes
    host: str = "127.0.0.1"
    """Address on which the node listens."""


class NodePort(msgspec.Struct, frozen=True, kw_only=True):
    port: int


class NeighbourNode(msgspec.Struct, frozen=True, kw_only=True):
    certificate: bytes
    port: int
    host: str = "127.0.0.1"


class NodeLinks:
    """A node's identity, its listener, and its links to the other nodes."""

    def __init__(self, setup: NodeSetup) -> None:
        self._rank = setup.rank
        identity = Identity(
            node_id=fingerprint(der_of(setup.certificate)),
            certificate_pem=setup.certificate,
            key_pem=setup.private_key,
            storage="memory",
            instance="0" * 16,
        )
        self.links = Links(identity)
        self._listener = LinkListener.open(setup.host)
        self.links.attach(self._listener)

    @property
    def port(self) -> int:
        return self._listener.port

    def epoch(self, name: str, nodes: Sequence[NeighbourNode], key: bytes) -> Epoch:
        """An epoch of all ``nodes`` by rank."""
        members = tuple(
            Member(rank, fingerprint(der_of(one.certificate)), one.certificate, (f"{one.host}:{one.port}",))
            for rank, one in enumerate(nodes)
        )
        return Epoch(name, self._rank, members, key, LOOPBACK)

    def close(self) -> None:
        self.links.close()
        self._listener.close()


class Requests:
    """The benchmark's requests, read in a separate thread, so that the end of the benchmark is noticed while this node
    waits for others."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="reading the bench", daemon=True).start()

    def receive(self, kind: type[Any]) -> Any:
        """The next message; None once the benchmark is gone."""
        line = self._lines.get()
        return msgspec.json.decode(line, type=kind) if line else None

    def _read(self) -> None:
        while line := sys.stdin.buffer.readline(MOST_LINE):
            self._lines.put(line)
        # This node may be waiting for nodes that have ended already. It must end in any case.
        ending = threading.Timer(END_S, os._exit, (0,))
        ending.daemon = True
        ending.start()
        self._lines.put(b"")


def send(message: msgspec.Struct) -> None:
    """Answer the benchmark."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
