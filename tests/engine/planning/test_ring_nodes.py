"""Rings whose nodes have GPUs: the room they give, what a layer takes with them, who holds what, and which runtime."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc.messages import ExpertPolicy
from engine.ipc.messages.ring import LinkFacts, RingChoice
from engine.planning.balancing import layer_sides
from engine.planning.calibration import Calibration, Curve, ExpertShape, guessed, with_trunk_on_host
from engine.planning.hybrid import Device, gpu_room, slabs_kept, workspace_bytes
from engine.planning.memory import ModelSizes
from engine.planning.placement import Placement
from engine.planning.policy import ActiveExpert, policy_named
from engine.planning.prediction import Shares, hybrid_speed
from engine.planning.ring_nodes import (
    GpuFacts,
    NodeFacts,
    alone_times,
    expert_room,
    gpu_slabs,
    memory_room,
    node_costs,
)
from engine.planning.ring_plan import RingDecision, plan_ring
from engine.planning.ring_speed import GpuCosts, NodeCosts, RingSetting, WireSpeed, expert_seconds, step_time
from engine.planning.routing_load import Assigner
from engine.planning.runtime_choice import RingForecast, RuntimeChoice, experts_runtime, ring_choice
from tests.support.random_examples import examples

changed = msgspec.structs.replace

SLAB = 10_000_000
SIZES = ModelSizes(
    layers=2,
    moe_layers=2,
    experts=4,
    experts_per_token=2,
    hidden=1024,
    trunk_bytes=20_000_000,
    expert_bytes=8 * SLAB,
    key_value_bytes_per_token=100,
)
MODEL = replace(SIZES, context_tokens=1000)
WORKSPACE = workspace_bytes(SIZES.experts_only(), gpu=True)
"""Bytes of a GPU that no expert gets."""
CPU = Curve((1, 512), (1e-3, 100e-3))
MEASURED = Calibration(
    version=1,
    machine="measured",
    shape=ExpertShape(1024, 0, "BF16", SLAB),
    cpu=CPU,
    memory_read=SLAB / 1e-3,
    gpu=Curve((1, 512), (1e-4, 2e-3)),
    weight_copy=3e-3,
    activation_copy=Curve((1, 512), (2e-5, 1e-3)),
    cpu_overlapped=1.2,
    copy_overlapped=1.1,
)


def gpu(slabs: int, **more: object) -> GpuFacts:
    """One with room for exactly ``slabs`` experts."""
    memory = WORKSPACE + slabs * SLAB
    values: dict[str, object] = {"calibration": MEASURED, **more}
    return GpuFacts(name="a GPU", memory_total=memory, memory_free=memory, **values)  # type: ignore[arg-type]


def node(name: str, experts: int = 8, on_gpu: int | None = None, **more: object) -> NodeFacts:
    """A node whose CPU's memory has room for ``experts`` experts."""
    taken = memory_room(MODEL, NodeFacts(memory_total=1 << 40, memory_free=1 << 40))
    free = (1 << 40) - taken + experts * SLAB
    reserve = round((1 << 40) * 0.05)
    values: dict[str, object] = {"node_id": name, "name": name, "kind": "torch", **more}
    values = {"expert": CPU, "memory_read": SLAB / 1e-3, **values}
    found = NodeFacts(memory_total=1 << 40, memory_free=free - reserve, **values)  # type: ignore[arg-type]
    found = changed(found, gpu=None if on_gpu is None else gpu(on_gpu))
    assert memory_room(MODEL, found) == experts * SLAB
    return found


def links(nodes: list[NodeFacts]) -> dict[tuple[str, str], LinkFacts]:
    link = LinkFacts(interface="", address="", latency_s=1e-5, bytes_per_s=5e9)
    return {(a.node_id, b.node_id): link for a, b in itertools.combinations(nodes, 2)}


def decide(nodes: list[NodeFacts], **choice: object) -> RingDecision:
    values: dict[str, object] = {"even_if_slower": True, **choice}
    return plan_ring(MODEL, nodes, links(nodes), RingChoice(**values))  # type: ignore[arg-type]


