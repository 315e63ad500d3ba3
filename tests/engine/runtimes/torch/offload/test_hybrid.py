"""The hybrid executor on a stand-in device: the same sums whatever the policy and the cache, and honest counts."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.nn.functional import silu

from benchmarks.stand_in_device import Faults, Speeds, StandInDevice, TimedCpu, calibration_of
from engine.ipc.messages import ExpertPolicy
from engine.models.folders.opening import open_model
from engine.models.folders.prepare import prepare
from engine.models.formats.model_files import Experts
from engine.moe.popularity import seed_order
from engine.moe.timing import Recorder
from engine.planning.policy import Policy, policy_named
from engine.runtimes.torch.offload.gates import family_gate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from tests.support.opened_experts import experts_of
from tests.support.pairwise import pairwise
from tests.support.tiny_models import write_tiny_model

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden rows, indices, weights."""
POLICIES: tuple[ExpertPolicy, ...] = get_args(ExpertPolicy)
K = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as a checkpoint and as a bank."""
    root = tmp_path_factory.mktemp("hybrid")
    plain = write_tiny_model(root / "plain", "mixtral")
    prepare(plain, root / "prepared", lambda *_: None)
    return {"plain": plain, "prepared": root / "prepared"}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["prepared"]


def hybrid_on(
    folder: Path, device: StandInDevice, policy: ExpertPolicy | Policy, slots: int, dtype: torch.dtype = torch.float32
) -> tuple[HybridBackend, Recorder]:
    """A hybrid executor with room for ``slots`` experts on ``device``, the staging slots besides."""
    files = open_model(folder)
    experts = files.experts
    assert experts is not None
    gate = family_gate(lambda gate_out, up_out: silu(gate_out) * up_out)
    gates = dict.fromkeys(experts.layers, gate)
    recorder = Recorder(max(experts.layers) + 1, experts.layers, experts.count)
    local, _ = make_cpu_backend(experts, gates, dtype, cpu_threads=1)
    host = HostExperts(experts)
    executor = HybridBackend(
        host,
        device,
        TimedCpu(local, device),
        gates,
        policy_named(policy, experts.count) if isinstance(policy, str) else policy,
        calibration_of(device.speeds, host.slot_bytes),
        dtype,
        recorder,
    )
    executor.open_cache(slots * host.slot_bytes, seed_order(files), reserve=0)
    return executor, recorder


def routes(experts: Experts, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + 1000 * seed)
    hidden = torch.randn(tokens, experts.expert(experts.layers[0], 0).gate.shape[1], generator=generator)
    weights, indices = torch.rand(tokens, experts.count, generator=generator).topk(K, dim=-1)
    return hidden, indices, weights


def local_on(folder: Path) -> TensorBackend:
    experts = experts_of(folder)
    gate = family_gate(lambda gate_out, up_out: silu(gate_out) * up_out)
    return make_cpu_backend(experts, dict.fromkeys(experts.layers, gate), torch.float32, cpu_threads=1)[0]


SPEEDS = (Speeds(), Speeds(copy_s=0.5, cpu_s=2.0), Speeds(gpu_s=30.0))
ROOMS = (0, 1, 7, 24)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("policy", "slots", "speeds", "seed"),
    [
        *pairwise(POLICIES, ROOMS, SPEEDS, (0, 1)),
        *(pytest.param(*row, marks=pytest.mark.soak) for row in product(POLICIES, ROOMS, SPEEDS, (2,))),
    ],
)
def test_every_policy_and_cache_gives_the_same_bits(
    folders: dict[str, Path], policy: ExpertPolicy, slots: int, speeds: Speeds, seed: int
) -> None:
    folder = folders["prepared" if seed % 2 else "plain"]
    executor, _ = hybrid_on(folder, StandInDevice(speeds=speeds), policy, slots)
    for layer, given, expected, expected_scaled in expected_sums(folder, seed):
        assert torch.equal(executor.run(layer, *given), expected)
        assert torch.equal(executor.run(layer, *given, True), expected_scaled)
    assert len(executor.cache) <= slots


@functools.cache
def expected_sums(folder: Path, seed: int) -> list[tuple[int, Routed, torch.Tensor, torch.Tensor]]:
    """For steps of a conversation: layer, routes, and what a device that runs nothing makes of them, with weights that
    scale what comes out and what goes in. It is near what there is without a device."""
    experts, local, found = experts_of(folder), local_on(folder), []
    plain, _ = hybrid_on(folder, StandInDevice(), "layers", 0)
    for step, tokens in enumerate([1, 1, 1, 5, 1, 12, 70, 1, 90, 1]):
        for layer in experts.layers:
            given = routes(experts, tokens, seed=(10 * seed + step) * 8 + layer)
            expected = plain.run(layer, *given)
            torch.testing.assert_close(expected, local.run(layer, *given), rtol=1e-5, atol=1e-5)
            found.append((layer, given, expected, plain.run(layer, *given, True)))
    return found


def union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    return union(first) + union(second) - union(first + second)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("speeds", [Speeds(), Speeds(copy_s=0.7)])
def test_counts_equal_the_trace(folder: Path, policy: ExpertPolicy, speeds: Speeds) -> None:
    experts = experts_of(folder)
    device = StandInDevice(speeds=speeds)
    executor, recorder = hybrid_on(folder, device, policy, 6)
    device.trace.clear()
    recorder.reset()
    active = 0
    for step, tokens in enumerate([1, 5, 1, 80, 1]):
        for layer in experts.layers:
            hidden, indices, weights = routes(experts, tokens, seed=step)
            executor.run(layer, hidden, indices, weights)
            active += len(indices.unique())
    movement = recorder.frame(0).movement
    assert movement is not None
    kinds = ("copy", "run", "cpu", "fill")
    by_kind = {kind: [op for op in device.trace if op.kind == kind] for kind in kinds}
    spans = {kind: [(op.start, op.end) for op in ops] for kind, ops in by_kind.items()}
    on_device = spans["copy"] + spans["run"]
    moved = sum(op.nbytes for op in device.trace if op.kind in ("download", "upload"))
    assert movement.tokens == 88
    assert movement.weight_bytes == sum(op.nbytes for op in by_kind["copy"] + by_kind["fill"])
    assert movement.learned == len(by_kind["fill"])
    assert movement.activation_bytes == moved
    assert movement.hits + movement.misses == active
    if policy != "stream":
        assert movement.moved == len(by_kind["copy"])
    assert movement.cpu_s == pytest.approx(union(spans["cpu"]), abs=1e-9)
    assert movement.gpu_s == pytest.approx(union(on_device), abs=1e-9)
    assert movement.both_s == pytest.approx(overlap(on_device, spans["cpu"]), abs=1e-9)
    assert movement.total_s == pytest.approx(device.clock.seconds - device.trace[0].start, abs=1e-9)
    recorder.reset()
    assert recorder.frame(0).movement.tokens == 0


def routed_to(experts: Experts, chosen: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(len(chosen), experts.expert(experts.layers[0], 0).gate.shape[1], generator=generator)
    return hidden, torch.tensor(chosen), torch.full((len(chosen), len(chosen[0])), 0.5)


def test_copies_overlap_computing(folder: Path) -> None:
    # Four experts, nothing there: the second is copied while the first computes, into the other of two slots.
    device = StandInDevice(speeds=Speeds(copy_s=1.0, gpu_s=0.6))
    executor, _ = hybrid_on(folder, device, "on-demand", 0)
    device.trace.clear()
    executor.run(0, *routed_to(experts_of(folder), [[0, 1], [2, 3]]))
    copies = [op for op in device.trace if op.kind == "copy"]
    runs = [op for op in device.trace if op.kind == "run"]
    assert len({op.slot for op in copies}) == 2
    begun = copies[0].start
    assert [op.start - begun for op in copies] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert [op.start - begun for op in runs] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    # Where computing takes longer, a copy waits until its slot is read.
    slow = StandInDevice(speeds=Speeds(copy_s=1.0, gpu_s=5.0))
    executor, _ = hybrid_on(folder, slow, "on-demand", 0)
    slow.trace.clear()
    executor.run(0, *routed_to(experts_of(folder), [[0, 1], [2, 3]]))
    copies = [op for op in slow.trace if op.kind == "copy"]
    assert [op.start - copies[0].start for op in copies] == pytest.approx([0.0, 1.0, 6.0, 11.0])


def test_the_cpu_works_while_the_device_does(folder: Path) -> None:
    device = StandInDevice(speeds=Speeds(copy_s=2.0, cpu_s=1.0))
    executor, recorder = hybrid_on(folder, device, "balanced", 0)
    executor.run(0, *routed_to(experts_of(folder), [[0, 1], [2, 3], [4, 5], [6, 7]]))
    movement = recorder.frame(0).movement
    assert movement is not None
    assert movement.moved > 0
    assert movement.cpu_s > 0
    assert movement.both_s > 0.9 * min(movement.cpu_s, movement.gpu_s)
    assert movement.total_s < movement.cpu_s + movement.gpu_s


def test_a_long_prefill_copies_only_what_it_needs_and_what_is_there_stays(folder: Path) -> None:
    experts = experts_of(folder)
    device = StandInDevice(speeds=Speeds(copy_s=0.01))
    executor, recorder = hybrid_on(folder, device, "lru-offload", 9)
    before = executor.resident()
    assert [len(row) for row in before] == [3, 3, 3]
    device.trace.clear()
    chosen = [expert for expert in range(8) if expert != 6]
    missing = [expert for expert in chosen if expert not in before[1]]
    executor.run(1, *routed_to(experts, [[chosen[i % 7], chosen[(i + 1) % 7]] for i in range(80)]))
    assert executor.resident() == before
    assert len([op for op in device.trace if op.kind == "copy"]) == len(missing)
    # Decoding takes their places.
    executor.run(1, *routed_to(experts, [[missing[0], missing[1]]]))
    assert set(missing[:2]) <= set(executor.resident()[1])
    assert recorder.frame(0).resident == executor.resident()


def test_resizing_while_running(folder: Path) -> None:
    experts = experts_of(folder)
    device = StandInDevice(speeds=Speeds(copy_s=0.01))
    executor, _ = hybrid_on(folder, device, "balanced", 4)
    plain, _ = hybrid_on(folder, StandInDevice(), "layers", 0)
    for slots in (24, 3, 0, 11, 1000):
        kept = executor.resize(slots * executor.slot_bytes)
        assert kept == min(slots, 24) * executor.slot_bytes
        for step in range(6):
            arguments = routes(experts, 3, seed=step)
            assert torch.equal(executor.run(step % 3, *arguments), plain.run(step % 3, *arguments))
    assert len(executor.cache) > 0
    executor.close()
    assert device.buffers == {}


def test_new_room_is_filled_at_once_also_where_copying_never_pays(folder: Path) -> None:
    for policy in ("balanced", "twiddler", "layers", "lru-offload"):
        device = StandInDevice(speeds=Speeds(copy_s=1000.0))
        executor, _ = hybrid_on(folder, device, policy, 0)
        for layers in (1, 2):
            executor.resize(layers * 8 * executor.slot_bytes)
            assert len(executor.cache) == layers * 8, policy


@pytest.mark.soak
def test_where_copying_never_pays_the_cache_follows_the_use_all_the_same(folder: Path) -> None:
    # A copy takes as long as fifty experts on the CPU, so no expert is ever copied to be run.
    device = StandInDevice(speeds=Speeds(copy_s=50.0))
    executor, recorder = hybrid_on(folder, device, "balanced", 6)
    plain, _ = hybrid_on(folder, StandInDevice(), "layers", 0)
    before = executor.resident()
    hot = [[expert for expert in range(8) if expert not in row][-2:] for row in before]
    device.trace.clear()
    steps = 80
    for step in range(steps):
        for layer in executor._layers:
            hidden, _, weights = routes(experts_of(folder), 1, seed=step * 8 + layer)
            chosen = torch.tensor([hot[layer]])
            found = executor.run(layer, hidden, chosen, weights)
            assert torch.equal(found, plain.run(layer, hidden, chosen, weights))
    movement = recorder.frame(0).movement
    assert movement is not None
    assert movement.moved == 0
    assert [set(row) for row in executor.resident()] == [set(row) for row in hot]
    assert movement.learned == 6, "each once: what is in use does not go back and forth"
    # Nobody waited for a copy: no layer took longer than the CPU would have taken for it, and what travels besides.
    assert movement.total_s < steps * 3 * (device.speeds.on_cpu(1) * 2 + 10 * device.speeds.activation_s)


@pytest.mark.soak
def test_even_use_moves_nothing(folder: Path) -> None:
    device = StandInDevice(speeds=Speeds(copy_s=50.0))
    executor, recorder = hybrid_on(folder, device, "balanced", 12)
    for step in range(100):
        for layer in executor._layers:
            hidden, indices, weights = routes(experts_of(folder), 1, seed=step * 8 + layer)
            executor.run(layer, hidden, indices, weights)
    movement = recorder.frame(0).movement
    assert movement is not None
    assert movement.learned < 14, "300 layers, 600 routes"


def test_a_learned_copy_that_fails_is_said_and_the_expert_runs_on_the_cpu(folder: Path) -> None:
    for faults in (Faults(copies_refused={1}), Faults(copies_damaged={1})):
        device = StandInDevice(speeds=Speeds(copy_s=50.0), faults=faults)
        executor, recorder = hybrid_on(folder, device, "balanced", 0)
        plain, _ = hybrid_on(folder, StandInDevice(), "layers", 0)
        executor._memory._wanted = 1
        executor._memory._grow(1)
        for step in range(12):
            hidden, _, weights = routes(experts_of(folder), 1, seed=step)
            chosen = torch.tensor([[1, 2]])
            found = executor.run(0, hidden, chosen, weights)
            assert torch.equal(found, plain.run(0, hidden, chosen, weights))
        (line,) = recorder.take_notices()
        assert "so it runs on the CPU this time" in line
        assert len(executor.cache) == 1, "tried again"


def test_no_tokens_and_no_expert_twice(folder: Path) -> None:
    executor, _ = hybrid_on(folder, StandInDevice(), "balanced", 4)
    nothing = executor.run(0, torch.zeros(0, 48), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert nothing.shape == (0, 48)


def test_a_device_with_whole_layers_finds_the_experts_itself(folder: Path) -> None:
    """The same bits and the same counts as when the host sorts the routes, which are known once the step is over."""
    experts = experts_of(folder)
    room = experts.count * len(experts.layers)
    usual, counted = hybrid_on(folder, StandInDevice(), "balanced", room)
    device = StandInDevice(runs_routes=True)
    found, recorder = hybrid_on(folder, device, "balanced", room)
    recorder.reset()
    counted.reset()
    for step in range(3):
        for layer in experts.layers:
            hidden, indices, weights = routes(experts, 2, seed=step)
            expected = usual.run(layer, hidden, indices, weights)
            transfers = len([op for op in device.trace if op.kind in ("download", "upload")])
            assert torch.equal(found.run(layer, hidden, indices, weights), expected)
            if layer != experts.layers[0]:
                assert len([op for op in device.trace if op.kind in ("download", "upload")]) == transfers
    ours, theirs = recorder.frame(0).movement, counted.frame(0).movement
    assert ours is not None and theirs is not None
    assert (ours.tokens, ours.hits, ours.misses, ours.cpu_s) == (theirs.tokens, theirs.hits, 0, 0.0)
    assert ours.gpu_s > 0 and ours.total_s >= ours.gpu_s
    for layer in experts.layers:
        assert found.popularity.counts(layer) == usual.popularity.counts(layer)


def test_a_layer_that_lost_an_expert_is_decided_on_the_host_again(folder: Path) -> None:
    experts = experts_of(folder)
    device = StandInDevice(runs_routes=True)
    room = experts.count * len(experts.layers)
    executor, recorder = hybrid_on(folder, device, "balanced", room)
    layer = experts.layers[1]
    hidden, indices, weights = routes(experts, 2)
    expected = executor.run(layer, hidden, indices, weights)
    assert executor.cache.slot_of(layer, 0) is not None
    executor.cache.drop(layer, 0)
    before = recorder.frame(0).movement
    again = executor.run(layer, hidden, torch.tensor([[0, 1], [0, 2]]), weights)
    after = recorder.frame(0).movement
    assert before is not None and after is not None and after.misses == before.misses + 1
    assert again.shape == expected.shape
    many = routes(experts, 40)
    assert executor.run(experts.layers[0], *many).shape == (40, hidden.shape[1])
    after = recorder.frame(0).movement
    assert after is not None and after.activation_bytes > 0, "many routes are sorted on the host"


def test_a_watched_layer_has_its_routes_at_once(folder: Path) -> None:
    experts = experts_of(folder)
    room = experts.count * len(experts.layers)
    executor, recorder = hybrid_on(folder, StandInDevice(runs_routes=True), "balanced", room)
    recorder.enabled = True
    executor.run(experts.layers[0], *routes(experts, 2))
    assert sum(executor.popularity.counts(experts.layers[0])) == 2 * K


def test_a_device_lost_while_it_found_experts_itself(folder: Path) -> None:
    experts = experts_of(folder)
    room = experts.count * len(experts.layers)
    device = StandInDevice(runs_routes=True)
    executor, recorder = hybrid_on(folder, device, "balanced", room)
    hidden, indices, weights = routes(experts, 2)
    expected = executor.run(experts.layers[0], hidden, indices, weights)
    device.faults.lost_at = 0
    assert torch.allclose(executor.run(experts.layers[0], hidden, indices, weights), expected)
    assert any("stopped working" in line for line in recorder.take_notices())
    executor.close()
