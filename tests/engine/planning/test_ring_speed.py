"""The ring's predicted times, by hand and against the closed formula."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.cluster_model import DBRX, ClusterHardware, cluster_bound
from engine.planning.calibration import Calibration, Curve, ExpertShape
from engine.planning.cluster_load import expected_experts
from engine.planning.memory import ModelSizes
from engine.planning.placement import ExpertGrid, Placement
from engine.planning.placement_planner import NodeRoom, place
from engine.planning.prediction import Shares, cpu_speed
from engine.planning.ring_speed import (
    Mode,
    NodeCosts,
    PassTime,
    RingSetting,
    StepTerms,
    WireSpeed,
    alone_time,
    costs_of,
    measured_costs,
    pass_time,
    relative_error,
    rows_time,
    sharing_s,
    step_time,
)
from engine.planning.routing_load import Assigner, LoadingRule, LoadingRules

MODEL = ModelSizes(
    layers=6,
    moe_layers=4,
    experts=8,
    experts_per_token=2,
    hidden=1024,
    trunk_bytes=600_000_000,
    expert_bytes=32 * 10_000_000,
    key_value_bytes_per_token=1000,
)
NODE = NodeCosts(
    expert=Curve((1, 100), (1e-3, 10e-3)),
    attention=Curve((1, 100), (2e-3, 20e-3)),
    outside=Curve((1, 100), (5e-3, 5e-3)),
)
WIRE = WireSpeed(latency_s=1e-4, bytes_per_s=1e9)


def apart(nodes: int) -> Placement:
    return Placement((1, 2, 3, 5), nodes, (tuple((expert % nodes,) for expert in range(8)),) * 4)


def test_two_equal_nodes_by_hand() -> None:
    """Both experts of a token are on one node with chance 3/7."""
    found = step_time(MODEL, apart(2), [NODE, NODE], WIRE, RingSetting())
    assert found.moe_s == pytest.approx(4 * (1 + 3 / 7) * 1e-3)
    assert found.exchange_s == pytest.approx(4 * 1e-4)
    assert found.other_s == pytest.approx(4 * 2e-3 + 5e-3)
    assert found.tokens_per_s == pytest.approx(1 / found.seconds)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("used", [(), (5.0, 1.0, 1.0, 2.0, 0.0, 3.0, 1.0, 1.0)])
def test_a_step_of_one_row_is_drawn_as_it_is_computed(nodes: int, used: tuple[float, ...]) -> None:
    popularity = [used] * 4 if used else []
    drawn = rows_time(MODEL, apart(nodes), [NODE] * nodes, WIRE, RingSetting(), 1, popularity)
    computed = step_time(MODEL, apart(nodes), [NODE] * nodes, WIRE, RingSetting(), popularity)
    assert drawn.seconds == pytest.approx(computed.seconds, rel=0.02)
    assert drawn.moe_s == pytest.approx(computed.moe_s, rel=0.07)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_steps_of_several_rows_against_all_choices(rows: int, mode: Mode) -> None:
    """Every choice of every row, with an expert that takes twice as long for three tokens as for one."""
    model = replace(MODEL, experts=4, expert_bytes=16 * 10_000_000)
    placement = Placement((1, 2, 3, 5), 2, (((0,), (1,), (0,), (1,)),) * 4)
    node = replace(NODE, expert=Curve((1, 3), (1e-3, 2e-3)))
    slow = WireSpeed(latency_s=1e-4, bytes_per_s=1e8)
    setting = RingSetting(mode)
    choices = list(itertools.product(itertools.combinations(range(4), 2), repeat=rows))
    moe = exchange = 0.0
    for chosen in choices:
        counts = Counter(expert for row in chosen for expert in row)
        seconds = [sum(node.expert.at(n) for e, n in counts.items() if e % 2 == rank) for rank in (0, 1)]
        sent = [sum(n for e, n in counts.items() if e % 2 == rank) for rank in (0, 1)]
        moe += max(seconds) / len(choices)
        exchange += slow.seconds((max(sent) if mode == "exact" else rows) * 1024 * 4, 1) / len(choices)
    found = rows_time(model, placement, [node, node], slow, setting, rows)
    assert found.moe_s == pytest.approx(4 * moe, rel=0.03)
    assert found.exchange_s == pytest.approx(4 * exchange, rel=0.03)
    assert found.other_s == pytest.approx(4 * NODE.attention.at(rows) + NODE.outside.at(rows))
    assert found.tokens == rows


def test_several_rows_share_an_exchange_and_what_is_read() -> None:
    terms = StepTerms(MODEL, apart(2), (NODE, NODE), WIRE, RingSetting())
    seconds = [terms.rows_s(rows) for rows in (1, 2, 4, 8)]
    assert seconds == sorted(seconds)
    rates = [rows / each for rows, each in zip((1, 2, 4, 8), seconds, strict=True)]
    assert rates == sorted(rates) and rates[-1] > 2 * rates[0]
    assert terms.rows_s(8) == terms.rows_s(8), "always the same layers are drawn"


def test_terms_are_put_in_as_they_are_measured() -> None:
    """A ring of three, whose exchange is measured with all nodes, then the nodes on the machine they share."""
    terms = StepTerms(MODEL, apart(3), (NODE,) * 3, WireSpeed.of_link(1e-4, 1e9), RingSetting("fast"))
    assert terms.step() == step_time(MODEL, apart(3), [NODE] * 3, terms.wire, terms.setting)
    joined = terms.with_exchange(5e-4)
    assert joined.step().exchange_s == pytest.approx(4 * 5e-4)
    assert joined.step().moe_s == terms.step().moe_s
    assert terms.with_exchange(1e-6).step().exchange_s == pytest.approx(terms.step().exchange_s)
    one = replace(NODE, machine="this")
    roomy = replace(joined, setting=replace(joined.setting, at_once=3.0))
    assert roomy.with_nodes(one).step().seconds == pytest.approx(joined.step().seconds)
    crowded = joined.with_nodes(one).step()
    assert crowded.other_s == pytest.approx(3 * joined.step().other_s)
    assert crowded.moe_s == pytest.approx(4 * 2 * 1e-3)
    alone = StepTerms(MODEL, apart(1), (NODE,), WIRE, RingSetting())
    assert alone.with_exchange(1.0) is alone


def test_one_node_is_the_machine_alone() -> None:
    one = step_time(MODEL, apart(1), [NODE], WIRE, RingSetting())
    assert one == alone_time(MODEL, NODE)
    assert one.exchange_s == 0.0
    many = pass_time(MODEL, apart(1), [NODE], WIRE, RingSetting(), 64)
    assert many.seconds == pytest.approx(alone_time(MODEL, NODE, 64).seconds)


def test_the_papers_equation_is_the_case_of_equal_nodes() -> None:
    """With the paper's machines as costs, a step is table 6's time but for the bytes that a latency includes."""
    hardware = ClusterHardware()
    model = ModelSizes(40, 40, 16, 4, 6144, 7_000_000_000, int(16 * DBRX.expert_bytes), 0)
    node = costs_of(model, Curve((1,), (DBRX.expert_bytes / 40 / 800e9,)), 800e9)
    placement = place(ExpertGrid(tuple(range(40)), 16, 4, model.slab_bytes), [NodeRoom(8 * 40 * model.slab_bytes)] * 2)
    assert isinstance(placement, Placement)
    found = step_time(model, placement, [node, node], WireSpeed(1e-3, 1.25e9), RingSetting("fast", word_bytes=2))
    bound = cluster_bound(DBRX, hardware, expected_experts(placement, 4))
    assert found.seconds == pytest.approx(bound.time_s, rel=0.03)
    assert found.exchange_s == pytest.approx(0.040, rel=0.01)


DBRX_SIZES = ModelSizes(40, 40, 16, 4, 6144, 0, int(16 * DBRX.expert_bytes), 0)
MAC = NodeCosts(
    expert=Curve((1,), (0.081 / 40 / 2.65,)), attention=Curve((1,), (0.042 / 40,)), outside=Curve((1,), (0.0,))
)
"""The paper's node by its own measurement on two nodes (table 4): 81 ms for 2.65 experts of 40 layers."""


