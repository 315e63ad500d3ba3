"""The expected number of experts that each node of a ring runs per layer and token: the paper's E[#exec. experts].

A token goes to ``k`` different experts. A set of k experts has a probability proportional to the product of their odds.
This distribution assumes nothing beyond how often each expert is used; with even use all sets are equally likely.
Experts with the same holders are interchangeable, so an outcome is a number of experts per set of holders. Outcomes are
enumerated or, if there are too many, drawn at random with a fixed seed. (Paper of private LLMs on Apple Silicon,
section 4.4, table 1.)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.planning.placement import Placement
from engine.planning.routing_load import level, whole_weights

ENUMERATED = 4000
"""Maximum outcomes of a layer (numbers of experts per set of holders) that are enumerated."""
DRAWN = 4000
"""Number of outcomes drawn at random over all layers, if there are more than ENUMERATED in one."""
WORK = 24_000
"""Maximum outcomes examined over all layers. In models with many layers, evenly spread layers stand for the others."""
KEPT_CHOICES = 4096
"""Size of the cache of sums over choices of experts, in sums."""
KEPT_SHARES = 16_384
"""Size of the cache of how ranks share an outcome's experts, in outcomes."""
_CERTAIN = 0.995
"""Largest expected share of tokens that use one expert. More popular experts count as this."""

Counts = tuple[int, ...]
LayerKinds = tuple[tuple[Counts, tuple[float, ...]], ...]
"""A layer's experts by their holders. For each set of holders, entry n is the sum of the products of odds over all
choices of n of its experts."""


@dataclass(frozen=True)
class LoadOutcomes:
    """Possible outcomes of a layer and step, as (probability, experts run by each rank), over all layers alike."""

    outcomes: tuple[tuple[float, Counts], ...]

    def expected(self, cost: Callable[[Counts], float]) -> float:
        """The expected value of ``cost``."""
        return sum(chance * cost(counts) for chance, counts in self.outcomes)

    def busiest(self, weights: Sequence[float] = ()) -> float:
        """The expected largest number of experts of any rank. With ``weights`` (seconds per expert of each rank, or
        relative) the numbers are weighted."""
        if not weights:
            return self.expected(lambda counts: float(max(counts)))
        return self.expected(lambda counts: max(n * weight for n, weight in zip(counts, weights, strict=True)))

    def per_rank(self) -> tuple[float, ...]:
        """The expected number of experts that each rank runs."""
        nodes = len(self.outcomes[0][1]) if self.outcomes else 0
        return tuple(sum(chance * counts[rank] for chance, counts in self.outcomes) for rank in range(nodes))


def expected_experts(
    placement: Placement, per_token: int, popularity: Sequence[Sequence[float]] = (), weights: Sequence[float] = ()
) -> float:
    """Expected experts per layer of the busiest node, averaged over tokens and layers.

    With ``weights``, in terms of experts of the fastest node. See :func:`load_outcomes`.
    """
    outcomes = load_outcomes(placement, per_token, popularity, weights)
    relative = [weight / min(weights) for weight in weights] if weights else []
    return outcomes.busiest(relative)


