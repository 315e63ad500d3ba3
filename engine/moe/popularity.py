"""Popularity: how often each expert is used. It seeds placements and is shown by the heat map."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class Popularity:
    """Counts of routes per (layer, expert). ``layers`` are the decoder layers that have routed experts."""

    def __init__(self, layers: Iterable[int], experts: int) -> None:
        self._counts = {layer: array("q", bytes(8 * experts)) for layer in layers}

    def add(self, layer: int, expert: int, routes: int) -> None:
        """Add ``routes`` tokens that were sent to ``expert`` of ``layer``."""
        self._counts[layer][expert] += routes

    def counts(self, layer: int) -> Sequence[int]:
        """Routes per expert of ``layer``."""
        return tuple(self._counts[layer])

    def address(self, layer: int) -> int:
        """Address of the counts of ``layer``, which are 64-bit integers, so that the kernels can add to them."""
        return self._counts[layer].buffer_info()[0]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._counts)

    def hottest(self, count: int) -> list[tuple[int, int]]:
        """The ``count`` most used (layer, expert) pairs, most used first; ties go to the lower layer and expert."""
        pairs = [(-routes, layer, expert) for layer, row in self._counts.items() for expert, routes in enumerate(row)]
        return [(layer, expert) for _, layer, expert in sorted(pairs)[:count]]

    def share(self, pairs: Iterable[tuple[int, int]]) -> float:
        """The fraction of all routes that went to ``pairs``, 0.0 to 1.0; 0.0 if nothing was counted."""
        total = sum(map(sum, self._counts.values()))
        return sum(self._counts[layer][expert] for layer, expert in pairs) / total if total else 0.0
