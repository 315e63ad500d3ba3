"""Single moves and exchanges that lower a layer's expected maximum: see :mod:`engine.planning.placing`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.planning.cluster_load import LayerKinds, kinds_of, layer_outcomes, odds_of, possible
from engine.planning.routing_load import whole_weights

WORK = 20_000
"""Outcomes looked at in all while improving; some ten microseconds each."""
_LEAST = 1e-9
"""Gains below this are rounding."""

RESTARTS = 8
"""How often the search starts again from the best so far, shaken by some changes at random (the same every time)."""
_SHAKEN = 3

Rows = tuple[tuple[int, ...], ...]
Value = tuple[float, float]
"""A layer's expected maximum, and what its loads' squares are expected to add up to."""


class Improver:
    """Improves layers, ``layers`` different ones in all, which share the work that is allowed."""

    def __init__(self, per_token: int, seconds: Sequence[float], layers: int) -> None:
        self._per_token = per_token
        self._whole = whole_weights(seconds, len(seconds))
        self._allowed = WORK // max(1, layers)
        self._known: dict[LayerKinds, Value] = {}

    def improved(self, holders: Sequence[Sequence[int]], limits: Sequence[int], popularity: Sequence[float]) -> Rows:
        """``holders`` after all changes that help. No rank holds more than its ``limits``; every expert stays held."""
        rows = [tuple(ranks) for ranks in holders]
        wanted = min(self._per_token, len(rows))
        odds = odds_of(popularity, len(rows), wanted)
        if len(limits) < 2 or possible(kinds_of(rows, odds, wanted), wanted) * 4 > self._allowed:
            return tuple(rows)
        search = _Search(self, odds, wanted, limits)
        best, rows = search.climbed(rows)
        mark = 1
        for _ in range(RESTARTS):
            if search.work > self._allowed:
                break
            other = rows
            for _ in range(_SHAKEN):
                mark = (mark * 16807) % 2147483647
                changes = list(_changes(other, limits))
                if changes:
                    other = _applied(other, changes[mark % len(changes)])
            value, other = search.climbed(other)
            if better(value, best):
                best, rows = value, other
        return tuple(rows)

    def allows(self, work: int) -> bool:
        """Whether a layer may go on after so much work."""
        return work <= self._allowed

    def value(self, rows: Sequence[tuple[int, ...]], odds: Sequence[float], wanted: int) -> tuple[Value, int]:
        """The expected maximum, what the loads' squares are expected to add up to (of placements with the same maximum
        the more even one leads on), and the outcomes looked at for it."""
        kinds = kinds_of(rows, odds, wanted)
        found = self._known.get(kinds)
        outcomes = 1 + len(rows) * wanted // 64  # what finding the kinds takes
        if found is not None:
            return found, outcomes
        largest = squares = 0.0
        for chance, counts in layer_outcomes(kinds, wanted, self._whole):
            loads = [n * weight for n, weight in zip(counts, self._whole, strict=True)]
            largest += chance * max(loads)
            squares += chance * sum(load * load for load in loads)
            outcomes += 1
        self._known[kinds] = (largest, squares)
        return (largest, squares), outcomes


class _Search:
    """The search for one layer's best placement. ``work``: outcomes looked at so far."""

    def __init__(self, improver: Improver, odds: Sequence[float], wanted: int, limits: Sequence[int]) -> None:
        self.work = 0
        self._improver = improver
        self._odds = odds
        self._wanted = wanted
        self._limits = limits

    def climbed(self, rows: list[tuple[int, ...]]) -> tuple[Value, list[tuple[int, ...]]]:
        """``rows`` and all single changes that help, one after the other, and what that is worth."""
        best = self._value(rows)
        searching = True
        while searching and self._improver.allows(self.work):
            searching = False
            for changes in _changes(rows, self._limits):
                changed = _applied(rows, changes)
                value = self._value(changed)
                if better(value, best):
                    rows, best, searching = changed, value, True
                    break
                if not self._improver.allows(self.work):
                    break
        return best, rows

    def _value(self, rows: Sequence[tuple[int, ...]]) -> Value:
        value, work = self._improver.value(rows, self._odds, self._wanted)
        self.work += work
        return value


def better(value: Value, best: Value) -> bool:
    """A smaller expected maximum; of the same ones, the more even."""
    if abs(value[0] - best[0]) > _LEAST * best[0]:
        return value[0] < best[0]
    return value[1] < best[1] * (1.0 - _LEAST)


def _changes(rows: Sequence[tuple[int, ...]], limits: Sequence[int]) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """All single changes, each as experts with their new holders."""
    nodes = len(limits)
    held = [sum(rank in ranks for ranks in rows) for rank in range(nodes)]
    for expert, ranks in enumerate(rows):
        for rank in range(nodes):
            if rank in ranks:
                continue
            for old in ranks:
                if held[rank] < limits[rank]:
                    yield [(expert, _changed(ranks, old, rank))]
                yield from _exchanges(rows, expert, old, rank)
            for other, others in enumerate(rows):
                if rank in others and len(others) > 1:  # the rank's own copy of another makes room
                    yield [(expert, _changed(ranks, None, rank)), (other, _changed(others, rank, None))]


def _exchanges(
    rows: Sequence[tuple[int, ...]], expert: int, old: int, rank: int
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """``old`` gives ``expert`` to ``rank`` and takes another for it."""
    for other, others in enumerate(rows):
        if other > expert and rank in others and old not in others:
            yield [(expert, _changed(rows[expert], old, rank)), (other, _changed(others, rank, old))]


def _applied(rows: Sequence[tuple[int, ...]], changes: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    changed = list(rows)
    for expert, ranks in changes:
        changed[expert] = ranks
    return changed


def _changed(ranks: tuple[int, ...], without: int | None, further: int | None) -> tuple[int, ...]:
    found = [rank for rank in ranks if rank != without]
    if further is not None:
        found.append(further)
    return tuple(sorted(found))