def load_outcomes(
    placement: Placement, per_token: int, popularity: Sequence[Sequence[float]] = (), weights: Sequence[float] = ()
) -> LoadOutcomes:
    """The possible loads of the nodes from one token's ``per_token`` experts, shared as
    :class:`engine.planning.routing_load.Assigner` does with ``weights``.

    ``popularity``: routes counted before, [layer of the placement][expert]; empty: even use. Raises ValueError for a
    popularity of other layers or experts.
    """
    if popularity and [len(row) for row in popularity] != [placement.experts] * len(placement.layers):
        raise ValueError(f"popularity must have {len(placement.layers)} layers of {placement.experts} experts")
    wanted = min(per_token, placement.experts)
    whole = whole_weights(weights, placement.nodes)
    rows: dict[LayerKinds, int] = {}
    for place, holders in enumerate(placement.holders):
        odds = odds_of(popularity[place] if popularity else (), placement.experts, wanted)
        kinds = kinds_of(holders, odds, wanted)
        rows[kinds] = rows.get(kinds, 0) + 1
    chance_by_counts: dict[Counts, float] = {}
    layers = _spread(list(rows.items()), wanted)
    total = sum(times for _, times in layers)
    for kinds, times in layers:
        for chance, counts in layer_outcomes(kinds, wanted, whole, max(64, DRAWN // len(layers))):
            chance_by_counts[counts] = chance_by_counts.get(counts, 0.0) + chance * times / total
    return LoadOutcomes(tuple((chance, counts) for counts, chance in chance_by_counts.items()))


def odds_of(popularity: Sequence[float], experts: int, per_token: int) -> list[float]:
    """The odds of each expert to be one of a token's ``per_token``, from its earlier use; 1.0 for all if nothing was
    counted.

    With products of odds, each expert gets about its share of the routes.
    """
    total = sum(popularity)
    if total <= 0 or per_token >= experts:
        return [1.0] * experts
    # An expert never seen is rare, not impossible: it counts as one route seen half.
    rare = 0.5 * per_token / (total + 1.0)
    shares = [min(_CERTAIN, max(rare, routes * per_token / total)) for routes in popularity]
    return [share / (1.0 - share) for share in shares]


def kinds_of(holders: Sequence[Counts], odds: Sequence[float], per_token: int) -> LayerKinds:
    """The experts of a layer by their ``holders``, with sums of products of ``odds`` for up to ``per_token``
    experts."""
    if len(set(odds)) < 2:
        numbers = sorted(Counter(holders).items())
        return tuple((ranks, _choices((odds[0],) * n, per_token)) for ranks, n in numbers)
    alike: dict[Counts, list[float]] = {}
    for ranks, chance in zip(holders, odds, strict=True):
        alike.setdefault(ranks, []).append(chance)
    return tuple((ranks, _choices(tuple(chances), per_token)) for ranks, chances in sorted(alike.items()))


@functools.lru_cache(maxsize=KEPT_CHOICES)
def _choices(odds: tuple[float, ...], most: int) -> tuple[float, ...]:
    """Entry [n]: the sum over all choices of n experts of the products of their ``odds``, for n up to ``most``.

    Cached: a search changes the experts of two or three kinds at a time, so it mostly asks for known sums.
    """
    row = [1.0]
    for chance in odds:
        if len(row) <= most:
            row.append(0.0)
        for n in range(len(row) - 1, 0, -1):
            row[n] += row[n - 1] * chance
    return tuple(row)


def _rest(kinds: LayerKinds, per_token: int) -> list[list[float]]:
    """Entry [i][n]: the sum over all choices of n experts from kind i and the kinds after it."""
    rest = [[1.0] + [0.0] * per_token]
    for _, row in reversed(kinds):
        after = rest[-1]
        rest.append([sum(row[i] * after[n - i] for i in range(min(n, len(row) - 1) + 1)) for n in range(per_token + 1)])
    return rest[::-1]


def possible(kinds: LayerKinds, per_token: int) -> int:
    """Number of outcomes: ways to split ``per_token`` experts over the kinds."""
    ways = [1] + [0] * per_token
    for _, row in kinds:
        ways = [sum(ways[n - i] for i in range(min(n, len(row) - 1) + 1)) for n in range(per_token + 1)]
    return ways[per_token]


def _spread(rows: list[tuple[LayerKinds, int]], per_token: int) -> list[tuple[LayerKinds, int]]:
    """Evenly spread members of ``rows``, as many as WORK allows."""
    most = max((min(ENUMERATED, possible(kinds, per_token)) for kinds, _ in rows), default=1)
    kept = max(4, WORK // max(1, most))
    if len(rows) <= kept:
        return rows
    return [rows[i * len(rows) // kept] for i in range(kept)]


def layer_outcomes(
    kinds: LayerKinds, per_token: int, weights: Sequence[int], draws: int = DRAWN
) -> Iterator[tuple[float, Counts]]:
    """The outcomes of one layer as (probability, experts run by each rank), possibly with repeated counts.

    If there are more than ENUMERATED, ``draws`` of them are drawn.
    """
    rest = _rest(kinds, per_token)
    if possible(kinds, per_token) <= ENUMERATED:
        chosen = _enumerated(kinds, per_token, rest[0][per_token])
    else:
        chosen = _drawn(kinds, per_token, rest, draws)
    held, whole = [ranks for ranks, _ in kinds], tuple(weights)
    for chance, numbers in chosen:
        yield chance, _shared(tuple((ranks, n) for ranks, n in zip(held, numbers, strict=True) if n), whole)


@functools.lru_cache(maxsize=KEPT_SHARES)
def _shared(active: tuple[tuple[Counts, int], ...], weights: Counts) -> Counts:
    """Experts that each rank runs, given the number of active experts of each set of holders.

    Cached: the placements in a search have most of their outcomes in common.
    """
    counts = [0] * len(weights)
    for owner in level([ranks for ranks, n in active for _ in range(n)], weights):
        counts[owner] += 1
    return tuple(counts)


def _enumerated(kinds: LayerKinds, per_token: int, total: float) -> list[tuple[float, Counts]]:
    """All outcomes with their probabilities, one number per kind, which add up to ``per_token``."""
    beginnings: list[tuple[float, int, Counts]] = [(1.0 / total, per_token, ())]
    for place, (_, row) in enumerate(kinds):
        after = sum(len(each) - 1 for _, each in kinds[place + 1 :])
        beginnings = [
            (chance * row[n], left - n, (*numbers, n))
            for chance, left, numbers in beginnings
            for n in range(max(0, left - after), min(left, len(row) - 1) + 1)
        ]
    return [(chance, numbers) for chance, _, numbers in beginnings]


def fractions() -> Iterator[float]:
    """Numbers from 0 to below 1 as if drawn at random, the same ones every time."""
    state = 0x9E3779B97F4A7C15
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 11) / (1 << 53)


def _drawn(
    kinds: LayerKinds, per_token: int, rest: Sequence[Sequence[float]], draws: int
) -> list[tuple[float, Counts]]:
    """Randomly drawn outcomes. Each kind's number is drawn given what is left for it and the kinds after it."""
    marks = fractions()
    times_drawn: dict[Counts, int] = {}
    for _ in range(draws):
        left = per_token
        numbers = []
        for place, (_, row) in enumerate(kinds):
            mark = next(marks) * rest[place][left]
            n, last = 0, min(left, len(row) - 1)
            while n < last:
                mark -= row[n] * rest[place + 1][left - n]
                if mark < 0.0:
                    break
                n += 1
            numbers.append(n)
            left -= n
        key = tuple(numbers)
        times_drawn[key] = times_drawn.get(key, 0) + 1
    return [(times / draws, numbers) for numbers, times in times_drawn.items()]
