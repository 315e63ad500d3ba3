"""The rank context: one node's knowledge of its epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.planning.placement import Placement

Mode = Literal["exact", "fast", "central"]
Loading = Literal["selected", "router-aided", "busy-full"]

HEAD = 0
"""The head's rank."""


@dataclass(frozen=True)
class RankContext:
    """One node's place in an epoch.

    ``weights`` are the relative seconds per expert of each rank. They decide which holder of a replicated expert runs
    it, in the same way on every node.
    """

    epoch: str
    rank: int
    placement: Placement
    mode: Mode = "exact"
    loading: Loading = "selected"
    weights: tuple[float, ...] = ()

    @property
    def nodes(self) -> int:
        return self.placement.nodes

    @property
    def is_head(self) -> bool:
        return self.rank == HEAD
