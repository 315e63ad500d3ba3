"""A place in a ring that has no other node: what being a node costs is measured there."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cluster.all_gather import RingLayers
from engine.cluster.transport.exchange import Buffer
from engine.moe.rank_context import HEAD, RankContext
from engine.planning.placement import Placement
from engine.runtimes.protocol import RingPlace


class LoneExchange:
    """An exchange of one node: it gets back what it sent. See :class:`engine.cluster.transport.exchange.Exchange`."""

    name = "none"
    rank = HEAD
    size = 1
    idle_s = 0.0

    def __init__(self) -> None:
        self._sent = b""

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._sent = b"".join(parts)

    def receive(self) -> list[memoryview]:
        return [memoryview(self._sent)]

    def missing(self) -> list[int]:
        return []

    def close(self) -> None:
        return


def ring_of_one(layers: Sequence[int], experts: int) -> RingPlace:
    """The only node holds all ``experts`` of all MoE ``layers``; sums travel (fast mode), as far as anything does."""
    placement = Placement(tuple(layers), 1, (((HEAD,),) * experts,) * len(layers))
    context = RankContext("alone", HEAD, placement, "fast")
    return RingPlace(context, RingLayers(context, LoneExchange()))