@pytest.mark.parametrize(
    ("nodes", "moe", "exchange", "whole"),
    [(2, 0.081, 0.038, 0.166), (3, 0.068, 0.044, 0.153), (4, 0.054, 0.048, 0.144)],
)
def test_table_4_from_the_measured_terms_of_two_nodes(nodes: int, moe: float, exchange: float, whole: float) -> None:
    """One expert's time and one exchange of two nodes give the rest of the table, each expert held once."""
    placement = place(ExpertGrid(tuple(range(40)), 16, 4, 1), [NodeRoom(640)] * nodes, overlap=False)
    assert isinstance(placement, Placement)
    wire = WireSpeed.of_link(0.038 / 40, 1.25e9)
    found = step_time(DBRX_SIZES, placement, [MAC] * nodes, wire, RingSetting("fast", "router-aided", word_bytes=2))
    assert found.moe_s == pytest.approx(moe, rel=0.12)
    assert found.exchange_s == pytest.approx(exchange, rel=0.05)
    assert found.seconds == pytest.approx(whole, rel=0.08)


def test_table_3s_busy_full_loading() -> None:
    """P-L_B runs all eight experts of each node: 240 ms, by the time that one takes in P-L_R-D."""
    placement = place(ExpertGrid(tuple(range(40)), 16, 4, 1), [NodeRoom(320)] * 2)
    assert isinstance(placement, Placement)
    wire = WireSpeed.of_link(0.168 / 80, 1.25e9)
    setting = RingSetting("central", "busy-full", word_bytes=2)
    found = step_time(DBRX_SIZES, placement, [MAC] * 2, wire, setting)
    assert found.moe_s == pytest.approx(0.240, rel=0.03)
    assert found.exchange_s == pytest.approx(0.168, rel=0.2)  # what goes beyond 12 KiB comes on top


