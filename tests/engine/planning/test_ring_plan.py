"""Which ring is formed, which is not, and what the person is told."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.ipc.messages.ring import LinkFacts, RingChoice, RingFacts
from engine.planning.calibration import Curve
from engine.planning.memory import ModelSizes
from engine.planning.ring_nodes import (
    GIB,
    MAPPED_RESERVE,
    UNIFIED_RESERVE,
    NodeFacts,
    expert_room,
)
from engine.planning.ring_plan import RingDecision, bytes_sent, decided_again, plan_ring
from tests.support.random_examples import examples

changed = msgspec.structs.replace

GB = 1_000_000_000
SIZES = ModelSizes(
    layers=48,
    moe_layers=48,
    experts=128,
    experts_per_token=8,
    hidden=2048,
    trunk_bytes=3 * GB,
    expert_bytes=58 * GB,
    key_value_bytes_per_token=98_304,
    name="qwen3-30b-a3b",
)
MODEL = SIZES
SMALLER = replace(SIZES, layers=6, moe_layers=6, experts=16, experts_per_token=2)
"""As many bytes in fewer experts, for what is planned many times."""
ETHERNET = (3e-4, 1.1e9)
RDMA = (1e-5, 5e9)


def node(name: str, memory_gb: float = 64, read: float | None = 100e9, **more: object) -> NodeFacts:
    memory = round(memory_gb * GB)
    values: dict[str, object] = {"kind": "native avx512_bf16", "layer_overhead_s": {"native": 2e-5}, **more}
    about: dict[str, object] = {"node_id": f"{name}-id", "name": name, "memory_read": read or 0.0}
    return NodeFacts(memory_total=memory, memory_free=memory - GB, **about, **values)  # type: ignore[arg-type]


def link(latency_s: float, bytes_per_s: float) -> LinkFacts:
    return LinkFacts(interface="", address="", latency_s=latency_s, bytes_per_s=bytes_per_s)


def links(nodes: list[NodeFacts], kind: tuple[float, float] = ETHERNET) -> dict[tuple[str, str], LinkFacts]:
    return {(a.node_id, b.node_id): link(*kind) for i, a in enumerate(nodes) for b in nodes[i + 1 :]}


def decide(
    machines: list[NodeFacts],
    kind: tuple[float, float] = ETHERNET,
    model: ModelSizes = MODEL,
    **choice: object,
) -> RingDecision:
    return plan_ring(model, machines, links(machines, kind), RingChoice(**choice))  # type: ignore[arg-type]


def facts(decision: RingDecision) -> RingFacts:
    assert decision.facts is not None
    return decision.facts


def test_a_model_that_no_machine_holds_alone() -> None:
    found = decide([node("head", 40), node("second", 40)], RDMA)
    assert found.kind == "ring"
    assert found.ranks == ("head-id", "second-id")
    assert found.placement is not None
    assert found.mode == "exact"
    assert found.loading == "selected"
    assert found.weights == (1.0, 1.0)
    assert found.alone_step is None
    assert facts(found).alone_tokens_per_s is None
    assert found.step is not None
    assert facts(found).tokens_per_s == pytest.approx(found.step.tokens_per_s)
    shares = facts(found).nodes
    assert [share.rank for share in shares] == [0, 1]
    assert [share.experts for share in shares] == [found.placement.count_of(rank) for rank in range(2)]
    assert sum(share.expected_experts for share in shares) == pytest.approx(8)
    assert all(share.trunk_bytes == SIZES.trunk_bytes and share.has_bytes == 0 for share in shares)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found.facts), type=RingFacts) == found.facts


def test_no_share_is_larger_than_its_room() -> None:
    nodes = [node("head", 40), node("second", 32), node("third", 16)]
    for share, each in zip(facts(decide(nodes, nodes=[each.node_id for each in nodes])).nodes, nodes, strict=True):
        assert share.expert_bytes <= expert_room(MODEL, each)


def test_one_machine_that_is_faster_is_used_alone() -> None:
    nodes = [node("head", 96), node("second", 96)]
    found = decide(nodes, (5e-3, 1e8))
    assert found.kind == "alone"
    assert found.alone_step is not None
    assert found.step is not None
    assert found.alone_step.seconds < found.step.seconds
    assert found.reason == (
        f"head alone is predicted to be faster: {found.alone_step.tokens_per_s:.1f} tokens/s, "
        f"2 machines together {found.step.tokens_per_s:.1f} tokens/s."
    )
    assert facts(found).reason == found.reason
    assert facts(found).alone_tokens_per_s == pytest.approx(found.alone_step.tokens_per_s)
    told = decide(nodes, (5e-3, 1e8), even_if_slower=True)
    assert told.kind == "ring"
    assert facts(told).alone_tokens_per_s is not None


def test_a_ring_that_is_faster_is_formed() -> None:
    found = decide([node("head", 96), node("second", 96)], RDMA)
    assert found.kind == "ring"
    assert found.step is not None
    assert found.alone_step is not None
    assert found.step.seconds < found.alone_step.seconds


def test_another_machine_alone_is_faster_and_computes() -> None:
    nodes = [node("laptop", 24, 50e9), node("studio", 192, 800e9)]
    found = decide(nodes)
    assert found.kind == "elsewhere"
    assert found.ranks == ("laptop-id", "studio-id")
    assert found.step is not None
    assert found.reason.startswith("studio computes alone, which is predicted to be faster")
    assert found.placement is not None
    assert (found.placement.count_of(0), found.placement.count_of(1)) == (0, SIZES.slabs)
    here, there = facts(found).nodes
    assert facts(found).elsewhere
    assert (here.experts, here.trunk_bytes, there.experts) == (0, 0, SIZES.slabs)
    assert facts(found).tokens_per_s == pytest.approx(found.step.tokens_per_s)
    told = decide(nodes, even_if_slower=True)
    assert told.kind == "ring"
    assert any(line.startswith("studio alone would be faster") for line in told.notices)
    assert decide(nodes, nodes=["studio-id"]).kind == "elsewhere"


@pytest.mark.parametrize(
    ("more", "choice"),
    [
        ({"kind": "torch avx512_bf16"}, {}),
        ({"disk_free": 40 * GB}, {}),
        ({"memory_gb": 50}, {}),
        ({}, {"shares": {"studio-id": 50 * GB}}),
    ],
    ids=["another runtime", "no disk", "no memory", "not so much by hand"],
)
def test_a_machine_that_may_not_hold_everything_does_not_compute_alone(
    more: dict[str, object], choice: dict[str, object]
) -> None:
    values: dict[str, object] = {"memory_gb": 192, "read": 800e9, **more}
    nodes = [node("laptop", 64, 50e9), node("studio", **values)]  # type: ignore[arg-type]
    assert decide(nodes, **choice).kind != "elsewhere"


def test_the_way_to_a_faster_machine_counts() -> None:
    nodes = [node("head", 96, 100e9), node("studio", 96, 130e9)]
    assert decide(nodes, (1e-3, 1e9)).kind == "elsewhere"
    assert decide(nodes, (20e-3, 1e9)).kind == "alone"
    large = replace(MODEL, vocabulary=150_000)
    slow = links(nodes, (1e-3, 2e7))
    assert plan_ring(large, nodes, slow, RingChoice()).kind == "alone"


def test_a_machine_that_is_hardly_faster_is_not_worth_moving_to() -> None:
    # The head alone is as fast as the other one: there is nothing to be gained there, however slow the ring is.
    nodes = [node("head", 96, 60e9), node("attic", 96, 63e9)]
    assert decide(nodes, (5e-3, 1e8)).kind == "alone"
    found = decide(nodes, (5e-3, 1e8), even_if_slower=True)
    assert found.kind == "ring"
    assert not [line for line in found.notices if "alone would be faster" in line]
    much = decide([node("head", 96, 60e9), node("attic", 96, 80e9)], (5e-3, 1e8), even_if_slower=True)
    assert any(line.startswith("attic alone would be faster") for line in much.notices)


@pytest.mark.soak
@pytest.mark.slow
@given(
    machines=st.lists(
        st.tuples(st.sampled_from([30, 64, 96, 192]), st.sampled_from([50e9, 60e9, 100e9, 400e9])),
        min_size=2,
        max_size=4,
    ),
    wire=st.sampled_from([RDMA, ETHERNET, (5e-3, 1e8)]),
)
@settings(max_examples=examples(10), deadline=None)
def test_where_it_is_computed_is_the_best_of_all_that_can_be(
    machines: list[tuple[float, float]], wire: tuple[float, float]
) -> None:
    """Against each machine by itself, planned as the head of its own, and against the ring that was asked for."""
    nodes = [node(f"n{i}", memory, read) for i, (memory, read) in enumerate(machines)]

    def plan(these: list[NodeFacts], **choice: bool) -> RingDecision:
        return plan_ring(SMALLER, these, links(these, wire), RingChoice(**choice))

    found = plan(nodes)
    alone = {each.node_id: plan([each]).alone_step for each in nodes}
    there = [step.seconds + 2 * wire[0] for each in nodes[1:] if (step := alone[each.node_id]) is not None]
    head, ring = alone["n0-id"], plan(nodes, even_if_slower=True)
    if ring.kind == "refused":
        assert found.kind == "refused"
        return
    assert ring.step is not None
    if found.kind == "elsewhere":
        assert found.step is not None
        assert found.step.seconds == pytest.approx(min(there))
        assert head is None or found.step.seconds < head.seconds
        assert found.step.seconds < ring.step.seconds
    else:
        reached = found.alone_step if found.kind == "alone" else found.step
        assert reached is not None
        assert all(reached.seconds < 1.1 * each * (1 + 1e-9) for each in there)


def test_noise_between_equal_machines_idles_none_of_them() -> None:
    fast, slow = Curve((1, 512), (1e-4, 2e-3)), Curve((1, 512), (1.2e-4, 2.4e-3))
    nodes = [node("head", 60, expert=slow, processor="x, 2"), node("second", 60, expert=fast, processor="x, 2")]
    found = decide(nodes, RDMA, even_if_slower=True)
    assert found.weights == (1.0, 1.0)
    assert [share.expected_experts for share in facts(found).nodes] == pytest.approx([4, 4], rel=0.1)
    other = [nodes[0], changed(nodes[1], processor="y, 2")]
    assert decide(other, RDMA, even_if_slower=True).weights == pytest.approx((1.2, 1.0))
    slower = changed(nodes[0], expert=Curve((1, 512), (2e-4, 4e-3)))
    assert decide([slower, nodes[1]], RDMA, even_if_slower=True).weights == pytest.approx((2.0, 1.0))


def test_a_model_that_does_not_fit_is_refused_with_what_is_missing() -> None:
    nodes = [node("head", 24), node("second", 24)]
    found = decide(nodes)
    assert found.kind == "refused"
    assert found.placement is None
    slots = sum(expert_room(MODEL, each) // SIZES.slab_bytes for each in nodes)
    assert found.shortfall == (SIZES.slabs - slots) * SIZES.slab_bytes
    assert found.reason.startswith(f"{found.shortfall / 1e9:.1f} GB are missing: the experts take 58.0 GB")
    assert "add a machine" in found.reason
    # With exactly that much more it fits.
    more = [changed(nodes[0], memory_total=2 * 24 * GB, memory_free=nodes[0].memory_free + found.shortfall), nodes[1]]
    assert decide(more).kind == "ring"


def test_alone_and_too_small() -> None:
    found = decide([node("head", 24)])
    assert found.kind == "refused"
    assert "this machine has room for" in found.reason
    enough = decide([node("head", 96)])
    assert enough.kind == "alone"
    assert enough.reason == "There is no other machine to share with."


def test_memory_by_hand() -> None:
    nodes = [node("head", 96), node("second", 96)]
    found = decide(nodes, RDMA, shares={"second-id": 5 * GB}, overlap=False, even_if_slower=True)
    assert facts(found).nodes[1].expert_bytes <= 5 * GB
    assert facts(found).nodes[0].expert_bytes >= 53 * GB
    nothing = decide(nodes, RDMA, shares={"second-id": 0}, even_if_slower=True)
    assert [share.experts for share in facts(nothing).nodes] == [SIZES.slabs]
    short = decide(nodes, RDMA, shares={"head-id": 20 * GB, "second-id": 20 * GB})
    assert short.kind == "refused"
    assert "allow more by hand" in short.reason
    much = decide([node("head", 48), node("second", 48)], RDMA, shares={"second-id": 500 * GB})
    assert any(line.startswith("second was to hold 500.0 GB of experts, but has memory for") for line in much.notices)


def test_nodes_by_hand() -> None:
    nodes = [node("head", 40), node("second", 40), node("third", 40)]
    assert decide(nodes, RDMA, nodes=["third-id"]).ranks == ("head-id", "third-id")


def test_copies_only_where_wanted() -> None:
    nodes = [node("head", 60), node("second", 60)]
    assert sum(share.experts for share in facts(decide(nodes, RDMA)).nodes) > SIZES.slabs
    assert sum(share.experts for share in facts(decide(nodes, RDMA, overlap=False)).nodes) == SIZES.slabs


def test_a_machine_without_room_for_the_trunk_is_left_out_unless_it_was_named() -> None:
    nodes = [node("head", 40), node("second", 40), node("phone", 4)]
    found = decide(nodes, RDMA)
    assert found.ranks == ("head-id", "second-id")
    assert any(line.startswith("phone is left out: it lacks") for line in found.notices)
    named = decide(nodes, RDMA, nodes=["second-id", "phone-id"])
    assert named.kind == "refused"
    assert named.reason.startswith("phone lacks ")
    assert named.shortfall > 0


@pytest.mark.soak
@pytest.mark.slow
def test_a_slow_machine_is_left_out_unless_it_was_named_or_is_needed() -> None:
    fast = [node("head", 40), node("second", 40)]
    slow = node("slow", 40, 10e9)
    found = decide([*fast, slow], RDMA, SMALLER)
    assert found.ranks == ("head-id", "second-id")
    assert any(line.startswith("slow is left out: ") for line in found.notices)
    for more in ({"nodes": ["second-id", "slow-id"]}, {"even_if_slower": True}):
        assert len(decide([*fast, slow], RDMA, SMALLER, **more).ranks) == 3
    needed = decide([node("head", 30), node("second", 30), node("slow", 30, 10e9)], RDMA, SMALLER)
    assert len(needed.ranks) == 3
    behind = [*fast, node("far", 40)]
    wires = links(fast, RDMA) | {(each.node_id, "far-id"): link(20e-3, 1e6) for each in fast}
    assert plan_ring(SMALLER, behind, wires, RingChoice()).ranks == ("head-id", "second-id")


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALLER, pytest.param(MODEL, marks=pytest.mark.soak)], ids=["smaller", "large"])
@pytest.mark.parametrize(
    "machines",
    [
        [(60, 100e9), (60, 100e9), (60, 20e9), (60, 90e9)],
        [(40, 100e9), (30, 25e9), (40, 50e9), (30, 100e9)],
        [(64, 50e9), (64, 400e9), (64, 400e9), (64, 50e9)],
        [(96, 20e9), (30, 10e9), (30, 10e9), (30, 80e9)],
    ],
)
def test_no_other_choice_of_machines_is_much_faster(machines: list[tuple[float, float]], model: ModelSizes) -> None:
    """Against all sets of machines that hold the model, the head in them."""
    nodes = [node(f"n{i}", memory, read) for i, (memory, read) in enumerate(machines)]
    found = decide(nodes, RDMA, model, mode="fast")
    assert found.step is not None
    reached = found.alone_step.seconds if found.kind == "alone" else found.step.seconds  # type: ignore[union-attr]
    best = reached
    for size in range(1, len(nodes)):
        for others in itertools.combinations(nodes[1:], size):
            ids = [each.node_id for each in others]
            ring = decide(nodes, RDMA, model, mode="fast", nodes=ids, even_if_slower=True)
            if ring.kind == "ring" and ring.step is not None:
                best = min(best, ring.step.seconds)
    assert reached <= 1.05 * best


def test_exact_sums_while_they_cost_little() -> None:
    nodes = [node("head", 40), node("second", 40)]
    assert decide(nodes, RDMA).mode == "exact"
    slow = decide(nodes, (2e-3, 1e7))
    assert slow.mode == "fast"
    assert slow.reason.startswith("Weighted sums are exchanged, as the wire is slow for more")
    assert decide(nodes, (2e-3, 1e7), mode="exact").mode == "exact"
    assert decide(nodes, RDMA, mode="fast").mode == "fast"
    assert decide(nodes, RDMA, mode="central").mode == "central"


def test_unlike_machines_are_routed_for_by_the_head() -> None:
    nodes = [node("head", 40), node("second", 40, kind="mlx metal")]
    found = decide(nodes)
    assert found.mode == "central"
    assert "head: native avx512_bf16, second: mlx metal" in found.reason
    assert [share.trunk_bytes for share in facts(found).nodes] == [SIZES.trunk_bytes, 0]
    for mode in ("exact", "fast"):
        refused = decide(nodes, mode=mode)
        assert refused.kind == "refused"
        assert "choose the mode auto or central" in refused.reason
        assert refused.shortfall == 0


def test_a_follower_of_central_mode_needs_no_room_for_the_trunk() -> None:
    second = node("second", 20)
    beside = expert_room(MODEL, second, central_follower=True) - expert_room(MODEL, second)
    assert beside == SIZES.trunk_bytes + MODEL.context_tokens * SIZES.key_value_bytes_per_token


def test_idle_experts_are_kept_in_use_where_memory_is_unwired() -> None:
    macs = [node("head", 64, kind="mlx", unified_memory=True), node("second", 64, kind="mlx", unified_memory=True)]
    found = decide(macs, RDMA, even_if_slower=True)
    assert found.loading == "router-aided"
    assert "Idle experts are kept in use" in found.reason
    assert decide(macs, RDMA, loading="selected").loading == "selected"
    assert decide([node("head", 40), node("second", 40)], RDMA).loading == "selected"


def test_the_reserve() -> None:
    assert UNIFIED_RESERVE.of(16 * GIB) == 8 * GIB
    assert UNIFIED_RESERVE.of(64 * GIB) == 16 * GIB
    assert MAPPED_RESERVE.of(2 * GIB) == GIB // 2
    mac = node("mac", 64, unified_memory=True)
    taken = expert_room(MODEL, changed(mac, memory_free=mac.memory_total))
    assert (
        expert_room(MODEL, changed(mac, memory_free=mac.memory_total - 10 * GB)) == taken
    )  # within the reserve anyway
    assert expert_room(MODEL, changed(mac, memory_free=mac.memory_total - 30 * GB)) == taken - 30 * GB + 16 * GB


def test_what_is_there_already_is_not_counted_as_sent() -> None:
    whole = {layer: tuple(range(128)) for layer in range(48)}
    found = decide([node("head", 40, has=whole, has_trunk=True), node("second", 40)], RDMA)
    first, second = facts(found).nodes
    assert first.has_bytes == SIZES.trunk_bytes + first.experts * SIZES.slab_bytes
    assert second.has_bytes == 0


def test_a_full_disk_limits_what_a_machine_can_hold() -> None:
    nodes = [node("head", 60), node("second", 60, disk_free=10 * GB)]
    found = decide(nodes, RDMA, even_if_slower=True)
    assert facts(found).nodes[1].expert_bytes <= 7 * GB
    assert any(
        line == "second has disk space for 7.0 GB of experts, less than it has memory for." for line in found.notices
    )
    too_little = decide([node("head", 40), nodes[1]], RDMA)
    assert too_little.kind == "refused"
    assert [line for line in too_little.notices if line.startswith("second has disk space for 7.0 GB")]
    there = {layer: tuple(range(64)) for layer in range(48)}
    kept = decide([nodes[0], changed(nodes[1], has=there, has_trunk=True)], RDMA, even_if_slower=True)
    assert facts(kept).nodes[1].expert_bytes > 29 * GB


def test_a_head_that_lacks_the_model_has_room_on_its_disk_for_what_it_holds() -> None:
    """The whole model is none of what it has, nor what it could copy."""
    nodes = [node("head", 60, disk_free=10 * GB), node("second", 60)]
    found = decide(nodes, RDMA, even_if_slower=True)
    assert facts(found).nodes[0].expert_bytes <= 7 * GB
    assert facts(found).nodes[0].has_bytes == 0
    # By itself it would be faster, but it has no room for all of it.
    roomy = [node("head", 100), node("second", 100)]
    slow = (5e-3, 1e8)
    assert decide(roomy, slow).kind == "alone"
    short = decide([changed(roomy[0], disk_free=40 * GB), roomy[1]], slow)
    assert short.kind in ("ring", "elsewhere") and short.alone_step is None
    assert decide([changed(roomy[0], disk_free=80 * GB), roomy[1]], slow).kind == "alone"
    # What it took for an earlier ring stays its own.
    layers = dict.fromkeys(range(48), (3, 77))
    kept = decide([changed(nodes[0], has=layers, has_trunk=True), nodes[1]], RDMA, even_if_slower=True)
    assert kept.placement is not None
    assert all({3, 77} <= set(kept.placement.held(0, layer)) for layer in range(48))
    full = decide([node("head", 60, disk_free=1 * GB), node("second", 60)], RDMA)
    assert full.kind == "refused" and full.shortfall == SIZES.trunk_bytes - GB
    missing = f"{full.shortfall / 1e9:.1f} GB"
    assert full.reason == f"head lacks {missing} of disk space for what every machine keeps of the model; make room."


def test_a_machine_whose_disk_does_not_even_take_the_trunk_is_left_out() -> None:
    nodes = [node("head", 60), node("second", 60), node("third", 60, disk_free=1 * GB)]
    found = decide(nodes, RDMA, even_if_slower=True)
    assert found.ranks == ("head-id", "second-id")
    missing = (SIZES.trunk_bytes + SIZES.slab_bytes - GB) / 1e9
    assert found.notices == (
        f"third is left out: it lacks {missing:.1f} GB of disk space for what every machine keeps and one expert.",
    )
    named = decide(nodes, RDMA, nodes=[each.node_id for each in nodes])
    assert named.kind == "refused"
    assert named.shortfall == SIZES.trunk_bytes - GB
    assert named.reason.startswith(f"third lacks {named.shortfall / 1e9:.1f} GB of disk space")
    central = decide(nodes, RDMA, mode="central", even_if_slower=True)
    assert len(central.ranks) == 3  # there a follower is sent no trunk


def test_without_measurements_a_ring_is_formed_without_a_prediction() -> None:
    found = decide([node("head", 40, None), node("second", 40, None)])
    assert found.kind == "ring"
    assert found.step is None
    assert facts(found).tokens_per_s is None


def test_a_measured_expert_counts_more_than_the_memorys_rate() -> None:
    fast = Curve((1, 16, 512), (1e-4, 2e-4, 2e-3))
    slow = Curve((1, 16, 512), (3e-4, 6e-4, 6e-3))
    found = decide([node("head", 60, expert=fast), node("second", 60, expert=slow)], RDMA)
    assert found.weights == pytest.approx((1.0, 3.0))
    first, second = facts(found).nodes
    assert first.expected_experts > 2 * second.expected_experts


def test_processes_of_one_machine_are_alike_whatever_they_measured() -> None:
    fast, slow = Curve((1, 512), (1e-4, 2e-3)), Curve((1, 512), (3e-4, 6e-3))
    nodes = [node("head", 60, expert=slow, machine="here"), node("second", 60, expert=fast, machine="here")]
    assert decide(nodes, RDMA, even_if_slower=True).weights == (1.0, 1.0)
    apart = [changed(each, machine="") for each in nodes]
    assert decide(apart, RDMA, even_if_slower=True).weights == pytest.approx((3.0, 1.0))


def test_popularity_spreads_the_hot_experts() -> None:
    nodes = [node("head", 40), node("second", 40)]
    use = [[1000 if expert in (0, 2, 4, 6) else 10 for expert in range(128)] for _ in range(48)]
    found = plan_ring(MODEL, nodes, links(nodes, RDMA), RingChoice(overlap=False), use)
    assert found.placement is not None
    for row in found.placement.holders:
        assert [row[expert][0] for expert in (0, 2, 4, 6)].count(0) == 2


def test_a_dense_model_has_nothing_to_share() -> None:
    dense = replace(SIZES, moe_layers=0, experts=0, experts_per_token=0, expert_bytes=0)
    found = plan_ring(dense, [node("head"), node("second")], {}, RingChoice())
    assert found.kind == "refused"
    assert "no experts" in found.reason
    with pytest.raises(ValueError, match="its head"):
        plan_ring(MODEL, [], {}, RingChoice())


def test_a_ring_that_turns_out_slower_than_one_machine_is_not_formed() -> None:
    """The links looked fast; what the nodes measured together says otherwise."""
    nodes = [node("head", 96), node("second", 96)]
    planned = decide(nodes, RDMA)
    assert planned.kind == "ring" and planned.terms is not None and planned.alone_step is not None
    fast, slow = planned.terms.with_exchange(RDMA[0]), planned.terms.with_exchange(5e-3)
    assert decided_again(planned, fast, RingChoice()) is planned
    found = decided_again(planned, slow, RingChoice())
    assert found.kind == "alone"
    assert found.reason == (
        f"This machine alone is predicted to be faster: {planned.alone_step.tokens_per_s:.1f} tokens/s, "
        f"2 machines together {slow.step().tokens_per_s:.1f} tokens/s."
    )
    assert decided_again(planned, slow, RingChoice(even_if_slower=True)) is planned
    too_large = decide([node("head", 40), node("second", 40)], RDMA)
    assert too_large.terms is not None
    assert decided_again(too_large, too_large.terms.with_exchange(1.0), RingChoice()) is too_large


def waiting(machines: list[NodeFacts], kind: tuple[float, float] = RDMA, **choice: object) -> RingDecision:
    return plan_ring(MODEL, machines, links(machines, kind), RingChoice(**choice), waiting=True)  # type: ignore[arg-type]


def holding(experts: range) -> dict[str, object]:
    return {"has": dict.fromkeys(range(48), tuple(experts)), "has_trunk": True}


def test_while_an_answer_waits_nothing_is_sent_that_need_not_be() -> None:
    nodes = [node("head", 96), node("second", 96)]
    planned = decide(nodes, RDMA)
    assert planned.kind == "ring" and bytes_sent(planned) > 0
    found = waiting(nodes)
    assert found.kind == "alone" and "would have to be sent first" in found.reason
    assert found.instead == planned
    assert waiting(nodes, even_if_slower=True) == decide(nodes, RDMA, even_if_slower=True)
    there = [nodes[0], node("second", 96, **holding(range(128)))]
    assert waiting(there) == decide(there, RDMA) and waiting(there).kind == "ring"
    # Nobody holds it alone, and together they do not have it.
    too_large = [node("head", 40), node("second", 40)]
    assert waiting(too_large) == decide(too_large, RDMA)


@pytest.mark.soak
def test_while_an_answer_waits_a_ring_of_what_the_machines_have_goes_on() -> None:
    """The third machine is gone. What it had is on the head's disk, and the head has memory for it."""
    nodes = [node("head", 50), node("second", 50, **holding(range(50, 128)))]
    planned, found = decide(nodes, RDMA), waiting(nodes)
    assert planned.kind == found.kind == "ring"
    assert bytes_sent(planned) == 0 or found.instead == planned
    assert bytes_sent(found) == 0
    crowded = [node("head", 64), node("second", 64, **holding(range(100, 128)))]
    planned, found = decide(crowded, RDMA), waiting(crowded)
    assert planned.kind == found.kind == "ring" and found.alone_step is None
    assert bytes_sent(planned) > 0 and found.instead == planned
    assert bytes_sent(found) == 0 and "go on with the experts that they have" in facts(found).reason
    assert found.placement is not None
    assert all(ranks == (0,) for row in found.placement.holders for ranks in row[:100])
    # A machine that lacks what every machine keeps is not in it.
    without = [*crowded, node("third", 64, has=dict.fromkeys(range(48), (1, 2)))]
    assert waiting(without).ranks == found.ranks
    # The faster of the two ways to go on, unless the ring was asked for.
    able = [node("head", 96, 400e9), node("second", 96, 50e9, **holding(range(100, 128)))]
    assert waiting(able, ETHERNET).kind == "alone"
    assert waiting(able, ETHERNET, even_if_slower=True).kind == "ring"
    assert bytes_sent(waiting(able, ETHERNET, even_if_slower=True)) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from([20, 36, 50, 96]), st.lists(st.integers(0, 15), unique=True), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([36, 50, 96]),
    st.booleans(),
)
@settings(max_examples=examples(10), deadline=None)
def test_nothing_is_sent_if_the_machines_can_go_on_with_what_they_have(
    others: list[tuple[int, list[int], bool]], head: int, even_if_slower: bool
) -> None:
    """The head has the whole model on its disk: what no other machine has must fit in its memory, and so must what the
    others' memory leaves over."""
    nodes = [node("head", head)]
    for i, (memory, has, trunk) in enumerate(others):
        nodes.append(node(f"n{i}", memory, has=dict.fromkeys(range(6), tuple(has)), has_trunk=trunk))
    choice = RingChoice(even_if_slower=even_if_slower)
    found = plan_ring(SMALLER, nodes, links(nodes, RDMA), choice, waiting=True)
    slab = SMALLER.slab_bytes
    slots = [max(0, expert_room(SMALLER, each)) // slab for each in nodes]
    held = [set(has) if trunk and slot else set() for (_, has, trunk), slot in zip(others, slots[1:], strict=True)]
    # By Hall's theorem: of every set of the other machines, what only these have beside the head.
    possible = all(
        sum(slots[1 + i] for i in each)
        + slots[0]
        + 6 * len(set().union(*(held[i] for i in range(len(held)) if i not in each)))
        >= 6 * 16
        for n in range(len(held) + 1)
        for each in itertools.combinations(range(len(held)), n)
    )
    if found.kind == "refused":
        return
    if even_if_slower:  # then the head alone is no ring
        possible = possible and any(held)
    if bytes_sent(found):
        assert not possible
    elif found.instead is not None:
        assert bytes_sent(found.instead) > 0
        assert possible


def test_a_machine_that_would_hold_nothing_is_left_out() -> None:
    small = replace(SIZES, layers=1, moe_layers=1, experts=2, experts_per_token=2, expert_bytes=GB)
    model = small
    nodes = [node("head", 40, 800e9), node("second", 40, 800e9), node("slow", 40, 4e9)]
    choice = RingChoice(even_if_slower=True, overlap=False)
    found = plan_ring(model, nodes, links(nodes, RDMA), choice)
    assert found.ranks == ("head-id", "second-id")
    assert [line for line in found.notices if line.startswith("slow is left out: the others hold all experts")]
    named = msgspec.structs.replace(choice, nodes=["second-id", "slow-id"])
    given_nothing = msgspec.structs.replace(choice, shares={"slow-id": 0})
    for asked in (named, given_nothing):
        assert plan_ring(model, nodes, links(nodes, RDMA), asked).ranks == ("head-id", "second-id")
    # Where there are enough, a slow one gets one: nobody is left out for being slow then.
    more = replace(small, experts=4)
    assert [share.experts for share in facts(plan_ring(more, nodes, links(nodes, RDMA), choice)).nodes] == [1, 2, 1]


@given(
    st.lists(st.tuples(st.integers(4, 60), st.sampled_from([None, 2e9, 20e9, 800e9])), min_size=1, max_size=5),
    st.integers(2, 6),
    st.sampled_from(["auto", "fast", "central"]),
    st.booleans(),
    st.booleans(),
)
@example([(15, None), (6, None)], 4, "auto", False, True)
@settings(max_examples=examples(8), deadline=None)
def test_every_machine_of_a_ring_holds_experts(
    machines: list[tuple[int, float | None]], experts: int, mode: str, overlap: bool, even_if_slower: bool
) -> None:
    sizes = replace(SIZES, layers=2, moe_layers=2, experts=experts, experts_per_token=2, expert_bytes=12 * GB)
    nodes = [node(f"n{i}", memory, read) for i, (memory, read) in enumerate(machines)]
    choice = RingChoice(mode=mode, overlap=overlap, even_if_slower=even_if_slower)  # type: ignore[arg-type]
    model = sizes
    found = plan_ring(model, nodes, links(nodes, RDMA), choice)
    if found.kind != "ring":
        return
    assert all(share.experts for share in facts(found).nodes[1:])
    if even_if_slower:
        central = found.mode == "central"
        room = [each.node_id for each in nodes[1:] if expert_room(model, each, central) >= sizes.slab_bytes]
        assert list(found.ranks[1:]) == room or len(nodes) > sizes.slabs


@given(
    st.lists(st.tuples(st.integers(1, 120), st.sampled_from([None, 20e9, 100e9, 800e9])), min_size=1, max_size=5),
    st.sampled_from(["auto", "exact", "fast", "central"]),
    st.booleans(),
)
@settings(max_examples=examples(8), deadline=None)
def test_every_decision_is_complete(machines: list[tuple[int, float | None]], mode: str, overlap: bool) -> None:
    nodes = [node(f"n{i}", memory, read) for i, (memory, read) in enumerate(machines)]
    found = decide(nodes, model=SMALLER, mode=mode, overlap=overlap)
    if found.kind == "refused":
        assert found.shortfall > 0
        assert "GB" in found.reason or "MB" in found.reason
        return
    assert found.placement is not None
    assert found.placement.nodes == len(found.ranks) == len(facts(found).nodes) == len(found.weights)
    assert found.ranks[0] == "n0-id"
    rooms = {
        each.node_id: expert_room(SMALLER, each, found.mode == "central" and i > 0) for i, each in enumerate(nodes)
    }
    for share in facts(found).nodes:
        assert share.expert_bytes <= max(0, rooms[share.node_id])
