"""How often each expert was used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.moe.popularity import Popularity


def test_counts_by_layer_and_expert() -> None:
    popularity = Popularity([1, 3], 4)
    popularity.add(1, 2, 5)
    popularity.add(1, 2, 1)
    popularity.add(3, 0, 4)
    assert popularity.layers == (1, 3)
    assert popularity.counts(1) == (0, 0, 6, 0)
    assert popularity.counts(3) == (4, 0, 0, 0)
    assert popularity.hottest(3) == [(1, 2), (3, 0), (1, 0)]
    assert popularity.share([(1, 2)]) == pytest.approx(0.6)


def test_nothing_counted_yet() -> None:
    popularity = Popularity([0], 2)
    assert popularity.share([(0, 0), (0, 1)]) == 0.0
    assert popularity.hottest(1) == [(0, 0)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=40), st.integers(0, 12))
def test_no_other_choice_catches_more_routes(routes: list[tuple[int, int, int]], count: int) -> None:
    popularity = Popularity(range(3), 4)
    for layer, expert, number in routes:
        popularity.add(layer, expert, number)
    hottest = popularity.hottest(count)
    assert len(set(hottest)) == count
    caught = {pair: popularity.counts(pair[0])[pair[1]] for pair in popularity.hottest(12)}
    rest = [number for pair, number in caught.items() if pair not in hottest]
    assert not hottest or not rest or min(caught[pair] for pair in hottest) >= max(rest)
