"""What a ring costs a node per MoE layer beside experts and wire: sharing out the routes, framing, taking apart."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.cluster.all_gather import RingLayers
from engine.cluster.central import CentralHead, CentralNode, Floats
from engine.cluster.transport.exchange import Buffer
from engine.cluster.transport.transports import between_exchanges
from engine.moe.expert_parallel import Indices, Words
from engine.moe.rank_context import HEAD, RankContext
from engine.planning.placement import Placement

EXPERTS = 8
PER_TOKEN = 2
ROUNDS = 60
_PLACEMENT = Placement((0,), 2, (tuple((expert % 2,) for expert in range(EXPERTS)),))


class _Here:
    """An exchange between two that are both here; see :class:`engine.cluster.transport.exchange.Exchange`. ``other``
    makes what the other node contributes from what this one sent."""

    name = "none"
    size = 2
    idle_s = 0.0

    def __init__(self, rank: int, other: Callable[[bytes], bytes]) -> None:
        self.rank = rank
        self.sent = b""
        self._other = other

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self.sent = b"".join(parts)

    def receive(self) -> list[memoryview]:
        found = [memoryview(self.sent), memoryview(self._other(self.sent))]
        return found if self.rank == HEAD else found[::-1]

    def missing(self) -> list[int]:
        return []

    def close(self) -> None:
        return


@functools.cache
def layer_seconds(width: int) -> float:
    """Median seconds of one MoE layer of a decoding step of hidden states of ``width`` numbers, without experts and
    wire."""
    layers = RingLayers(RankContext("measuring", HEAD, _PLACEMENT, "fast"), _Here(HEAD, lambda sent: sent))
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)

    def local(indices: Indices, weights: object, extra: tuple[int, ...]) -> Words:
        return row

    def layer(indices: Indices) -> None:
        layers.begin_pass()
        layers.run(0, indices, weights, local, width, row.dtype)

    return _median(layer)


class _NoExperts:
    """Results without experts; see :class:`engine.cluster.central.ExpertRunner`."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._rows = np.ones((PER_TOKEN, width), np.float32)

    def run_experts(
        self, layer: int, hidden: Floats, indices: Indices, weights: Floats, extra: Sequence[int], scale: bool
    ) -> Floats:
        return self._rows


@functools.cache
def central_seconds(width: int) -> float:
    """The same for a layer of central mode, of the head and one other node together, who take turns."""
    answers: list[bytes] = []
    asked: list[bytes] = []
    runner = _NoExperts(width)
    others = _Here(1, lambda sent: asked[-1])
    node = CentralNode(RankContext("measuring", 1, _PLACEMENT, "fast"), others, runner)

    def answer(sent: bytes) -> bytes:
        if answers:
            return answers.pop()
        asked[:] = [sent]
        node.serve_layer()
        answers.append(others.sent)
        return b""

    head = CentralHead(RankContext("measuring", HEAD, _PLACEMENT, "fast"), _Here(HEAD, answer))
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)
    rows = np.ones((PER_TOKEN, width), np.float32)

    def local(indices: Indices, weights: object, extra: tuple[int, ...]) -> Words:
        return rows

    def layer(indices: Indices) -> None:
        head.hidden(row, False)
        head.run(0, indices, weights, local, width, row.dtype)

    return _median(layer)


def _median(layer: Callable[[Indices], None]) -> float:
    """Seconds of ``layer`` with routes to one expert of each node, so that both contribute a row."""
    random = np.random.default_rng(0)
    between = between_exchanges()
    samples = []
    for _ in range(ROUNDS):
        mine, other = 2 * random.integers(EXPERTS // 2), 2 * random.integers(EXPERTS // 2) + 1
        indices = np.array([[mine, other]], np.int32)
        between()
        begun = time.perf_counter()
        layer(indices)
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples)
