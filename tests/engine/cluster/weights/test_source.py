"""The plan which item is fetched from which source, against all plans that there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.weights.source import FetchPlan, plan_fetch
from engine.cluster.weights.transfer import Item

ITEMS = tuple(Item(f"expert/0/{number}", 10, checksum, ((0, 0, 10),)) for number in range(4) for checksum in (1, 2))
"""Four experts, each in two versions."""
OFFERS = st.lists(st.lists(st.sampled_from(ITEMS), max_size=6), max_size=4)
WANTED = st.lists(st.sampled_from(ITEMS), max_size=4, unique_by=lambda item: item.key)


def best_of_all(items: Sequence[Item], offers: Sequence[Sequence[Item]]) -> tuple[int | None, ...]:
    """Among all ways to choose a source or none for every item, the one that misses least, and then asks the earliest
    sources for the most."""
    nobody = len(offers)

    def is_possible(plan: Sequence[int]) -> bool:
        return all(source == nobody or item in offers[source] for item, source in zip(items, plan, strict=True))

    def cost(plan: Sequence[int]) -> tuple[int, list[int]]:
        used = [-sum(source == number for source in plan) for number in range(nobody)]
        return sum(source == nobody for source in plan), used

    plans = filter(is_possible, itertools.product(range(nobody + 1), repeat=len(items)))
    return tuple(None if source == nobody else source for source in min(plans, key=cost))


@given(WANTED, OFFERS)
def test_no_other_plan_is_better(items: list[Item], offers: list[list[Item]]) -> None:
    best = best_of_all(items, offers)
    plan = plan_fetch(items, offers)
    assert plan.sources == best
    assert plan.missing == tuple(item for item, source in zip(items, best, strict=True) if source is None)


@pytest.mark.parametrize(
    ("offers", "sources"),
    [
        ((), (None, None)),
        ((ITEMS,), (0, 0)),
        ((ITEMS[:1], ITEMS), (0, 1)),
        ((ITEMS[1:2], ITEMS[:1]), (1, None)),
        (((), ITEMS[4:5], ITEMS[:5]), (2, 1)),
    ],
)
def test_an_item_comes_from_the_first_that_has_exactly_it(
    offers: Sequence[Sequence[Item]], sources: tuple[int | None, ...]
) -> None:
    items = (ITEMS[0], ITEMS[4])
    missing = tuple(item for item, source in zip(items, sources, strict=True) if source is None)
    assert plan_fetch(items, offers) == FetchPlan(sources, missing)