@pytest.mark.parametrize("rule", ["selected", "router-aided", "busy-full"])
@pytest.mark.parametrize("copies", [1.0, 1.5])
def test_equal_to_tokens_played_through(rule: LoadingRule, copies: float) -> None:
    """Tokens are drawn, owners and further experts found as nodes do it, and each layer timed."""
    grid = ExpertGrid((0,), 12, 3, 1)
    speeds = (1e-3, 1e-3, 2e-3)
    nodes = [
        NodeCosts(expert=Curve((1,), (speed,)), attention=Curve((1,), (attention,)), outside=Curve((1,), (0.0,)))
        for speed, attention in zip(speeds, (1e-3, 2e-3, 1e-3), strict=True)
    ]
    placement = place(grid, [NodeRoom(int(4 * copies), speed) for speed in speeds])
    assert isinstance(placement, Placement)
    model = ModelSizes(1, 1, 12, 3, 64, 0, 12, 0)
    random = Random(7)
    assigner = Assigner(placement, speeds)
    rules = [LoadingRules(placement, rank, rule, speeds) for rank in range(3)]
    total, rounds = 0.0, 4000
    for _ in range(rounds):
        chosen = sorted(random.sample(range(12), 3))
        owners = assigner.owners(0, chosen, [1] * 3)
        ends = []
        for rank, node in enumerate(nodes):
            run = owners.count(rank) + len(rules[rank].extra(0, chosen, owners))
            ends.append(node.attention.at(1) + run * node.expert.at(1))
        total += max(ends) + 1e-4
    found = step_time(model, placement, nodes, WireSpeed(1e-4, 1e12), RingSetting(loading=rule))
    assert found.seconds == pytest.approx(total / rounds, rel=0.02)


def test_a_step_measured_on_one_node_predicts_itself() -> None:
    alone = PassTime(0.02, 0.0, 0.012)
    costs = measured_costs(MODEL, alone, fence_s=5e-5)
    assert alone_time(MODEL, costs) == alone
    assert step_time(MODEL, apart(2), [costs] * 2, WIRE, RingSetting()).exchange_s == pytest.approx(4 * 1.5e-4)
    with pytest.raises(ValueError, match="has none to be measured"):
        measured_costs(replace(MODEL, experts=0), alone)


