"""Rehearsal: all nodes of an epoch run the layers of a decoding step without a model, over one exchange.

Measurements of single nodes do not predict a ring: nodes wake one another, find their caches cold, and share the cores
and the memory of one machine. The rehearsal therefore runs layers with their real framing. Reads of memory stand for
the trunk and the experts. The remaining time of a layer is the overhead of the ring.
"""

from __future__ import annotations

import contextlib
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode
from engine.cluster.transport.exchange import Exchange, RingProtocolError
from engine.errors import ModelError
from engine.moe.expert_parallel import FLOAT32, HEAD, Floats, HostRows, Indices, LayerExchange, RankContext, Routes
from engine.moe.kernels.pool import physical_cores, shared_pool

BLOCKS = 6
"""Number of blocks of layers. Each block is averaged, and the median block is used, so that a short disturbance does
not count."""
BLOCK_LAYERS = 12
"""Layers per block."""
LAYERS = BLOCKS * BLOCK_LAYERS
WARM = 8
"""Number of warm-up layers, which are not measured."""
READ_BYTES = 2 << 20
"""Bytes read in place of a layer's trunk, and of its experts."""
CYCLE_BYTES = 64 << 20
"""Bytes of the memory that is read, of which caches hold only a part."""
LARGEST_WIDTH = 1 << 17
"""Maximum hidden size that another machine may ask for."""
LEAST_S = 1e-7
"""Minimum result in seconds."""


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsal of one node at ``context``.

    A layer has hidden states of ``width`` numbers and ``per_token`` experts per token. ``threads`` is the number of
    threads; None: one per core. ``one_by_one`` is as in :class:`CentralHead`.
    """

    context: RankContext
    width: int
    per_token: int
    threads: int | None = None
    one_by_one: bool = False
    machines: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that share a machine. Only the head knows them."""

    def run(self, exchange: Exchange) -> float:
        """This node's median seconds of a MoE layer beside trunk and experts. All nodes must call this at the same
        time.

        Raises PeerLost, RingProtocolError.
        """
        layers = _Layers(self, exchange)
        wholes = [layers.run(index) for index in range(WARM + LAYERS)]
        seconds = _gather_seconds(exchange, [*layers.trunks, *layers.experts])
        trunks = [node[WARM : WARM + LAYERS] for node in seconds]
        experts = [node[2 * WARM + LAYERS :] for node in seconds]
        cores = physical_cores()
        shared = Shared(self.machines, max(1, cores // min(cores, self.threads or cores)))
        return max(LEAST_S, beside_work(wholes[WARM:], trunks, experts, self.context.mode == "central", shared))


@dataclass(frozen=True)
class Shared:
    """``machines`` are groups of ranks that share a machine, ``places`` how many of them its cores run in parallel."""

    machines: tuple[tuple[int, ...], ...] = ()
    places: int = 1

    def done(self, seconds: Sequence[float]) -> float:
        """Seconds until all nodes are done, each having worked for ``seconds[rank]`` and waited for a free core."""
        queued = [sum(seconds[rank] for rank in ranks) / self.places for ranks in self.machines]
        return max([*seconds, *queued])


def ranks_together(machines: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that share a machine. ``machines`` are by rank. Pure."""
    found: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        found.setdefault(machine, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values() if len(ranks) > 1)


def beside_work(
    wholes: Sequence[float],
    trunks: Sequence[Sequence[float]],
    experts: Sequence[Sequence[float]],
    central: bool,
    shared: Shared,
) -> float:
    """Seconds of a layer that are neither trunk nor experts: the median of the averages of blocks of layers.

    ``wholes`` are the head's seconds by layer; ``trunks`` and ``experts`` are [rank][layer]. In central mode only the
    head has a trunk. In the other modes all nodes do both and wait for the slowest one, which differs from layer to
    layer. A prediction knows only each node's average, so the time lost to that is part of the result. Pure.
    """

    def beside(block: slice) -> float:
        trunk, expert = ([statistics.fmean(node[block]) for node in work] for work in (trunks, experts))
        if central:
            work = trunk[HEAD] + shared.done(expert)
        else:
            work = shared.done([a + b for a, b in zip(trunk, expert, strict=True)])
        return statistics.fmean(wholes[block]) - work

    starts = range(0, len(wholes), BLOCK_LAYERS)
    return statistics.median(beside(slice(start, start + BLOCK_LAYERS)) for start in starts)


class _Reader:
    """Reads memory with the node's number of threads."""

    def __init__(self, threads: int | None) -> None:
        self._words = np.ones(CYCLE_BYTES // 8)
        self._at = 0
        self._pool = None
        with contextlib.suppress(ModelError):  # no native kernels here
            self._pool = shared_pool(threads or physical_cores())

    def read(self, nbytes: int) -> float:
        """Read the next ``nbytes``. Returns the seconds it took."""
        first = self._at
        self._at = (first + nbytes) % CYCLE_BYTES
        words = self._words[first // 8 : (first + nbytes) // 8]
        began = time.perf_counter()
        if self._pool is None:
            words.max()
        else:
            self._pool.read_seconds(words.ctypes.data, words.nbytes)
        return time.perf_counter() - began


class _Layers:
    """This node's part in the layers. ``trunks`` and ``experts`` are the seconds of its reads, by layer.

    Implements :class:`engine.cluster.central.ExpertRunner` for a node of central mode.
    """

    def __init__(self, rehearsal: Rehearsal, exchange: Exchange) -> None:
        context = rehearsal.context
        self.trunks: list[float] = []
        self.experts: list[float] = []
        self.width = rehearsal.width
        self._reader = _Reader(rehearsal.threads)
        self._context = context
        self._per_token = min(rehearsal.per_token, context.placement.experts)
        rows = self._per_token if context.mode != "fast" else 1
        self._rows = np.ones((rows, rehearsal.width), np.float32)
        self._run: Callable[[int], None]
        if context.mode == "central":
            if context.is_head:
                head = CentralHead(context, exchange, one_by_one=rehearsal.one_by_one)
                self._run = lambda index: self._as_central_head(head, index)
            else:
                node = CentralNode(context, exchange, self, one_by_one=rehearsal.one_by_one)
                self._run = lambda index: node.serve_layer()
        else:
            layers = RingLayers(context, exchange)
            self._run = lambda index: self._as_node(layers, index)

    def run(self, index: int) -> float:
        """Run layer ``index`` of the rehearsal, counted from 0. Returns its seconds."""
        began = time.perf_counter()
        self.experts.append(0.0)
        self.trunks.append(self._trunk())
        self._run(index)
        return time.perf_counter() - began

    def _trunk(self) -> float:
        central_follower = self._context.mode == "central" and not self._context.is_head
        return 0.0 if central_follower else self._reader.read(READ_BYTES)

    def _layer(self, index: int) -> int:
        layers = self._context.placement.layers
        return layers[index % len(layers)]

    def _routes(self, index: int) -> Routes:
        """The routes of a layer, equal on all nodes."""
        chosen = np.random.default_rng(index).permutation(self._context.placement.experts)[: self._per_token]
        weights = np.full((1, self._per_token), 1.0 / self._per_token, np.float32)
        return Routes(np.ascontiguousarray(chosen[None, :], np.int32), weights)

    def _as_central_head(self, head: CentralHead, index: int) -> None:
        self._exchanged(head, index, HostRows(self._rows[:1], False))

    def _as_node(self, layers: RingLayers, index: int) -> None:
        if index % len(self._context.placement.layers) == 0:
            layers.begin_pass()
        self._exchanged(layers, index, None)

    def _exchanged(self, layers: LayerExchange, index: int, hidden: HostRows | None) -> None:
        calls = layers.assign(self._layer(index), self._routes(index), hidden)
        if calls:
            self._compute()
        layers.send(self._rows if calls else None, self.width, FLOAT32)
        layers.receive()

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
        self._compute()
        return self._rows

    def _compute(self) -> None:
        """Read in place of the experts, once per layer."""
        if not self.experts[-1]:
            self.experts[-1] = self._reader.read(READ_BYTES)


def _gather_seconds(exchange: Exchange, mine: Sequence[float]) -> list[list[float]]:
    """The seconds of every node, by rank. Raises RingProtocolError for an invalid list."""
    form = struct.Struct(f"<{len(mine)}d")
    exchange.send((form.pack(*mine),), form.size)
    seconds_by_rank: list[list[float]] = []
    for part in exchange.receive():
        values: Any = form.unpack(part) if len(part) == form.size else ()
        if not values or not all(0.0 <= value < 1e6 for value in values):
            raise RingProtocolError("A node sent impossible seconds of a rehearsal.", kind="network")
        seconds_by_rank.append(list(values))
    return seconds_by_rank
