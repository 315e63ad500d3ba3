"""Places of a ring in one process, for tests: rank contexts over a placement, joined by an exchange in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.cluster.all_gather import RingLayers
from engine.cluster.transport.exchange import Exchange
from engine.models.folders.weight_layout import layout_of
from engine.moe.expert_parallel import Loading, Mode, RankContext
from engine.planning.placement import Placement
from engine.runtimes.protocol import RingPlace
from tests.engine.cluster.memory_exchange import MemoryRing

PLACEMENTS = ("even", "unequal", "overlapping")


def placed(layers: tuple[int, ...], experts: int, nodes: int, how: str = "even") -> Placement:
    """``even``: in turns; ``unequal``: the last node has one expert per layer, the first most; ``overlapping``: in
    turns, and every other expert at the next node too, in another order in every layer."""

    def ranks(layer: int, expert: int) -> tuple[int, ...]:
        if how == "unequal":
            return (max(0, nodes - experts + expert),)
        first = (expert + layer) % nodes
        if how == "overlapping" and expert % 2 == 0:
            return tuple(sorted({first, (first + 1) % nodes}))
        return (first,)

    rows = tuple(tuple(ranks(layer, expert) for expert in range(experts)) for layer in layers)
    return Placement(layers, nodes, rows)


def places(
    placement: Placement,
    mode: Mode = "exact",
    loading: Loading = "selected",
    exchanges: list[Exchange] | None = None,
) -> list[RingPlace]:
    """A place per rank; ``exchange`` of each is its :class:`RingLayers`."""
    ends: list[Any] = list(exchanges or MemoryRing(placement.nodes).ends)
    contexts = [RankContext("epoch", rank, placement, mode, loading) for rank in range(placement.nodes)]
    return [RingPlace(context, RingLayers(context, end)) for context, end in zip(contexts, ends, strict=True)]


def placement_for(folder: Path, nodes: int, how: str = "even") -> Placement:
    layout = layout_of(folder)
    return placed(layout.layers, layout.count, nodes, how)
