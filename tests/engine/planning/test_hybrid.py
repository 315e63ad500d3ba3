"""Plans: what goes where, whether it fits, what is predicted, and that it all adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc.messages import ExpertPolicy, PlannedChoice
from engine.planning.calibration import Calibration, ExpertShape, Processor, estimated
from engine.planning.hybrid import (
    MAKING_ROOM_S,
    Device,
    HybridMachine,
    HybridPlan,
    HybridRequest,
    better,
    bytes_from_disk,
    gpu_room,
    plan,
    slabs_kept,
    workspace_bytes,
)
from engine.planning.memory import ModelSizes
from engine.planning.policy import policy_named
from engine.planning.prediction import (
    EXECUTOR_OPERATIONS,
    PREFILL_TOKENS,
    RESIDENT_OPERATIONS,
    TRUNK_OPERATIONS,
    Shares,
    cpu_speed,
    expected_tokens,
    hybrid_speed,
    streaming_step_s,
)
from tests.support.random_examples import examples

GB = 10**9
NAMES = get_args(ExpertPolicy)
SLAB = 352_321_536
MIXTRAL = ModelSizes(
    layers=32,
    moe_layers=32,
    experts=8,
    experts_per_token=2,
    hidden=4096,
    trunk_bytes=3_200_000_000,
    expert_bytes=256 * SLAB,
    key_value_bytes_per_token=131_072,
)
DENSE = ModelSizes(16, 0, 0, 0, 2048, 2_000_000_000, 0, 32_768)
SHAPE = ExpertShape(hidden=4096, ffn=14336, dtype="BF16", expert_bytes=SLAB)
MEASURED = estimated(SHAPE, cpu=Processor(60e9, 1.5e12), gpu=Processor(500e9, 50e12, 3e-5), pcie_rate=25e9)
BIG = HybridMachine(Device("CPU", 256 * GB, 200 * GB), Device("a GPU", 24 * GB, 23 * GB))


def used(found: HybridPlan, place: int) -> int:
    memory = found.memory[place]
    return memory.trunk + memory.experts + memory.key_values + memory.workspace


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_for_mixtral_on_a_gpu_of_24_gb(name: ExpertPolicy) -> None:
    found = plan(MIXTRAL, BIG, HybridRequest(partitioning="hybrid", policy=name), MEASURED)
    assert found.fits
    assert found.on_gpu
    assert found.memory[0].experts == found.slabs * SLAB
    expected = {"monde": 0, "stream": 0, "on-demand": 0, "layers": 48, "lru-offload": 32}
    assert found.slabs == expected.get(name, 50)
    assert found.tokens_per_s is not None
    assert found.tokens_per_s > 0
    assert "measured" in found.basis
    assert {choice.what for choice in found.choices} >= {"trunk", "experts on the GPU", "policy"}
    assert all(choice.reason for choice in found.choices)


@settings(max_examples=examples(60), deadline=None)
@given(
    free=st.integers(0, 120 * GB),
    more=st.integers(0, 40 * GB),
    host=st.integers(0, 200 * GB),
    asked=st.none() | st.integers(0, 200 * GB),
    name=st.sampled_from(NAMES),
    context=st.integers(0, 100_000),
)
def test_sums_add_up_nothing_is_negative_and_more_memory_never_hurts(
    free: int, more: int, host: int, asked: int | None, name: ExpertPolicy, context: int
) -> None:
    wanted = HybridRequest(partitioning="hybrid", policy=name, gpu_expert_bytes=asked)
    model = replace(MIXTRAL, context_tokens=context)

    def on(gpu_free: int) -> HybridPlan:
        cpu = Device("CPU", 256 * GB, host)
        return plan(model, HybridMachine(cpu, Device("a GPU", 160 * GB, gpu_free), disk_read=2e9), wanted, MEASURED)

    small, large = on(free), on(free + more)
    for found in (small, large):
        assert found.fits == (found.shortfall == 0)
        assert found.shortfall >= 0
        assert 0 <= found.slabs <= MIXTRAL.slabs
        for memory in found.memory:
            assert min(memory.trunk, memory.experts, memory.key_values, memory.workspace) >= 0
        gpu_free = found.memory[0].free
        assert used(found, 0) <= gpu_free if found.fits else used(found, 0) == gpu_free + found.shortfall
        assert found.tokens_per_s is not None
        assert found.tokens_per_s > 0
    assert large.slabs >= small.slabs
    assert large.shortfall <= small.shortfall


@settings(max_examples=examples(12), deadline=None)
@given(slots=st.floats(0, 7.5), name=st.sampled_from(["balanced", "twiddler", "layers", "lru-offload"]))
def test_more_experts_on_the_gpu_are_never_slower(slots: float, name: ExpertPolicy) -> None:
    policy, even = policy_named(name, 8), Shares.even(8)
    fewer = hybrid_speed(MIXTRAL, MEASURED, policy, slots, even)
    more = hybrid_speed(MIXTRAL, MEASURED, policy, slots + 0.5, even)
    assert more.step_s <= fewer.step_s * (1 + 1e-9)
    assert more.prefill_s <= fewer.prefill_s * 1.01


def test_balanced_is_predicted_to_be_no_slower_than_any_other_policy() -> None:
    even = Shares.even(8)
    best = hybrid_speed(MIXTRAL, MEASURED, policy_named("balanced"), 1.75, even)
    for name in NAMES:
        slots = 0.0 if policy_named(name).cache.kind == "none" else 1.75
        other = hybrid_speed(MIXTRAL, MEASURED, policy_named(name, 8), slots, even)
        assert best.step_s <= other.step_s * (1 + 1e-9)
        assert best.prefill_s <= other.prefill_s * 1.01


def test_asking_for_more_gpu_memory_than_there_is_tells_the_shortfall() -> None:
    found = plan(MIXTRAL, BIG, HybridRequest(gpu_expert_bytes=60 * GB), MEASURED)
    assert not found.fits
    assert found.shortfall == 60 * GB - gpu_room(MIXTRAL, BIG.gpu or BIG.cpu)
    modest = plan(MIXTRAL, BIG, HybridRequest(partitioning="hybrid", gpu_expert_bytes=5 * GB), MEASURED)
    assert modest.fits
    assert modest.slabs == 5 * GB // SLAB


def test_a_gpu_too_small_for_the_trunk_is_left_alone_unless_it_was_chosen() -> None:
    small = replace(BIG, gpu=Device("a small GPU", 2 * GB, 2 * GB))
    alone = plan(MIXTRAL, small, HybridRequest(), MEASURED)
    assert alone.fits
    assert not alone.on_gpu
    assert "lacks" in alone.choices[0].reason
    chosen = plan(MIXTRAL, small, HybridRequest(partitioning="hybrid"), MEASURED)
    assert not chosen.fits
    assert chosen.shortfall > 0


def test_a_slow_gpu_is_left_alone_and_the_reason_says_so() -> None:
    slow = estimated(SHAPE, cpu=Processor(60e9, 1.5e12), gpu=Processor(6e9, 50e9, 1e-3), pcie_rate=1e9)
    found = plan(MIXTRAL, BIG, HybridRequest(), slow)
    assert not found.on_gpu
    assert "CPU alone is predicted to be faster" in found.choices[0].reason
    assert found.tokens_per_s is not None
    with_gpu = plan(MIXTRAL, BIG, HybridRequest(partitioning="hybrid"), slow)
    assert (with_gpu.tokens_per_s or 0.0) < found.tokens_per_s


def test_hybrid_without_a_gpu_cannot_be() -> None:
    found = plan(MIXTRAL, HybridMachine(BIG.cpu), HybridRequest(partitioning="hybrid"), MEASURED)
    assert not found.fits
    assert "no GPU" in found.choices[0].reason


def test_without_measurements_nothing_is_predicted_and_the_way_out_is_said() -> None:
    found = plan(MIXTRAL, BIG, HybridRequest(partitioning="hybrid"), None)
    assert (found.tokens_per_s, found.prefill_tokens_per_s) == (None, None)
    assert "bench experts" in found.basis
    alone = plan(MIXTRAL, HybridMachine(BIG.cpu), HybridRequest(), None)
    assert alone.tokens_per_s is None
    streamed = plan(DENSE, HybridMachine(BIG.cpu, memory_read=20e9), HybridRequest())
    assert streamed.tokens_per_s == pytest.approx(20e9 / (DENSE.trunk_bytes + 512 * 32_768))
    assert streamed.prefill_tokens_per_s is None


def test_a_rate_that_was_measured_with_other_models_is_said_to_be_one() -> None:
    machine = HybridMachine(BIG.cpu, memory_read=20e9)
    found = plan(replace(MIXTRAL, name="m q4"), machine, HybridRequest(cpu_read_share=0.5))
    assert found.basis == (
        "the weights read per token at 10 GB/s, a rate measured with other models; "
        "`privatellm bench experts 'm q4'` measures these experts"
    )
    assert plan(DENSE, machine, HybridRequest()).basis == "the weights read per token at 20 GB/s"


def test_a_dense_model_shares_no_experts() -> None:
    found = plan(DENSE, BIG, HybridRequest(partitioning="hybrid"))
    assert found.fits
    assert found.slabs == 0
    too_large = plan(replace(DENSE, trunk_bytes=300 * GB), HybridMachine(BIG.cpu), HybridRequest())
    assert too_large.shortfall == used(too_large, 0) - 200 * GB > 0


def test_experts_beyond_the_hosts_memory_come_from_the_disk_at_its_rate() -> None:
    small = HybridMachine(Device("CPU", 64 * GB, 50 * GB), disk_read=2e9)
    found = plan(MIXTRAL, small, HybridRequest(), MEASURED)
    whole = plan(MIXTRAL, HybridMachine(BIG.cpu), HybridRequest(), MEASURED)
    assert found.fits
    assert found.choices[-1].what == "memory"
    assert "2000 MB/s" in found.choices[-1].reason
    assert found.tokens_per_s is not None
    assert whole.tokens_per_s is not None
    slower = 1 / found.tokens_per_s - 1 / whole.tokens_per_s
    room = 50 * GB - MIXTRAL.trunk_bytes - 512 * 131_072
    assert slower == pytest.approx(bytes_from_disk(MIXTRAL, room, 1) * (1 / 2e9 + MAKING_ROOM_S))
    reserved = plan(MIXTRAL, replace(small, reserve=GB), HybridRequest(), MEASURED)
    assert found.tokens_per_s < (reserved.tokens_per_s or 0) < whole.tokens_per_s
    popular = plan(MIXTRAL, small, HybridRequest(), MEASURED, [[100, 100, 1, 1, 1, 1, 1, 1]] * 32)
    assert (popular.tokens_per_s or 0) > found.tokens_per_s
    unmeasured = plan(MIXTRAL, replace(small, disk_read=None), HybridRequest(), MEASURED)
    assert unmeasured.tokens_per_s is None
    assert "disk" in unmeasured.basis


def test_a_trunk_in_the_files_need_not_fit_in_memory() -> None:
    """A dense model that lacks one byte is read whole for every token, as its pages are wanted in a circle."""
    mapped = replace(DENSE, trunk_is_mapped=True, embedding_bytes=GB // 10)
    beside = 4096 * 32_768 + workspace_bytes(mapped, gpu=False)
    found = plan(mapped, HybridMachine(Device("CPU", 4 * GB, GB + beside), None, 20e9, 1e9), HybridRequest())
    assert found.fits and found.memory[0].trunk == GB
    assert "1.0 GB of the weights do not fit" in found.choices[-1].reason
    read = 1.9 * GB
    assert found.tokens_per_s == pytest.approx(1 / (read * (1 / 1e9 + MAKING_ROOM_S) + (read + 512 * 32_768) / 20e9))
    none = plan(mapped, HybridMachine(Device("CPU", 4 * GB, beside - 1), None, 20e9, 1e9), HybridRequest())
    assert (none.fits, none.shortfall) == (False, 1)


def test_popularity_raises_the_speed() -> None:
    counts = [[100, 1, 1, 1, 1, 1, 1, 1]] * 32
    wanted = HybridRequest(partitioning="hybrid")
    known, even = plan(MIXTRAL, BIG, wanted, MEASURED, counts), plan(MIXTRAL, BIG, wanted, MEASURED)
    assert (known.tokens_per_s or 0) > (even.tokens_per_s or 1e9)


@given(st.integers(0, 400 * GB), st.sampled_from(NAMES))
def test_what_a_cache_holds_fits_in_its_room(room: int, name: ExpertPolicy) -> None:
    policy = policy_named(name)
    slabs = slabs_kept(MIXTRAL, policy, room)
    assert 0 <= slabs * SLAB <= max(room, 0)
    if policy.cache.kind == "layers":
        assert slabs % 8 == 0
    assert slabs_kept(MIXTRAL, policy, room - 10**12) == 0


def test_the_workspace_grows_with_the_chunk_and_is_larger_on_a_gpu() -> None:
    assert workspace_bytes(MIXTRAL, gpu=False) < workspace_bytes(replace(MIXTRAL, prefill_chunk=2048), gpu=False)
    assert workspace_bytes(MIXTRAL, gpu=True) >= workspace_bytes(MIXTRAL, gpu=False) + 2 * SLAB


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64), st.integers(1, 8), st.integers(0, 600))
def test_expected_tokens_are_all_routes_and_no_expert_gets_more_than_there_are_rows(
    counts: list[int], per_token: int, rows: int
) -> None:
    tokens = expected_tokens(Shares.counted([counts]), per_token, rows)
    assert sum(tokens) == rows * min(per_token, len(counts))
    assert all(0 <= count <= rows for count in tokens)


def test_shares_of_a_profile() -> None:
    shares = Shares.counted([[1, 3], [6, 2], [0, 0]])
    assert shares.of == pytest.approx((0.75, 0.25))
    assert [shares.caught(slots) for slots in (0, 0.5, 1, 2, 9)] == pytest.approx([0, 0.375, 0.75, 1, 1])
    assert Shares.counted([[0, 0]]) == Shares.even(2)
    with pytest.raises(ValueError, match="same number"):
        Shares.counted([[1], [1, 2]])


def test_the_cpus_speed_is_what_its_curve_and_its_memory_say() -> None:
    speed = cpu_speed(MIXTRAL, MEASURED, Shares.even(8))
    trunk = (MIXTRAL.trunk_bytes + 512 * 131_072) / 60e9
    assert speed.step_s == pytest.approx(trunk + 32 * 2 * SLAB / 60e9)
    assert speed.step_s == pytest.approx(streaming_step_s(MIXTRAL, 60e9))
    operations = 2 * PREFILL_TOKENS * MIXTRAL.trunk_bytes / 2 / 1.5e12
    assert speed.prefill_s == pytest.approx(operations + 32 * 8 * 2 * 128 * SLAB / 2 / 1.5e12)
    of_trunk = cpu_speed(MIXTRAL, MEASURED, Shares.even(8), read_share=0.5)
    assert of_trunk.step_s - speed.step_s == pytest.approx(trunk)
    one_row = cpu_speed(replace(MIXTRAL, embedding_bytes=10**9), MEASURED, Shares.even(8))
    assert speed.step_s - one_row.step_s == pytest.approx(1e9 / 60e9)
    slower = cpu_speed(MIXTRAL, MEASURED, Shares.even(8), layer_overhead_s=1e-3)
    assert slower.step_s - speed.step_s == pytest.approx(32e-3)


def test_a_calibration_without_a_gpu_predicts_no_hybrid() -> None:
    alone: Calibration = estimated(SHAPE, cpu=Processor(60e9, 1.5e12))
    with pytest.raises(ValueError, match="no GPU"):
        hybrid_speed(MIXTRAL, alone, policy_named("balanced"), 1.0, Shares.even(8))
    found = plan(MIXTRAL, BIG, HybridRequest(partitioning="hybrid"), alone)
    assert found.tokens_per_s is None


def test_what_the_host_begins_on_a_gpu_counts_and_least_where_all_experts_are_there() -> None:
    slow = msgspec.structs.replace(MEASURED, gpu_operation_s=1e-3)
    even, balanced, layers = Shares.even(8), policy_named("balanced"), policy_named("layers")
    for policy, slots, sharing in (
        (balanced, 7.9, EXECUTOR_OPERATIONS),
        (balanced, 8.0, RESIDENT_OPERATIONS),
        (layers, 4.0, (EXECUTOR_OPERATIONS + RESIDENT_OPERATIONS) / 2),
    ):
        quick, slowed = (hybrid_speed(MIXTRAL, each, policy, slots, even) for each in (MEASURED, slow))
        begun = TRUNK_OPERATIONS * MIXTRAL.layers + sharing * MIXTRAL.moe_layers
        assert slowed.step_s - quick.step_s == pytest.approx(1e-3 * begun)
        begun = TRUNK_OPERATIONS * MIXTRAL.layers + EXECUTOR_OPERATIONS * MIXTRAL.moe_layers
        assert slowed.prefill_s - quick.prefill_s == pytest.approx(1e-3 * begun)


def test_a_gpu_that_is_slower_at_answers_is_taken_for_its_prompts() -> None:
    """A usual exchange decides, not the tokens of an answer alone."""
    alone = HybridPlan(True, 0, False, 0, (), (PlannedChoice("experts", "CPU", ""),), 20.0, 20.0)
    shared = HybridPlan(True, 0, True, 8, (), (), 18.0, 500.0)
    assert better(alone, shared, False).on_gpu
    assert not better(alone, replace(shared, prefill_tokens_per_s=None), False).on_gpu
    assert not better(alone, replace(shared, tokens_per_s=5.0), False).on_gpu
    assert better(replace(alone, fits=False), replace(shared, tokens_per_s=5.0), False).on_gpu
