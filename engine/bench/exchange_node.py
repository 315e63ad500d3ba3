"""One node of ``bench exchange``: ``python -m engine.bench.exchange_node`` reads its requests from stdin."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec
import psutil

from engine.bench.bench_node import END_S, NeighbourNode, NodeLinks, NodePort, NodeSetup, Requests, send
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.cluster.transport.exchange_timing import time_exchanges
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.system.privacy import keep_to_owner

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
    """Or what waiting for the last rank costs the processor; or what arrives of bytes that differ by rank and size."""


class ExchangeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of every exchange, by its name and size; share of one core while waiting, by name."""

    seconds: dict[str, dict[str, list[float]]] = {}
    busy: dict[str, float] = {}
    digests: dict[str, str] = {}
    """SHA-256 of all that arrived, in the order of ranks and sizes, by name."""


class BenchNode:
    """What the process has between two messages."""

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
    """What a node contributes where digests are compared: ``rank`` bytes less than ``size``, of its own."""
    return random.Random(f"{rank} of {size}").randbytes(max(0, size - rank))


def digest(exchange: Exchange, sizes: Sequence[int]) -> str:
    """SHA-256 of what all nodes contributed. Raises PeerLost, RingProtocolError."""
    found = hashlib.sha256()
    for size in sizes:
        exchange.send((contribution(exchange.rank, size),), size)
        for part in exchange.receive():
            found.update(len(part).to_bytes(8, "big"))
            found.update(part)
    return found.hexdigest()


def _processor_seconds() -> float:
    """Of this process and its children: an envoy is one."""
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


if __name__ == "__main__":
    main()
