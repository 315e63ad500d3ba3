"""One node of a timed ring: ``python -m benchmarks.papers.timed_node``. The ring is real, the hardware is sleeps.

Routing, ownership, loading rules, headers, framing and the exchange between processes are the product's. In place of
the trunk and of each executed expert the node sleeps, and what arrives is held back for as long as a network takes.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from engine.bench.exchange_node import NeighbourNode, NodeLinks, NodePort, NodeSetup, Requests, send
from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode
from engine.cluster.transport.exchange import Buffer, Exchange
from engine.cluster.transport.registry import open_exchange
from engine.moe.expert_parallel import (
    FLOAT32,
    Call,
    Floats,
    HostRows,
    Indices,
    LayerExchange,
    Loading,
    Mode,
    RankContext,
    Routes,
)
from engine.planning.placement import Placement

_STAMP = struct.Struct("<d")
Carrier = Literal["tls", "envoy"]
"""What carries the exchange."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What the absent hardware takes, in seconds as they are slept."""

    expert_s: float
    """One executed expert of one layer, for one token or as many as it takes as long for."""
    expert_row_s: float = 0.0
    """Computing one token in one expert; counts where all tokens' computing exceeds ``expert_s``."""
    trunk_s: float = 0.0
    """The trunk of one layer."""
    trunk_row_s: float = 0.0
    """Computing one token in it, likewise."""
    shared_s: float = 0.0
    """A shared expert, which needs no exchange."""
    wire_s: float = 0.0
    """From one node's sending to another's receiving."""
    wire_bytes_per_s: float = 0.0
    """Of one node's link, over which it sends to each other node in turn. 0: without limit."""


class TimedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run so many passes with the first ``members`` nodes; the head answers with :class:`TimedPasses`."""

    epoch: str
    key: bytes
    members: list[NeighbourNode]
    exchange: Carrier
    holders: list[list[list[int]]]
    """[layer][expert]: ranks; one entry counts for all layers."""
    layers: int
    per_token: int
    width: int
    mode: Mode
    loading: Loading
    one_by_one: bool
    pace: Pace
    passes: int
    warm: int
    rows: int
    """Tokens of each pass."""
    routes: list[list[list[int]]]
    """Recorded routes [pass][layer][k] of one token each; empty: drawn evenly."""
    shared_meanwhile: bool
    """Whether the shared expert runs while the exchange is on its way, or after it."""


class TimedPasses(msgspec.Struct, frozen=True, kw_only=True):
    """Per measured pass, the seconds in all, in experts, and in and waiting for the exchange, on one node."""

    seconds: list[float] = []
    moe_s: list[float] = []
    exchange_s: list[float] = []
    executed: float = 0.0
    """Experts this node executed per layer, those of the loading rule included."""


class Sleeper:
    """Sleeps; what one sleep lasted too long is taken off the next."""

    def __init__(self) -> None:
        self._over = 0.0

    def sleep(self, seconds: float) -> None:
        if seconds <= 0.0:
            return
        wanted, began = seconds - self._over, time.perf_counter()
        if wanted > 0.0:
            time.sleep(wanted)
        self._over = time.perf_counter() - began - wanted


class Wire:
    """``exchange`` over a network: every contribution arrives as late as ``pace`` says. See
    :class:`engine.cluster.transport.exchange.Exchange`. The nodes must share a clock, so be of one machine."""

    name = "timed"

    def __init__(self, exchange: Exchange, pace: Pace) -> None:
        self._exchange = exchange
        self._pace = pace
        self._sleeper = Sleeper()
        self.rank, self.size = exchange.rank, exchange.size
        self.idle_s = 0.0

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._exchange.send([_STAMP.pack(time.monotonic()), *parts], capacity + _STAMP.size)

    def receive(self) -> list[memoryview]:
        received = self._exchange.receive()
        due = 0.0
        for rank, view in enumerate(received):
            if rank != self.rank:
                sent = float(_STAMP.unpack_from(view)[0])
                rate = self._pace.wire_bytes_per_s
                transfer = len(view) * (self.size - 1) / rate if rate > 0 else 0.0
                due = max(due, sent + self._pace.wire_s + transfer)
        self._sleeper.sleep(due - time.monotonic())
        return [view[_STAMP.size :] for view in received]

    def missing(self) -> Sequence[int]:
        return self._exchange.missing()

    def close(self) -> None:
        self._exchange.close()


def run_passes(links: NodeLinks, wanted: TimedRun) -> TimedPasses:
    """Connect with the other nodes, run, and part. Raises PeerLost, RingProtocolError, ModelError (network)."""
    epoch = links.epoch(wanted.epoch, wanted.members, wanted.key)
    exchange = Wire(open_exchange(wanted.exchange, links.links, epoch), wanted.pace)
    try:
        return TimedPart(wanted, exchange).run()
    finally:
        exchange.close()


class TimedPart:
    """One node's part in all passes of a run. Implements :class:`engine.cluster.central.ExpertRunner`."""

    def __init__(self, wanted: TimedRun, exchange: Exchange) -> None:
        self.width = wanted.width
        self._wanted, self._pace, self._sleeper = wanted, wanted.pace, Sleeper()
        rows = [tuple(map(tuple, layer)) for layer in wanted.holders]
        holders = tuple(rows[index % len(rows)] for index in range(wanted.layers))
        placement = Placement(tuple(range(wanted.layers)), len(wanted.members), holders)
        self._experts = placement.experts
        context = RankContext(wanted.epoch, exchange.rank, placement, wanted.mode, wanted.loading)
        self._context = context
        self._results = np.ones((wanted.rows * wanted.per_token, wanted.width), np.float32)
        self._executed = 0
        self._moe_s = self._exchange_s = 0.0
        self._layers: LayerExchange | None = None
        self._node: CentralNode | None = None
        if wanted.mode != "central":
            self._layers = self._ring = RingLayers(context, exchange)
        elif context.is_head:
            self._layers = CentralHead(context, exchange, one_by_one=wanted.one_by_one)
        else:
            self._node = CentralNode(context, exchange, self, one_by_one=wanted.one_by_one)

    def run(self) -> TimedPasses:
        """All passes, the warm ones not counted."""
        wanted = self._wanted
        seconds, moe, exchanged = [], [], []
        for index in range(wanted.warm + wanted.passes):
            if index == wanted.warm:
                self._executed = 0
            self._moe_s = self._exchange_s = 0.0
            began = time.perf_counter()
            for layer in range(wanted.layers):
                self._layer(index, layer)
            if index >= wanted.warm:
                seconds.append(time.perf_counter() - began)
                moe.append(self._moe_s)
                exchanged.append(self._exchange_s)
        executed = self._executed / (wanted.passes * wanted.layers)
        return TimedPasses(seconds=seconds, moe_s=moe, exchange_s=exchanged, executed=executed)

    def _layer(self, index: int, layer: int) -> None:
        if self._node is not None:
            self._node.serve_layer()
            return
        assert self._layers is not None
        pace, rows = self._pace, self._wanted.rows
        if layer == 0 and self._wanted.mode != "central":
            self._ring.begin_pass()
        self._sleeper.sleep(max(pace.trunk_s, rows * pace.trunk_row_s))
        hidden = HostRows(self._results[:rows], False) if self._layers.needs_hidden else None
        began = time.perf_counter()
        calls = self._layers.assign(layer, self._routed(index, layer), hidden)
        self._exchange_s += time.perf_counter() - began
        for call in calls:
            self._compute(call)
        began = time.perf_counter()
        results = self._results if self._wanted.mode != "fast" else self._results[:rows]
        self._layers.send(results if calls else None, self.width, FLOAT32)
        if self._wanted.shared_meanwhile:
            self._sleeper.sleep(pace.shared_s)
        self._layers.receive()
        self._exchange_s += time.perf_counter() - began
        if not self._wanted.shared_meanwhile:
            self._sleeper.sleep(pace.shared_s)

    def _routed(self, index: int, layer: int) -> Routes:
        """The routes of a layer, equal on all nodes."""
        wanted = self._wanted
        if wanted.routes:
            chosen = np.array(wanted.routes[index % len(wanted.routes)][layer], np.int32)[None, :]
        else:
            scores = np.random.default_rng((7, index, layer)).random((wanted.rows, self._experts))
            chosen = np.ascontiguousarray(scores.argsort(axis=1)[:, : wanted.per_token], np.int32)
        return Routes(chosen, np.full(chosen.shape, 1.0 / wanted.per_token, np.float32))

    def run_experts(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        extra: Sequence[int],
        scale: bool,
        reads: bool,
    ) -> Floats:
        self._compute((indices, tuple(extra)))
        return self._results

    def _compute(self, call: Call) -> None:
        """Sleep for the experts of ``call``."""
        indices, extra = call
        began = time.perf_counter()
        _, tokens = np.unique(indices[indices >= 0], return_counts=True)
        pace = self._pace
        self._executed += len(tokens) + len(extra)
        computing = sum(max(pace.expert_s, int(count) * pace.expert_row_s) for count in tokens)
        self._sleeper.sleep(computing + len(extra) * pace.expert_s)
        self._moe_s += time.perf_counter() - began


def main() -> None:
    """Serve the driver until it closes this process's stdin."""
    requests = Requests()
    setup = requests.receive(NodeSetup)
    if setup is None:
        return
    links = NodeLinks(setup)
    send(NodePort(port=links.port))
    while (wanted := requests.receive(TimedRun)) is not None:
        send(run_passes(links, wanted))
    links.close()
    os._exit(0)


if __name__ == "__main__":
    main()
