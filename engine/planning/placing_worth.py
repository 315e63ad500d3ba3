"""Copies that are worth nothing are left out: see :mod:`engine.planning.placing`, step 5."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.planning.cluster_load import kinds_of, layer_outcomes, odds_of
from engine.planning.routing_load import whole_weights

COPY_WORTH = 0.005
"""Copies that lower a layer's expected maximum by less than this part of it, all together, are not placed."""
WORK = 24_000
"""Outcomes looked at in all, some ten microseconds each; what is not looked at keeps its copies."""
DRAWN = 1000
"""Outcomes of a layer that are drawn where there are too many."""
SAMPLED = 3
"""So many layers are looked at where more are different; the others then do without as large a part of their copies."""

Rows = tuple[tuple[int, ...], ...]


class Leaner:
    """Takes copies out of layers of one model. ``layers``: the different ones that will be looked at."""

    def __init__(self, per_token: int, seconds: Sequence[float], layers: int) -> None:
        self._per_token = per_token
        self._seconds = list(seconds)
        self._whole = whole_weights(seconds, len(seconds))
        self._allowed = WORK // max(1, layers)

    def parts(self, rows: Rows, popularity: Sequence[float], there: Sequence[Collection[int]]) -> tuple[float, float]:
        """Which part of the copies that would have to be brought, and then of those that are ``there`` (experts by
        rank), the layer ``rows`` can do without."""
        odds = odds_of(popularity, len(rows), min(self._per_token, len(rows)))
        most = self._busiest(rows, odds)[0] * (1.0 + COPY_WORTH)
        found = []
        for brought in (True, False):
            order = self._order(rows, popularity, there, brought)
            dropped = self._longest(rows, order, odds, most)
            rows = _without(rows, order[:dropped])
            found.append(dropped / len(order) if order else 1.0)
        return found[0], found[1]

    def leaner(
        self,
        rows: Rows,
        popularity: Sequence[float],
        there: Sequence[Collection[int]],
        parts: tuple[float, float],
    ) -> Rows:
        """``rows`` without these ``parts`` of its copies."""
        for brought, part in zip((True, False), parts, strict=True):
            order = self._order(rows, popularity, there, brought)
            rows = _without(rows, order[: round(part * len(order))])
        return rows

    def _longest(self, rows: Rows, order: Sequence[tuple[int, int]], odds: Sequence[float], most: float) -> int:
        """How many of ``order`` can go, from its beginning, with an expected maximum of ``most``."""
        work = 0
        fits, fails = 0, len(order) + 1
        at = len(order)
        while fails - fits > 1 and work < self._allowed // 2:
            value, outcomes = self._busiest(_without(rows, order[:at]), odds)
            work += outcomes
            if value <= most:
                fits = at
            else:
                fails = at
            at = (fits + fails) // 2
        return fits

    def _busiest(self, rows: Rows, odds: Sequence[float]) -> tuple[float, int]:
        """The expected largest load, in weights, and the outcomes looked at for it."""
        wanted = min(self._per_token, len(rows))
        value, outcomes = 0.0, 0
        for chance, counts in layer_outcomes(kinds_of(rows, odds, wanted), wanted, self._whole, DRAWN):
            value += chance * max(n * weight for n, weight in zip(counts, self._whole, strict=True))
            outcomes += 1
        return value, outcomes

    def _order(
        self, rows: Rows, popularity: Sequence[float], there: Sequence[Collection[int]], brought: bool
    ) -> list[tuple[int, int]]:
        """Copies (expert, rank) in the order in which they go, until every expert has one holder: of the experts with
        most holders the least used one's, from the rank with the largest expected load. Only those that are not
        ``there`` if ``brought``, else only those that are."""
        has = [frozenset(each) for each in there]
        use = [routes + 0.5 for routes in popularity] or [1.0] * len(rows)
        holders = [list(ranks) for ranks in rows]
        loads = [0.0] * len(self._seconds)
        for expert, ranks in enumerate(holders):
            for rank in ranks:
                loads[rank] += use[expert] / len(ranks)
        by_use = sorted(range(len(rows)), key=lambda expert: (use[expert], expert))
        order = []
        for copies in range(max(map(len, holders)), 1, -1):
            for expert in by_use:
                held = holders[expert]
                may = [rank for rank in held if (expert not in has[rank]) == brought]
                if len(held) < copies or not may:
                    continue
                rank = max(may, key=lambda rank: (round(loads[rank] * self._seconds[rank], 9), rank))
                held.remove(rank)
                loads[rank] -= use[expert] / (len(held) + 1)
                for other in held:
                    loads[other] += use[expert] / len(held) - use[expert] / (len(held) + 1)
                order.append((expert, rank))
        return order


def _without(rows: Rows, copies: Sequence[tuple[int, int]]) -> Rows:
    gone = set(copies)
    return tuple(tuple(rank for rank in ranks if (expert, rank) not in gone) for expert, ranks in enumerate(rows))