def test_alone_is_what_one_machine_is_told_without_a_ring() -> None:
    expert = Curve((1, 512), (1e-3, 50e-3))
    shape = ExpertShape(1024, 1, "BF16", 10_000_000)
    calibration = Calibration(version=1, machine="here", shape=shape, cpu=expert, memory_read=10e9)
    told = cpu_speed(MODEL, calibration, Shares.even(8), 1e-5)
    costs = costs_of(MODEL, expert, 10e9, 1e-5)
    assert alone_time(MODEL, costs).seconds == pytest.approx(told.step_s)
    assert alone_time(MODEL, costs, 512).seconds == pytest.approx(told.prefill_s)


def test_unlike_nodes_wait_for_the_slower_one_of_each_layer() -> None:
    slow = replace(NODE, expert=Curve((1, 100), (4e-3, 40e-3)), attention=Curve((1, 100), (3e-3, 30e-3)))
    found = step_time(MODEL, apart(2), [NODE, slow], WIRE, RingSetting())
    # Both on the fast node 3/14: max(2+2, 3+0) ms; one each 8/14: max(2+1, 3+4); both on the slow one 3/14: 3+8.
    layer = 3 / 14 * 4e-3 + 8 / 14 * 7e-3 + 3 / 14 * 11e-3
    assert found.moe_s + found.other_s == pytest.approx(4 * layer + 5e-3)


def test_loading_rules() -> None:
    selected, aided, full = (
        step_time(MODEL, apart(2), [NODE, NODE], WIRE, RingSetting(loading=rule))
        for rule in ("selected", "router-aided", "busy-full")
    )
    assert aided.seconds == pytest.approx(selected.seconds)  # what the others run besides is done by then
    assert full.moe_s == pytest.approx(4 * 4 * 1e-3)  # four of the layer's eight experts each
    one_machine = [replace(NODE, machine="here"), replace(NODE, machine="here")]
    selected, aided = (
        step_time(MODEL, apart(2), one_machine, WIRE, RingSetting(loading=rule))
        for rule in ("selected", "router-aided")
    )
    assert aided.moe_s == pytest.approx(4 * 2 * (1 + 3 / 7) * 1e-3)  # here it costs
    assert selected.moe_s == pytest.approx(4 * 2 * 1e-3)


def test_processes_of_one_machine_share_it() -> None:
    here = [replace(NODE, machine="here")] * 2
    found = step_time(MODEL, apart(2), here, WIRE, RingSetting())
    assert found.other_s == pytest.approx(2 * (4 * 2e-3 + 5e-3))
    assert found.moe_s == pytest.approx(4 * 2 * 1e-3)
    both_at_once = step_time(MODEL, apart(2), here, WIRE, RingSetting(at_once=2.0))
    assert both_at_once.seconds == pytest.approx(step_time(MODEL, apart(2), [NODE] * 2, WIRE, RingSetting()).seconds)


def by_events(work: list[float], at_once: float) -> float:
    """The same, from one end of somebody's work to the next."""
    left, now = sorted(work), 0.0
    while left:
        speed = min(len(left), at_once) / len(left)
        step = left[0] / speed
        now += step
        left = [each - step * speed for each in left[1:]]
    return now


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 10.0), max_size=6), st.floats(1.0, 6.0))
def test_processes_share_what_their_machine_does_at_once(work: list[float], at_once: float) -> None:
    found = sharing_s(work, at_once)
    assert found == pytest.approx(by_events(work, at_once), abs=1e-9)
    assert found >= max([*work, sum(work) / at_once]) - 1e-9
    assert found <= sum(work) + 1e-9


