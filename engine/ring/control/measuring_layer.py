"""What a ring costs a node per MoE layer beside experts and wire: sharing out the routes, framing, taking apart."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

import numpy as np

from engine.exchange.exchange import Buffer
from engine.exchange.layers import Indices, Words
from engine.exchange.seat import Seat
from engine.planning.placement import Placement
from engine.ring.running.sharing import RingLayers

EXPERTS = 8
PER_TOKEN = 2
ROUNDS = 60
BETWEEN_BYTES = 4 << 20
"""Read before each round: in a pass the experts' weights have gone through the caches before the next exchange."""


class _Answering:
    """An exchange whose other node always sends what this one sends; see :class:`engine.exchange.exchange.Exchange`."""

    name = "none"
    rank = 0
    size = 2

    def __init__(self) -> None:
        self._sent = b""

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._sent = b"".join(parts)

    def receive(self) -> list[memoryview]:
        return [memoryview(self._sent), memoryview(self._sent)]

    def close(self) -> None:
        return


@functools.cache
def layer_seconds(width: int) -> float:
    """Median seconds of one MoE layer of a decoding step of hidden states of ``width`` numbers, without experts and
    wire."""
    placement = Placement((0,), 2, (tuple((expert % 2,) for expert in range(EXPERTS)),))
    layers = RingLayers(Seat("measuring", 0, placement, "fast"), _Answering())
    row = np.ones((1, width), np.float32)
    weights = np.full((1, PER_TOKEN), 0.5, np.float32)
    random = np.random.default_rng(0)
    between = np.ones(BETWEEN_BYTES // 8)

    def local(indices: Indices, weights: object, extra: tuple[int, ...]) -> Words:
        return row

    samples = []
    for _ in range(ROUNDS):
        # One expert of each node, so that both contribute a row.
        mine, other = 2 * random.integers(EXPERTS // 2), 2 * random.integers(EXPERTS // 2) + 1
        indices = np.array([[mine, other]], np.int32)
        between.max()
        begun = time.perf_counter()
        layers.begin_pass()
        layers.run(0, indices, weights, local, width, row.dtype)
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples)
