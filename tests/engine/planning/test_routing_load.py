"""Owners of active experts and the experts run besides, against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning.placement import Placement
from engine.planning.routing_load import (
    ONE_READ_TOKENS,
    Assigner,
    LoadingRules,
    RecentlyUsed,
    spare_quota,
    whole_weights,
)
from tests.support.random_examples import examples

Rows = tuple[tuple[int, ...], ...]


@st.composite
def layers(draw: st.DrawFn, most_nodes: int = 4, most_experts: int = 7) -> tuple[int, Rows]:
    nodes = draw(st.integers(1, most_nodes))
    some = st.sets(st.integers(0, nodes - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    return nodes, tuple(draw(st.lists(some, min_size=1, max_size=most_experts)))


def sorted_loads(owners: Sequence[int], sizes: Sequence[int], weights: Sequence[int]) -> tuple[int, ...]:
    loads = [0] * len(weights)
    for owner, size in zip(owners, sizes, strict=True):
        loads[owner] += size * weights[owner]
    return tuple(sorted(loads, reverse=True))


@given(layers(), st.data())
@settings(max_examples=examples(20), deadline=None)
def test_few_tokens_are_shared_out_best(layer: tuple[int, Rows], data: st.DataObject) -> None:
    nodes, holders = layer
    weights = data.draw(st.lists(st.sampled_from([1.0, 1.3, 2.0, 5.0]), min_size=nodes, max_size=nodes))
    counts = data.draw(st.lists(st.integers(1, ONE_READ_TOKENS), min_size=len(holders), max_size=len(holders)))
    owners = Assigner(Placement((0,), nodes, (holders,)), weights).owners(0, range(len(holders)), counts)
    assert all(owner in ranks for owner, ranks in zip(owners, holders, strict=True))
    whole = whole_weights(weights, nodes)
    ones = [1] * len(holders)
    best = min(sorted_loads(each, ones, whole)[0] for each in itertools.product(*holders))
    assert sorted_loads(owners, ones, whole)[0] == best


@given(layers(), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_many_tokens_are_shared_out_best_too_if_few_experts_have_them(
    layer: tuple[int, Rows], data: st.DataObject
) -> None:
    nodes, holders = layer
    counts = data.draw(st.lists(st.integers(1, 60), min_size=len(holders), max_size=len(holders)))
    weights = data.draw(st.lists(st.sampled_from([1.0, 1.3, 2.0]), min_size=nodes, max_size=nodes))
    owners = Assigner(Placement((0,), nodes, (holders,)), weights).owners(0, range(len(holders)), counts)
    assert all(owner in ranks for owner, ranks in zip(owners, holders, strict=True))
    sizes = [max(ONE_READ_TOKENS, count) for count in counts]
    whole = whole_weights(weights, nodes)
    best = min(sorted_loads(each, sizes, whole)[0] for each in itertools.product(*holders))
    assert sorted_loads(owners, sizes, whole)[0] == best


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_prompts_experts_are_shared_out_nearly_evenly(nodes: int) -> None:
    holders = tuple(tuple(sorted({e % nodes, (e + 1 + e // nodes) % nodes})) for e in range(128))
    counts = [1 + (e * e * 7919) % 97 for e in range(128)]
    owners = Assigner(Placement((0,), nodes, (holders,))).owners(0, range(128), counts)
    sizes = [max(ONE_READ_TOKENS, count) for count in counts]
    assert sorted_loads(owners, sizes, [1] * nodes)[0] <= 1.03 * sum(sizes) / nodes + 1


def test_an_expert_is_passed_on_to_free_its_only_holder() -> None:
    """Three nodes in a chain: only passing two experts on makes room for the third."""
    placement = Placement((5,), 3, (((0, 1), (1, 2), (0,)),))
    assert sorted(Assigner(placement).owners(5, [0, 1, 2], [1, 1, 1])) == [0, 1, 2]


def test_the_slow_node_runs_fewer() -> None:
    placement = Placement((0,), 2, (((0, 1),) * 4,))
    assert Assigner(placement, (1.0, 3.0)).owners(0, range(4), [1] * 4).count(1) == 1


def test_only_the_active_experts_count() -> None:
    placement = Placement((0, 7), 2, (((0,), (1,), (0, 1), (0, 1)), ((1,), (0,), (0,), (1,))))
    assigner = Assigner(placement)
    assert assigner.owners(0, [0, 2], [1, 1]) == [0, 1]
    assert assigner.owners(0, [1, 2], [1, 1]) == [1, 0]
    assert assigner.owners(7, [0, 1, 3], [9, 1, 50]) == [1, 0, 1]
    assert assigner.owners(0, [], []) == []
    with pytest.raises(KeyError):
        assigner.owners(3, [0], [1])


def test_answers_are_remembered_within_bounds_and_cannot_be_spoilt() -> None:
    placement = Placement((0,), 2, (((0, 1),) * 6,))
    few, fresh = Assigner(placement, remembered=2), Assigner(placement)
    for chosen in itertools.chain(itertools.combinations(range(6), 2), itertools.combinations(range(6), 3)):
        got = few.owners(0, chosen, [1] * len(chosen))
        assert got == fresh.owners(0, list(chosen), [1] * len(chosen))
        got[0] = 99
        assert few.owners(0, chosen, [1] * len(chosen))[0] != 99
    assert len(few._known) <= 2


@given(layers(4, 6), st.lists(st.floats(0.01, 100.0), min_size=4, max_size=4))
@settings(max_examples=examples(10))
def test_nodes_agree_whatever_the_unit_of_the_weights(layer: tuple[int, Rows], weights: list[float]) -> None:
    nodes, holders = layer
    placement = Placement((0,), nodes, (holders,))
    experts, counts = range(len(holders)), [1] * len(holders)
    here = Assigner(placement, weights[:nodes]).owners(0, experts, counts)
    there = Assigner(placement, [8.0 * weight for weight in weights[:nodes]]).owners(0, experts, counts)
    assert here == there


@pytest.mark.parametrize(
    "weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan), (math.nan, 1.0)]
)
def test_weights_that_are_none_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="2 nodes need"):
        Assigner(Placement((0,), 2, (((0,), (1,)),)), weights)


def test_the_quota_of_the_papers_figure_6b() -> None:
    """One node runs three of a token's four experts, the other one: it runs two more."""
    owners = [0, 0, 0, 1]
    assert [spare_quota(owners, rank, [1, 1]) for rank in range(2)] == [0, 2]
    assert (
        spare_quota(owners, 1, [1024, 2048]) == 0
    )  # three of the other's take no longer than one and a half of its own
    assert spare_quota([], 0, [1, 1]) == 0