def test_unequal_work_is_shared_only_while_both_are_busy() -> None:
    """Of two that do 1.6 times one's work: both for a second's work, at 0.8 of their speed; then one alone."""
    assert sharing_s([1.0, 3.0], 1.6) == pytest.approx(1.0 / 0.8 + 2.0)
    assert sharing_s([2.0, 2.0], 1.6) == pytest.approx(4.0 / 1.6)
    assert sharing_s([], 1.6) == 0.0


@pytest.mark.parametrize("mode", ["exact", "fast", "central"])
def test_what_was_rehearsed_counts_for_a_step_and_not_for_a_prompt(mode: Mode) -> None:
    node = replace(NODE, fence_s=1e-3, central_s=2e-3)
    terms = StepTerms(MODEL, apart(2), (node,) * 2, WIRE, RingSetting(mode))
    joined = terms.with_exchange(5e-4, 7e-4)
    assert joined.step().exchange_s == pytest.approx(4 * 7e-4)
    assert (joined.step().moe_s, joined.step().other_s) == (terms.step().moe_s, terms.step().other_s)
    prompt = pass_time(MODEL, apart(2), joined.nodes, joined.wire, joined.setting, 64)
    added_up = terms.with_exchange(5e-4)
    assert prompt == pass_time(MODEL, apart(2), joined.nodes, added_up.wire, joined.setting, 64)


def test_shared_experts_hide_behind_the_wire() -> None:
    bare = step_time(MODEL, apart(2), [NODE] * 2, WIRE, RingSetting())
    short = replace(NODE, shared=Curve((1,), (0.5e-4,)))
    assert step_time(MODEL, apart(2), [short] * 2, WIRE, RingSetting()).seconds == pytest.approx(bare.seconds)
    long = replace(NODE, shared=Curve((1,), (3e-4,)))
    found = step_time(MODEL, apart(2), [long] * 2, WIRE, RingSetting())
    assert found.seconds == pytest.approx(bare.seconds + 4 * 2e-4)
    assert found.exchange_s == pytest.approx(bare.exchange_s)  # what the wire does not hide is no exchange
    assert found.other_s == pytest.approx(bare.other_s + 4 * 2e-4)
    assert found.moe_s == pytest.approx(bare.moe_s)
    alone = alone_time(MODEL, long)
    assert alone.seconds == pytest.approx(alone_time(MODEL, NODE).seconds + 4 * 3e-4)
    assert step_time(MODEL, apart(1), [long], WIRE, RingSetting()) == alone


def test_shared_experts_are_part_of_the_trunk_that_the_wire_can_hide() -> None:
    """Of 600 MB of trunk, 20 MB in each of the four MoE layers: 2 ms at 10 GB/s, of which the wire hides 0.1 ms."""
    expert = Curve((1, 512), (1e-3, 16e-3))
    model = replace(MODEL, shared_bytes=4 * 20_000_000)
    serial, costs = costs_of(MODEL, expert, 10e9), costs_of(model, expert, 10e9)
    assert costs.shared is not None and serial.shared is None
    assert costs.shared.at(1) == pytest.approx(2e-3)
    assert costs.attention.at(1) == pytest.approx((520e6 + 512 * 1000) / 10e9 / 6)
    assert costs.outside.at(1) == pytest.approx(2 * (520e6 + 512 * 1000) / 10e9 / 6)
    # 20 MB are two experts' operations: at 512 tokens 2 * 16 ms, more than the 2 ms of reading them.
    assert costs.shared.at(512) == pytest.approx(2 * 16e-3)
    assert alone_time(model, costs).seconds == pytest.approx(alone_time(MODEL, serial).seconds)
    before, now = (
        step_time(model, apart(2), [each] * 2, WireSpeed(1e-3, 1e9), RingSetting("fast")) for each in (serial, costs)
    )
    assert before.seconds - now.seconds == pytest.approx(4 * 1e-3)  # the wire's millisecond is the shared experts'
    dense = replace(model, moe_layers=0, experts=0, expert_bytes=0)
    assert costs_of(dense, expert, 10e9).shared is None


