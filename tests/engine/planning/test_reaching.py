"""The largest set of machines that all reach one another and hold the model, against all sets there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc.messages.ring import RingChoice
from engine.planning.memory import ModelSizes
from engine.planning.reaching import Pair, plan_reaching, reaching_sets, why_apart
from engine.planning.ring_nodes import NodeFacts
from engine.planning.ring_plan import RingDecision, plan_ring
from tests.support.random_examples import examples

GB = 1_000_000_000
SIZES = ModelSizes(
    layers=2,
    moe_layers=2,
    experts=12,
    experts_per_token=2,
    hidden=2048,
    trunk_bytes=GB,
    expert_bytes=24 * GB,
    key_value_bytes_per_token=98_304,
    name="small",
)
MODEL = SIZES
NAMES = "abcde"

pairs = st.sets(st.sampled_from([frozenset(pair) for pair in itertools.combinations(f"h{NAMES}", 2)]), max_size=9)
memories = st.lists(st.sampled_from([5, 8, 14, 30]), min_size=1, max_size=6)


def planning(memory: Sequence[float], **choice: object):  # type: ignore[no-untyped-def]
    """A plan of the head ``h`` and the others, who have so many GB, each with another speed."""
    nodes = {
        name: NodeFacts(
            node_id=name,
            name=name,
            memory_total=round(gb * GB),
            memory_free=round(gb * GB),
            kind="native",
            memory_read=(50 + 7 * at) * 1e9,
        )
        for at, (name, gb) in enumerate(zip(f"h{NAMES}", memory, strict=False))
    }
    chosen = RingChoice(even_if_slower=True, overlap=False, **choice)  # type: ignore[arg-type]

    def plan(others: Sequence[str]) -> RingDecision:
        return plan_ring(MODEL, [nodes["h"], *(nodes[one] for one in others)], {}, chosen)

    return list(nodes)[1:], plan


def reach(members: Sequence[str], broken: set[Pair]) -> bool:
    return not any(frozenset(pair) in broken for pair in itertools.combinations(members, 2))


@given(st.integers(0, 5), pairs)
@settings(max_examples=examples(30), deadline=None)
def test_all_maximal_sets_and_no_other(count: int, broken: set[Pair]) -> None:
    others = NAMES[:count]
    subsets = [set(each) for size in range(count + 1) for each in itertools.combinations(others, size)]
    fitting = [each for each in subsets if reach(sorted(each), broken)]
    maximal = {frozenset(each) for each in fitting if not any(each < other for other in fitting)}
    found = reaching_sets(others, broken)
    assert len(found) == len(maximal)
    assert {frozenset(each) for each in found} == maximal
    assert [len(each) for each in found] == sorted(map(len, found), reverse=True)


@pytest.mark.soak
@pytest.mark.slow
@given(memories, pairs)
@settings(max_examples=examples(8))
def test_no_larger_set_holds_the_model_and_none_of_its_size_is_faster(memory: list[int], broken: set[Pair]) -> None:
    others, plan = planning(memory)
    found = plan_reaching("h", others, broken, plan)
    assert found.decision.kind == "refused" or reach(found.decision.ranks, broken)
    holding: dict[tuple[str, ...], RingDecision] = {}
    for size in range(len(others) + 1):
        for each in itertools.combinations(others, size):
            if reach(("h", *each), broken) and (decision := plan(each)).kind != "refused":
                holding[each] = decision
    if not holding:
        assert found.decision.kind == "refused"
        return
    assert found.decision.kind != "refused"
    most = max(len(each.ranks) for each in holding.values())
    assert len(found.decision.ranks) == most
    if found.others in holding and found.decision.kind == "ring":
        same = [each for others, each in holding.items() if len(others) == len(found.others) and each.kind == "ring"]
        assert found.decision.step is not None
        assert found.decision.step.seconds <= min(each.step.seconds for each in same if each.step is not None)


def test_central_mode_needs_all_links_too() -> None:
    others, plan = planning([30, 30, 30], mode="central")
    assert plan_reaching("h", others, {frozenset("ab")}, plan).others in (("a",), ("b",))
    found = plan_reaching("h", others, {frozenset("ha"), frozenset("ab")}, plan)
    assert found.others == ("b",)


def test_the_smaller_set_that_holds_the_model_is_taken() -> None:
    # Without d three machines reach each other, who lack the memory; d alone with the head has it.
    others, plan = planning([6, 6, 6, 6, 40])
    broken = {frozenset((one, "d")) for one in "abc"}
    assert plan_reaching("h", others, broken, plan).others == ("d",)
    assert why_apart("a", ("h", "d"), dict.fromkeys(broken, "timed out")) == {"d": "timed out"}


def test_as_many_machines_as_there_may_be() -> None:
    """Each of 63 is without its neighbour: not every set is looked at, and what is found is one in which all reach."""
    others = [f"n{number:02}" for number in range(63)]
    broken = {frozenset(pair) for pair in itertools.pairwise(others)}
    found = reaching_sets(others, broken)
    assert found and all(reach(each, broken) for each in found)
    assert len(found[0]) >= 28
