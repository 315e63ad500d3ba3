"""Placements of experts on nodes: always within limits, and as good as brute force finds them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.planning.cluster_load import expected_experts
from engine.planning.placement import ExpertGrid, Placement
from engine.planning.placement_planner import NodeRoom, Shortfall, dealt, numbers, place, place_held
from tests.support.pairwise import pairwise
from tests.support.random_examples import examples

MB = 1_000_000


def placed(grid: ExpertGrid, rooms: Sequence[NodeRoom], *rest: object) -> Placement:
    found = place(grid, rooms, *rest)  # type: ignore[arg-type]
    assert isinstance(found, Placement)
    return found


def check_valid(grid: ExpertGrid, rooms: Sequence[NodeRoom], found: Placement) -> None:
    assert found.layers == grid.layers
    assert found.nodes == len(rooms)
    assert all(len(row) == grid.experts for row in found.holders)
    for row in found.holders:
        for ranks in row:
            assert ranks
            assert list(ranks) == sorted(set(ranks))
            assert all(0 <= rank < len(rooms) for rank in ranks)
    for rank, room in enumerate(rooms):
        assert found.count_of(rank) * grid.slab_bytes <= max(0, room.expert_bytes)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ExpertGrid, list[NodeRoom], list[list[int]]]:
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    slab = draw(st.sampled_from([1, 7 * MB]))
    grid = ExpertGrid(tuple(range(2, 2 + layers)), experts, draw(st.integers(1, experts)), slab)
    room = st.integers(-3, layers * experts + 3).map(lambda slabs: slabs * slab + slab // 2)
    rooms = draw(st.lists(st.builds(NodeRoom, room, st.sampled_from([0.5, 1.0, 1.7, 9.0])), min_size=1, max_size=6))
    row = st.lists(st.integers(0, 99), min_size=experts, max_size=experts)
    use = draw(st.one_of(st.just([]), st.lists(row, min_size=layers, max_size=layers)))
    return grid, rooms, use


@pytest.mark.soak
@given(problems(), st.booleans())
@settings(max_examples=examples(12), deadline=None)
def test_feasible_exactly_if_the_slabs_fit(
    problem: tuple[ExpertGrid, list[NodeRoom], list[list[int]]], overlap: bool
) -> None:
    grid, rooms, use = problem
    slots = sum(min(max(0, room.expert_bytes) // grid.slab_bytes, grid.slabs) for room in rooms)
    found = place(grid, rooms, use, overlap)
    if slots < grid.slabs:
        assert isinstance(found, Shortfall)
        assert found.missing_bytes == (grid.slabs - slots) * grid.slab_bytes
        return
    assert isinstance(found, Placement)
    check_valid(grid, rooms, found)
    if not overlap:
        assert all(len(ranks) == 1 for row in found.holders for ranks in row)
    assert place(grid, rooms, use, overlap) == found


@given(problems())
@settings(max_examples=examples(6), deadline=None)
def test_memory_left_is_used_or_not_worth_it(problem: tuple[ExpertGrid, list[NodeRoom], list[list[int]]]) -> None:
    """Where a node could hold more, that would not lower the expected maximum worth mentioning."""
    grid, rooms, use = problem
    found = place(grid, rooms, use)
    if isinstance(found, Shortfall):
        return
    open_ = [
        rank
        for rank, room in enumerate(rooms)
        if found.count_of(rank) < min(max(0, room.expert_bytes) // grid.slab_bytes, grid.slabs)
    ]
    if all(len(found.holders) * grid.experts * grid.slab_bytes <= rooms[rank].expert_bytes for rank in open_):
        full = Placement(
            found.layers,
            found.nodes,
            tuple(tuple(tuple(sorted({*ranks, *open_})) for ranks in row) for row in found.holders),
        )
        seconds = [room.seconds for room in rooms]
        layers = [(row, more) for row, more in zip(found.holders, full.holders, strict=True)]
        for at, rows in enumerate(layers):
            counted = [use[at]] if use else []
            lean, most = (
                expected_experts(Placement((0,), found.nodes, (row,)), grid.per_token, counted, seconds) for row in rows
            )
            assert lean <= most * 1.0051 or len(layers) > 3


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=examples(40), deadline=None)
def test_renaming_nodes_changes_little(
    problem: tuple[ExpertGrid, list[NodeRoom], list[list[int]]], random: object
) -> None:
    """The order of the nodes decides ties only: each node gets as many experts, whatever its rank."""
    grid, rooms, _ = problem
    slots = [min(max(0, room.expert_bytes) // grid.slab_bytes, grid.slabs) for room in rooms]
    if sum(slots) < grid.slabs:
        return
    order = list(range(len(rooms)))
    random.shuffle(order)  # type: ignore[attr-defined]
    seconds = [room.seconds for room in rooms]
    here = numbers(slots, seconds, grid.slabs)
    there = numbers([slots[i] for i in order], [seconds[i] for i in order], grid.slabs)
    for place_, rank in enumerate(order):
        assert abs(there[place_] - here[rank]) <= 1


def every_placement(experts: int, slots: Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """All placements of one layer within ``slots`` that use all memory (a copy more never hurts)."""
    ranks = range(len(slots))
    sets = [each for n in range(1, len(slots) + 1) for each in itertools.combinations(ranks, n)]
    most = [min(slot, experts) for slot in slots]
    found = []
    for holders in itertools.product(sets, repeat=experts):
        if all(sum(rank in each for each in holders) == most[rank] for rank in ranks):
            found.append(holders)
    return found


@functools.cache
def best_possible(
    experts: int, k: int, slots: tuple[int, ...], seconds: tuple[float, ...], use: tuple[int, ...]
) -> float:
    known: dict[object, float] = {}
    for holders in every_placement(experts, slots):
        key = tuple(sorted(zip(holders, use, strict=True))) if use else tuple(sorted(holders))
        if key not in known:
            layer = Placement((0,), len(slots), (holders,))
            known[key] = expected_experts(layer, k, [list(use)] if use else [], seconds)
    return min(known.values())


Shape = tuple[int, tuple[int, ...]]
SHAPES: list[Shape] = [
    (4, (2, 2)),
    (5, (3, 4)),
    (6, (3, 3)),
    (6, (4, 4)),
    (6, (5, 2)),
    (5, (2, 2, 2)),
    (6, (2, 2, 2)),
    (6, (3, 3, 2)),
]
"""Experts, and how many of them each node has room for."""
PER_TOKEN = (2, 3)
SECONDS = ((1.0, 1.0, 1.0), (1.0, 1.0, 2.0), (1.0, 3.0, 1.5))
USES: tuple[tuple[int, ...], ...] = ((), (50, 20, 20, 5, 3, 2), (10, 9, 8, 1, 1, 1))
FEW = pairwise(SHAPES, PER_TOKEN, SECONDS, USES)
REST = [row for row in itertools.product(SHAPES, PER_TOKEN, SECONDS, USES) if row not in FEW]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "k", "seconds", "use"), [*FEW, *(pytest.param(*row, marks=pytest.mark.soak) for row in REST)]
)
def test_as_good_as_the_best_of_all_placements(
    shape: Shape, k: int, seconds: tuple[float, ...], use: tuple[int, ...]
) -> None:
    experts, slots = shape
    seconds, use = seconds[: len(slots)], use[:experts]
    grid = ExpertGrid((0,), experts, k, MB)
    rooms = [NodeRoom(slot * MB, each) for slot, each in zip(slots, seconds, strict=True)]
    found = placed(grid, rooms, [list(use)] if use else [])
    check_valid(grid, rooms, found)
    reached = expected_experts(found, k, [list(use)] if use else [], seconds)
    assert reached <= 1.05 * best_possible(experts, k, slots, seconds, use)


@pytest.mark.parametrize("slots", [(3, 3), (4, 3), (5, 2), (5, 4), (6, 1)])
@pytest.mark.parametrize("use", [[], [[9, 5, 1], [1, 1, 1]], [[9, 1, 1], [2, 8, 3]]])
def test_layers_share_a_nodes_memory_about_best(slots: tuple[int, int], use: list[list[int]]) -> None:
    """Two layers of three experts on two nodes, against all placements of both layers together."""
    grid = ExpertGrid((0, 1), 3, 2, MB)
    found = placed(grid, [NodeRoom(slot * MB) for slot in slots], use)
    check_valid(grid, [NodeRoom(slot * MB) for slot in slots], found)
    best = 9.0
    for holders in itertools.product([(0,), (1,), (0, 1)], repeat=6):
        if all(sum(rank in ranks for ranks in holders) <= slots[rank] for rank in range(2)):
            every = Placement((0, 1), 2, (holders[:3], holders[3:]))
            best = min(best, expected_experts(every, 2, use))
    assert expected_experts(found, 2, use) <= 1.12 * best  # the odd slot may be in the other layer


def test_the_hottest_experts_are_spread() -> None:
    use = [[100, 90, 80, 70, 1, 1, 1, 1]]
    found = placed(ExpertGrid((0,), 8, 2, MB), [NodeRoom(2 * MB)] * 4, use)
    assert {found.holders[0][expert] for expert in range(4)} == {(0,), (1,), (2,), (3,)}


@pytest.mark.soak
def test_copies_lower_the_expected_maximum() -> None:
    grid = ExpertGrid(tuple(range(4)), 32, 4, MB)
    reached = []
    for share in (1.0, 1.25, 1.5, 2.0, 3.0):
        found = placed(grid, [NodeRoom(int(share * 32) * MB)] * 4)
        reached.append(expected_experts(found, 4))
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] < 1.2 < 1.8 < reached[0]


def test_unequal_memories_and_speeds() -> None:
    grid = ExpertGrid(tuple(range(10)), 16, 4, MB)
    tight = placed(grid, [NodeRoom(120 * MB), NodeRoom(30 * MB), NodeRoom(10 * MB)])
    assert [tight.count_of(rank) for rank in range(3)] == [120, 30, 10]
    assert all(11 <= len(tight.held(0, layer)) <= 13 for layer in grid.layers)  # evenly over the layers
    plenty = placed(grid, [NodeRoom(160 * MB, 1.0), NodeRoom(160 * MB, 3.0)], (), False)
    assert plenty.count_of(0) + plenty.count_of(1) == 160
    assert 120 <= plenty.count_of(0) <= 150


def test_a_node_without_room_holds_nothing() -> None:
    found = placed(ExpertGrid((0, 1), 4, 2, MB), [NodeRoom(-5), NodeRoom(8 * MB), NodeRoom(0)])
    assert [found.count_of(rank) for rank in range(3)] == [0, 8, 0]


def test_one_node_holds_all() -> None:
    found = placed(ExpertGrid((0, 3), 5, 2, MB), [NodeRoom(100 * MB)])
    assert found.holders == (((0,),) * 5,) * 2


def test_what_is_there_already_stays() -> None:
    """Three nodes become two: those that stay keep what they have, and only what is missing moves."""
    grid = ExpertGrid(tuple(range(6)), 12, 2, MB)
    before = placed(grid, [NodeRoom(24 * MB)] * 3)
    has = [{layer: before.held(rank, layer) for layer in grid.layers} for rank in (0, 2)]
    after = placed(grid, [NodeRoom(40 * MB)] * 2, (), True, has)
    for rank in range(2):
        for layer in grid.layers:
            assert set(has[rank][layer]) <= set(after.held(rank, layer))
    # A head that has the whole model does not thereby keep all of it.
    whole = {layer: tuple(range(12)) for layer in grid.layers}
    shared = placed(grid, [NodeRoom(72 * MB), NodeRoom(72 * MB)], (), False, [whole, {}])
    assert [shared.count_of(rank) for rank in range(2)] == [36, 36]


@pytest.mark.soak
def test_a_model_of_94_layers_on_eight_nodes_is_placed_at_once() -> None:
    """The work is bounded: layers that are alike are placed once, and what would take long is not improved."""
    grid = ExpertGrid(tuple(range(94)), 128, 8, MB)
    use = [[(expert * 7 + layer * 3) % 128 + 1 for expert in range(128)] for layer in range(94)]
    found = placed(grid, [NodeRoom(2000 * MB, 1.0 + rank / 10) for rank in range(8)], use)
    check_valid(grid, [NodeRoom(2000 * MB)] * 8, found)
    assert all(1950 <= found.count_of(rank) <= 2000 for rank in range(8))


def test_room_alone_is_no_reason_for_a_copy() -> None:
    """Three nodes with room for everything, two experts per token: each expert on two nodes is as good as on three."""
    grid = ExpertGrid((0, 1), 8, 2, MB)
    found = placed(grid, [NodeRoom(100 * MB)] * 3)
    assert expected_experts(found, 2) == pytest.approx(1.0)
    assert sum(found.count_of(rank) for rank in range(3)) <= 2 * grid.slabs
    one = placed(ExpertGrid((0, 1), 8, 1, MB), [NodeRoom(100 * MB)] * 3)  # whoever holds it runs it
    assert sum(one.count_of(rank) for rank in range(3)) == grid.slabs


def test_copies_are_first_those_that_are_there() -> None:
    """The head has the whole model: what it holds needs no sending, so the others are sent each expert once."""
    grid = ExpertGrid((0, 1), 8, 2, MB)
    whole = {layer: tuple(range(8)) for layer in grid.layers}
    found = placed(grid, [NodeRoom(100 * MB)] * 3, (), True, [whole, {}, {}])
    assert expected_experts(found, 2) == pytest.approx(1.0)
    assert found.count_of(1) + found.count_of(2) <= grid.slabs
    # A node that has experts of its own keeps being the one that holds them.
    third = dict.fromkeys(grid.layers, (5, 6, 7))
    again = placed(grid, [NodeRoom(100 * MB)] * 3, (), True, [whole, {}, third])
    assert expected_experts(again, 2) == pytest.approx(1.0)
    assert all(set(again.held(2, layer)) >= {5, 6} for layer in grid.layers)


def test_a_slow_node_is_not_sent_everything() -> None:
    grid = ExpertGrid((0, 1, 2), 16, 4, MB)
    found = placed(grid, [NodeRoom(100 * MB), NodeRoom(100 * MB), NodeRoom(100 * MB, 30.0)])
    assert found.count_of(2) <= 0.1 * grid.slabs


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_totals_are_dealt_evenly(totals: list[int], layers: int) -> None:
    rows = dealt(totals, layers)
    assert [sum(row[rank] for row in rows) for rank in range(len(totals))] == totals
    for rank in range(len(totals)):
        assert max(row[rank] for row in rows) - min(row[rank] for row in rows) <= 1
    if sum(totals) % layers == 0:
        assert len({sum(row) for row in rows}) == 1


def test_nonsense_is_refused() -> None:
    grid = ExpertGrid((0,), 4, 2, MB)
    with pytest.raises(ValueError, match="at least one node"):
        place(grid, [])
    with pytest.raises(ValueError, match="seconds per expert"):
        place(grid, [NodeRoom(9 * MB, 0.0)])
    with pytest.raises(ValueError, match="1 layers of 4 experts"):
        place(grid, [NodeRoom(9 * MB)], [[1, 2]])


# --- with what is there already -------------------------------------------------------------------------------------


@st.composite
def holdings(draw: st.DrawFn) -> tuple[ExpertGrid, list[NodeRoom], list[dict[int, list[int]]]]:
    """The first rank has everything on its disk, as a head with the whole model; or it has a part, too."""
    layers, experts, ranks = draw(st.sampled_from([(1, 4, 2), (2, 3, 2), (2, 3, 3), (1, 5, 3)]))
    grid = ExpertGrid(tuple(range(layers)), experts, 2, MB)
    some = st.lists(st.sampled_from(range(experts)), unique=True)
    has = [{layer: draw(some) for layer in grid.layers} for _ in range(ranks)]
    if draw(st.booleans()):
        has[0] = {layer: list(range(experts)) for layer in grid.layers}
    seconds = st.sampled_from([1.0, 2.0, 3.5])
    return grid, [NodeRoom(draw(st.integers(0, grid.slabs)) * MB, draw(seconds)) for _ in range(ranks)], has


@given(holdings(), st.booleans())
@example(
    problem=(
        ExpertGrid((0,), 5, 2, MB),
        [NodeRoom(3 * MB, 1.0), NodeRoom(2 * MB, 3.5), NodeRoom(MB, 1.0)],
        [{0: [0, 1, 2, 3, 4]}, {0: [1, 2, 3, 4]}, {0: [0]}],
    ),
    overlap=False,
)
@settings(max_examples=examples(60), deadline=None)
def test_what_is_there_is_enough_exactly_if_some_choice_of_owners_fits(
    problem: tuple[ExpertGrid, list[NodeRoom], list[dict[int, list[int]]]], overlap: bool
) -> None:
    """Against every choice of one owner per expert, as far as memory allows it."""
    grid, rooms, has = problem
    slots = [room.expert_bytes // MB for room in rooms]
    places = [(layer, expert) for layer in grid.layers for expert in range(grid.experts)]

    def seconds(owners: Sequence[int]) -> float:
        loads: dict[tuple[int, int], float] = {}
        for (layer, _), rank in zip(places, owners, strict=True):
            loads[layer, rank] = loads.get((layer, rank), 0.0) + rooms[rank].seconds
        return sum(max(load for (at, _), load in loads.items() if at == layer) for layer in grid.layers)

    able = [[rank for rank, each in enumerate(has) if expert in each[layer]] for layer, expert in places]
    every = [
        owners
        for owners in itertools.product(*able)
        if all(owners.count(rank) <= slot for rank, slot in enumerate(slots))
    ]
    found = place_held(grid, rooms, has, overlap)
    assert (found is not None) == bool(every)
    if found is None:
        return
    check_valid(grid, rooms, found)
    for row, layer in zip(found.holders, grid.layers, strict=True):
        for expert, ranks in enumerate(row):
            assert all(expert in has[rank][layer] for rank in ranks)
    if overlap:
        return
    best = min(map(seconds, every))
    assert seconds([ranks[0] for row in found.holders for ranks in row]) <= 1.5 * best


def test_a_large_model_is_placed_where_it_is() -> None:
    """Two of three machines are left; the head has the whole model on its disk and memory for two thirds of it."""
    grid = ExpertGrid(tuple(range(48)), 128, 8, MB)
    kept = {layer: list(range(80)) for layer in grid.layers}
    whole = {layer: list(range(128)) for layer in grid.layers}
    found = place_held(grid, [NodeRoom(grid.slabs * 2 // 3 * MB), NodeRoom(grid.slabs * MB)], [whole, kept])
    assert found is not None
    for row in found.holders:
        assert all(0 in ranks for ranks in row[80:])
        assert 48 <= sum(1 in ranks for ranks in row) <= 80
    assert place_held(grid, [NodeRoom(40 * 48 * MB), NodeRoom(grid.slabs * MB)], [whole, kept]) is None