def test_central_mode_sends_twice_and_runs_the_heads_trunk_only() -> None:
    slow_trunk = replace(NODE, attention=Curve((1, 100), (1.0, 1.0)))
    found = step_time(MODEL, apart(2), [NODE, slow_trunk], WIRE, RingSetting("central"))
    decentralised = step_time(MODEL, apart(2), [NODE, NODE], WIRE, RingSetting())
    assert found.exchange_s == pytest.approx(2 * decentralised.exchange_s)
    asking = replace(NODE, fence_s=1.0, central_s=3e-4)
    again = step_time(MODEL, apart(2), [NODE, asking], WIRE, RingSetting("central"))
    assert again.exchange_s == pytest.approx(found.exchange_s + 4 * 3e-4)
    assert found.moe_s == pytest.approx(decentralised.moe_s)
    assert found.other_s == pytest.approx(4 * 2e-3 + 5e-3)


def test_a_prompt_in_exact_mode_sends_every_route_and_in_fast_mode_sums() -> None:
    exact, fast = (
        pass_time(MODEL, apart(2), [NODE] * 2, WIRE, RingSetting(mode), 100)
        for mode in ("exact", "fast")  # type: ignore[arg-type]
    )
    assert exact.moe_s == fast.moe_s == pytest.approx(4 * 4 * NODE.expert.at(25))
    beyond = (100 * 1024 * 4 + 64 - 12288) / 1e9
    assert exact.exchange_s == fast.exchange_s == pytest.approx(4 * (1e-4 + beyond))  # two nodes, two routes: the same
    wider = replace(MODEL, experts_per_token=4)
    exact, fast = (
        pass_time(wider, apart(2), [NODE] * 2, WIRE, RingSetting(mode), 100)
        for mode in ("exact", "fast")  # type: ignore[arg-type]
    )
    assert exact.exchange_s == pytest.approx(4 * (1e-4 + (200 * 1024 * 4 + 64 - 12288) / 1e9))
    assert fast.exchange_s == pytest.approx(4 * (1e-4 + beyond))
    assert exact.tokens_per_s == pytest.approx(100 / exact.seconds)


def test_hot_experts_on_one_node_make_it_late() -> None:
    even = pass_time(MODEL, apart(2), [NODE] * 2, WIRE, RingSetting(), 100)
    hot = pass_time(MODEL, apart(2), [NODE] * 2, WIRE, RingSetting(), 100, [[40, 1] * 4] * 4)
    assert hot.moe_s > 1.5 * even.moe_s


def test_more_peers_take_longer() -> None:
    wire = WireSpeed(1e-4, 1e9, per_peer_s=2e-5)
    assert [wire.seconds(1000, peers) for peers in (0, 1, 2, 3)] == pytest.approx([0.0, 1e-4, 1.2e-4, 1.4e-4])
    assert wire.seconds(300_000, 3) == pytest.approx(1.4e-4 + (300_192 - 12288) / 1e9)


def test_costs_from_rates() -> None:
    costs = costs_of(MODEL, Curve((1, 64, 512), (1e-3, 2e-3, 16e-3)), 10e9, layer_overhead_s=1e-5)
    reading = (600e6 + 512 * 1000) / 10e9  # the trunk, and the keys and values of 512 tokens
    assert 6 * costs.attention.at(1) == pytest.approx(reading + 6e-5)
    assert costs.outside.at(1) == pytest.approx(2 / 6 * reading + 2e-5)
    # Many tokens: the operations of the trunk at the rate of 512 tokens' experts, 60 times an expert's.
    assert 6 * costs.attention.at(512) == pytest.approx(60 * 16e-3 + 6e-5)


def test_as_many_costs_as_nodes() -> None:
    with pytest.raises(ValueError, match="2 nodes needs as many costs, not 1"):
        step_time(MODEL, apart(2), [NODE], WIRE, RingSetting())


def test_compared_with_a_measurement() -> None:
    assert relative_error(PassTime(0.04, 0.01, 0.05), PassTime(0.05, 0.02, 0.05)) == pytest.approx(-1 / 6)
    with pytest.raises(ValueError, match="takes more than 0 s"):
        relative_error(PassTime(1, 1, 1), PassTime(0, 0, 0))
