"""The routed experts of a model, and their placement on a ring's nodes: values that planner, transfer and backends
share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertGrid:
    """The routed experts of a model: ``experts`` in each of the decoder layers ``layers``, each of ``slab_bytes``."""

    layers: tuple[int, ...]
    experts: int
    per_token: int
    slab_bytes: int

    @property
    def slabs(self) -> int:
        return len(self.layers) * self.experts


@dataclass(frozen=True)
class Placement:
    """``holders[i][e]``: the ranks that hold expert e of decoder layer ``layers[i]``, ascending, at least one.

    Several ranks may hold an expert (the overlapping placement of section 5.3 of the paper of private LLMs on Apple
    Silicon). The routes of a step alone decide which of them runs it, so that all nodes agree.
    """

    layers: tuple[int, ...]
    nodes: int
    holders: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return len(self.holders[0]) if self.holders else 0

    def holders_of(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each expert of decoder layer ``layer``."""
        return self.holders[self.layers.index(layer)]

    def held(self, rank: int, layer: int) -> tuple[int, ...]:
        """The experts of ``layer`` that ``rank`` holds, ascending."""
        return tuple(expert for expert, ranks in enumerate(self.holders_of(layer)) if rank in ranks)

    def count_of(self, rank: int) -> int:
        """Number of (layer, expert) pairs that ``rank`` holds."""
        return sum(rank in ranks for row in self.holders for ranks in row)