# --- room -----------------------------------------------------------------------------------------------------------


def test_a_gpu_adds_the_room_that_loading_finds_there() -> None:
    found = node("a", 2, on_gpu=3)
    assert found.gpu is not None
    assert gpu_slabs(MODEL, found) == 3
    assert expert_room(MODEL, found) == 5 * SLAB
    # Trunk, keys and values of a ring are on the CPU.
    device = Device("", found.gpu.memory_total, found.gpu.memory_free)
    assert gpu_room(MODEL.experts_only(), device) == 3 * SLAB
    assert gpu_room(MODEL, device) == 3 * SLAB - SIZES.trunk_bytes - 100_000
    assert expert_room(MODEL, changed(found, gpu=gpu(3, expert_bytes=SLAB))) == 3 * SLAB
    assert expert_room(MODEL, changed(found, gpu=gpu(3, policy="stream"))) == 2 * SLAB
    short = GpuFacts(name="a GPU", memory_total=WORKSPACE, memory_free=WORKSPACE // 2)
    assert expert_room(MODEL, changed(found, gpu=short)) == 2 * SLAB
    # A node without memory for what every node keeps is none, whatever its GPU has.
    assert expert_room(MODEL, changed(found, memory_free=0)) < 0


def test_experts_are_placed_up_to_the_memory_of_cpus_and_gpus() -> None:
    nodes = [node("a", 2, on_gpu=3), node("b", 3)]
    found = decide(nodes)
    assert found.kind == "ring" and found.placement is not None and found.facts is not None
    assert [found.placement.count_of(rank) for rank in range(2)] == [5, 3]
    first, second = found.facts.nodes
    assert (first.gpu, first.gpu_expert_bytes, first.expert_bytes) == ("a GPU", 3 * SLAB, 5 * SLAB)
    assert (second.gpu, second.gpu_expert_bytes) == ("", 0)
    short = decide([node("a", 2, on_gpu=2), node("b", 3)])
    assert (short.kind, short.shortfall) == ("refused", SLAB)
    assert decide([node("a", 2), node("b", 3)]).shortfall == 3 * SLAB


# --- one layer ------------------------------------------------------------------------------------------------------


def by_hand(active: int, slots: int, held: int, name: ExpertPolicy, calibration: Calibration) -> float:
    """Mean seconds of a layer over all choices of ``active`` experts of ``held``, each on the GPU with the chance
    ``slots`` of ``held``; every subset of them by itself, and what either side takes by the layer's model."""
    policy, chance = policy_named(name, held), slots / held
    total = 0.0
    for there in itertools.product((False, True), repeat=active):
        experts = [ActiveExpert(expert, 1, each) for expert, each in enumerate(there)]
        places = policy.decide(0, experts, calibration).places
        likely = 1.0
        for each in there:
            likely *= chance if each else 1.0 - chance
        total += likely * max(layer_sides(experts, places, calibration))
    return total


@pytest.mark.parametrize("name", [name for name in get_args(ExpertPolicy) if name not in ("layers", "stream")])
@pytest.mark.parametrize("slabs", [0, 1, 3, 4])
def test_a_layer_takes_what_the_hybrid_model_says(name: ExpertPolicy, slabs: int) -> None:
    calibration = with_trunk_on_host(MEASURED)
    costs = NodeCosts(CPU, CPU, CPU, gpu=GpuCosts(calibration, policy_named(name, 4), slabs))
    assert costs.gpu is not None
    resident = costs.gpu.resident(4)
    for active in (1, 2, 3):
        assert costs.decode_s(active, resident) == pytest.approx(by_hand(active, slabs, 4, name, calibration))
    half = (costs.decode_s(1, resident) + costs.decode_s(2, resident)) / 2
    assert costs.decode_s(1.5, resident) == pytest.approx(half)
    assert costs.decode_s(0, resident) == 0.0


def test_whole_layers_are_on_the_gpu_or_not() -> None:
    costs = NodeCosts(CPU, CPU, CPU, gpu=GpuCosts(with_trunk_on_host(MEASURED), policy_named("layers"), 2))
    on_gpu, on_cpu = 2 * (1e-4 + 2e-5), 2 * 1e-3
    assert costs.decode_s(2, 0.25) == pytest.approx(0.25 * on_gpu + 0.75 * on_cpu)


def test_activations_travel_to_the_gpu_where_the_trunk_is_on_the_cpu() -> None:
    seen = with_trunk_on_host(MEASURED)
    assert seen.gpu is not None and seen.activation_copy is None
    assert seen.gpu.at(1) == pytest.approx(1.2e-4)
    assert seen.gpu.at(512) == pytest.approx(3e-3)
    assert with_trunk_on_host(seen) == seen
    assert layer_sides([ActiveExpert(0, 1, False)], ["amove"], seen)[0] == CPU.at(1)


def test_a_prompt_is_shared_as_on_one_machine() -> None:
    """The most used experts are on the GPU, and the policy divides the others."""
    calibration = with_trunk_on_host(MEASURED)
    costs = NodeCosts(CPU, CPU, CPU, gpu=GpuCosts(calibration, policy_named("balanced"), 2))
    tokens = [5, 300, 40, 120]
    active = [ActiveExpert(expert, count, expert < 2) for expert, count in enumerate(sorted(tokens, reverse=True))]
    places = policy_named("balanced").decide(0, active, calibration).places
    assert costs.prefill_s(tokens, 1) == pytest.approx(max(layer_sides(active, places, calibration)))
    assert costs.prefill_s([], 1) == 0.0
    assert replace(costs, gpu=None).prefill_s(tokens, 1) == pytest.approx(sum(map(CPU.at, tokens)))


def test_a_step_of_a_ring_with_a_gpu_by_hand() -> None:
    """Over all pairs of four experts: each node is done when its own part is, the GPU's experts all being there."""
    placement = Placement((0,), 2, (((0,), (0,), (0,), (1,)),))
    model = replace(SIZES, moe_layers=1, layers=1, expert_bytes=4 * SLAB)
    nothing = Curve((1,), (0.0,))
    calibration = with_trunk_on_host(MEASURED)
    fast = NodeCosts(CPU, nothing, nothing, gpu=GpuCosts(calibration, policy_named("balanced"), 3))
    nodes = [fast, NodeCosts(CPU, nothing, nothing)]
    total = 0.0
    pairs = list(itertools.combinations(range(4), 2))
    for pair in pairs:
        owners = Assigner(placement, expert_seconds(model, placement, nodes)).owners(0, list(pair), [1, 1])
        active = [ActiveExpert(expert, 1, True) for expert, owner in zip(pair, owners, strict=True) if owner == 0]
        here = max(layer_sides(active, policy_named("balanced").decide(0, active, calibration).places, calibration))
        total += max(here, owners.count(1) * CPU.at(1))
    found = step_time(model, placement, nodes, WireSpeed(0.0, 1e15), RingSetting())
    assert found.moe_s == pytest.approx(total / len(pairs))


def test_the_most_used_experts_are_taken_to_be_on_the_gpu() -> None:
    placement = Placement((0,), 1, (((0,),) * 4,))
    model = replace(SIZES, moe_layers=1, expert_bytes=4 * SLAB)
    costs = node_costs(MODEL, node("a", on_gpu=1))
    assert costs is not None
    even = step_time(model, placement, [costs], WireSpeed(0, 1), RingSetting())
    hot = step_time(model, placement, [costs], WireSpeed(0, 1), RingSetting(), [[97, 1, 1, 1]])
    assert hot.moe_s < even.moe_s


# --- who holds what -------------------------------------------------------------------------------------------------


def best_of_all(nodes: list[NodeFacts]) -> float:
    """The fastest step of all placements of one layer's experts without replicas, equal in both layers, in which every
    node has one; infinite if there is none."""
    costs = [each for one in nodes if (each := node_costs(MODEL, one)) is not None]
    rooms = [expert_room(MODEL, one) // SLAB for one in nodes]
    best = float("inf")
    for holders in itertools.product(range(len(nodes)), repeat=SIZES.experts):
        if any(not 0 < 2 * holders.count(rank) <= room for rank, room in enumerate(rooms)):
            continue
        placement = Placement((0, 1), len(nodes), (tuple((rank,) for rank in holders),) * 2)
        wire = WireSpeed.of_link(1e-5, 5e9)
        best = min(best, step_time(SIZES, placement, costs, wire, RingSetting()).seconds)
    return best


@given(
    memory=st.lists(st.sampled_from([2, 4, 8]), min_size=2, max_size=3),
    on_gpu=st.lists(st.sampled_from([None, 0, 2, 4, 8]), min_size=3, max_size=3),
)
@settings(max_examples=examples(8), deadline=None)
def test_close_to_the_best_of_all_placements(memory: list[int], on_gpu: list[int | None]) -> None:
    nodes = [node(str(rank), room, on_gpu[rank]) for rank, room in enumerate(memory)]
    found, best = decide(nodes, mode="exact"), best_of_all(nodes)
    if sum(expert_room(MODEL, one) for one in nodes) < SIZES.expert_bytes:
        assert found.kind == "refused"
        return
    assert found.step is not None and found.placement is not None
    for rank, each in enumerate(nodes):
        assert found.placement.count_of(rank) * SLAB <= expert_room(MODEL, each)
    assert found.step.seconds <= 1.1 * best


def test_a_slow_cpu_beside_a_fast_gpu_is_left_to_others() -> None:
    """The GPU holds half; what is beyond it would run on this node's CPU, behind the GPU's own copies and runs."""
    slow = changed(node("a", 8, on_gpu=4), expert=Curve((1, 512), (20e-3, 100e-3)))
    found = decide([slow, node("b", 8)], overlap=False)
    assert found.placement is not None
    assert found.placement.count_of(0) == 4


def test_weights_are_the_seconds_with_the_gpu() -> None:
    found = decide([node("a", 8, on_gpu=8), node("b", 8)])
    assert found.placement is not None
    assert found.weights[0] == 1.0
    assert found.weights[1] > 4.0


def test_equal_machines_keep_their_own_gpus() -> None:
    """Their CPUs are taken to be alike, whatever they measured apart; a GPU is not."""
    with_gpu = node("a", 8, on_gpu=4, processor="p", machine="one")
    slower = changed(node("b", 8, processor="p", machine="one"), expert=Curve((1, 512), (1.1e-3, 110e-3)))
    found = decide([with_gpu, slower])
    assert found.terms is not None
    first, second = found.terms.nodes
    assert first.gpu is not None and second.gpu is None
    assert first.expert == second.expert == first.gpu.calibration.cpu == CPU


# --- alone ----------------------------------------------------------------------------------------------------------


def test_alone_the_trunk_keys_and_values_are_on_the_gpu() -> None:
    """The same prediction as the plan of one machine, with as many experts as are left room for."""
    here = node("a", 8, on_gpu=6)
    costs = node_costs(MODEL, here)
    assert costs is not None and here.gpu is not None
    room = gpu_room(MODEL, Device("", here.gpu.memory_total, here.gpu.memory_free))
    assert room == 6 * SLAB - SIZES.trunk_bytes - 100_000
    slabs = slabs_kept(SIZES, policy_named("balanced"), room)
    told = hybrid_speed(SIZES, MEASURED, policy_named("balanced"), slabs / 2, Shares.even(4))
    step, prefill = alone_times(MODEL, here, costs)
    assert step.seconds == pytest.approx(told.step_s)
    assert step.moe_s == pytest.approx(2 * told.layer_s)
    assert prefill.seconds == pytest.approx(told.prefill_s)
    cpu = alone_times(MODEL, changed(here, gpu=None), costs)
    assert cpu[0].seconds > step.seconds
    # A GPU without room for the trunk, or a slower one, is left alone.
    for other in (gpu(1), gpu(6, calibration=msgspec.structs.replace(MEASURED, gpu=Curve((1,), (1.0,))))):
        assert alone_times(MODEL, changed(here, gpu=other), costs) == cpu


def test_the_head_alone_with_its_gpu_is_faster_than_the_ring() -> None:
    found = decide([node("head", 8, on_gpu=16), node("b", 8)], even_if_slower=False)
    assert found.kind == "alone"
    assert found.alone_step is not None


def test_another_machine_that_computes_alone_keeps_trunk_keys_and_values_on_its_gpu() -> None:
    found = decide([node("laptop", 0), node("studio", 8, on_gpu=6)], even_if_slower=False)
    assert found.kind == "elsewhere" and found.facts is not None
    here, there = found.facts.nodes
    assert (here.gpu, here.gpu_expert_bytes) == ("", 0)
    # Of room for six, the trunk takes two, and keys and values a little.
    assert (there.gpu, there.gpu_expert_bytes) == ("a GPU", 3 * SLAB)
    small = decide([node("laptop", 0), node("studio", 8, on_gpu=1)], even_if_slower=False)
    assert small.facts is not None and small.facts.nodes[-1].gpu_expert_bytes <= SLAB


def test_what_was_not_measured_is_guessed() -> None:
    found = node_costs(MODEL, changed(node("a"), gpu=gpu(2, calibration=None)))
    assert found is not None and found.gpu is not None
    shape = ExpertShape(1024, round(SLAB / 2 / 3 / 1024), "", SLAB)
    assert found.gpu.calibration == with_trunk_on_host(guessed(shape, 2, CPU))


# --- which runtime --------------------------------------------------------------------------------------------------

NATIVE = RuntimeChoice("native", "the default on a CPU")


@pytest.mark.parametrize(
    ("plain", "by_torch", "expected"),
    [
        ((True, 0.2), (True, 0.1), ("torch", "10.0 tokens/s are predicted with the X of b, 5.0 by native without")),
        ((True, 0.1), (True, 0.2), ("native", "10.0 tokens/s are predicted, 5.0 by torch with the X of b")),
        ((False, None), (True, 0.1), ("torch", "only with the X of b is there memory for all experts")),
        ((False, None), (False, None), ("native", "the default on a CPU")),
        ((True, 0.1), (False, None), ("native", "the default on a CPU")),
        (
            (True, None),
            (True, 0.1),
            ("native", "the X of b would need torch, and too little was measured to compare the two"),
        ),
    ],
)
def test_torch_where_the_gpus_make_a_step_faster(
    plain: tuple[bool, float | None], by_torch: tuple[bool, float | None], expected: tuple[str, str]
) -> None:
    found = ring_choice(NATIVE, RingForecast(*plain), RingForecast(*by_torch), ["the X of b"])
    assert (found.name, found.reason, found.is_fallback) == (*expected, False)


def test_a_guess_is_called_one_and_what_is_no_choice_stays() -> None:
    faster = RingForecast(True, 0.2), RingForecast(True, 0.1)
    found = ring_choice(NATIVE, *faster, ["the X of a", "the Y of b", "the Z of c"], ["the Y of b"])
    assert found.reason == (
        "10.0 tokens/s are predicted with the X of a, the Y of b and the Z of c, 5.0 by native without "
        "(the Y of b: a guess until `privatellm bench experts` runs there)"
    )
    assert ring_choice(NATIVE, *faster, []) is NATIVE
    torch = RuntimeChoice("torch", "x", is_fallback=True)
    assert ring_choice(torch, *faster, ["the X of a"]) is torch


@pytest.mark.parametrize(
    ("ring", "installed", "runs"),
    [
        ("native", ["native", "torch"], "native"),
        ("torch", ["native", "torch"], "torch"),
        ("mlx", ["native", "torch"], "torch"),
        ("native", ["mlx", "torch"], "mlx"),
        ("native", ["torch"], "torch"),
        ("torch", ["native"], "native"),
        ("torch", [], "none"),
    ],
)
def test_what_runs_a_nodes_experts(ring: str, installed: list[str], runs: str) -> None:
    assert experts_runtime(ring, installed) == runs