def test_the_spare_quota_goes_to_the_least_recently_used() -> None:
    placement = Placement((2,), 2, (tuple((0,) if expert < 4 else (1,) for expert in range(8)),))
    rules = LoadingRules(placement, 1, "router-aided")
    assert rules.extra(2, [0, 1, 5], [0, 0, 1]) == (4,)  # the busiest runs two; 4 was never run
    assert rules.extra(2, [0, 1, 2], [0, 0, 0]) == (6, 7, 5)  # 4 was run after 5
    assert rules.extra(2, [4, 5, 6, 7], [1, 1, 1, 1]) == ()
    assert rules.extra(2, [0, 1], [0, 0]) == (4, 5)


def test_no_expert_is_idle_for_longer_than_its_turn() -> None:
    """With router-aided loading every expert of every node is run within as many steps as the node holds, if each step
    leaves it at least one to run."""
    placement = Placement((0,), 2, (tuple((expert % 2,) for expert in range(16)),))
    rules = LoadingRules(placement, 0, "router-aided")
    last = dict.fromkeys(range(0, 16, 2), 0)
    for step in range(1, 200):
        chosen = sorted({(step * 5 + i * 7) % 16 for i in range(4)})
        owners = [expert % 2 for expert in chosen]
        own = [expert for expert in chosen if expert % 2 == 0]
        extra = rules.extra(0, chosen, owners)
        assert not set(extra) & set(own)
        assert len(own) + len(extra) == max(owners.count(0), owners.count(1))
        for expert in (*own, *extra):
            last[expert] = step
        assert all(step - then <= 8 for then in last.values())


def test_busy_full_runs_all_and_selected_none() -> None:
    placement = Placement((0,), 2, (((0,), (0,), (0, 1), (1,)),))
    assert sorted(LoadingRules(placement, 0, "busy-full").extra(0, [1, 3], [0, 1])) == [0, 2]
    assert LoadingRules(placement, 0, "selected").extra(0, [1, 3], [0, 1]) == ()


def test_a_node_without_experts_has_none_to_run() -> None:
    placement = Placement((0,), 2, (((0,), (0,)),))
    for rule in ("router-aided", "busy-full", "selected"):
        assert LoadingRules(placement, 1, rule).extra(0, [0, 1], [0, 0]) == ()  # type: ignore[arg-type]


def test_the_order_of_use() -> None:
    placement = Placement((0,), 2, (((0,), (1,), (0,), (0, 1)),))
    recent = RecentlyUsed(placement, 0)
    assert recent.held(0) == 3
    recent.use(0, [0])
    assert recent.oldest(0, 2) == (2, 3)
    assert recent.oldest(0, 9) == (2, 3, 0)
    with pytest.raises(KeyError):
        recent.use(0, [1])
