"""The sides that are measured: a model's own experts through the executors' own kernels and devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.stand_in_device import Faults, Speeds, StandInDevice, TimedCpu
from engine.calibration.calibration_file import shape_of
from engine.calibration.expert_cost import calibration_of, measure
from engine.models.formats.model_files import Experts
from engine.runtimes.torch.offload.devices import DeviceError
from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, calls_in_turn, gpu_side, open_gpu_side
from tests.support.opened_experts import experts_of
from tests.support.progress import quiet


@pytest.fixture
def experts(tiny_model: Callable[..., Path]) -> Experts:
    found = experts_of(tiny_model("mixtral"))
    return found


def test_experts_take_turns_so_that_caches_do_not_flatter(experts: Experts) -> None:
    calls = calls_in_turn(experts, 2)
    used = [(layer, expert) for layer, chosen in calls for expert in chosen.tolist()]
    assert sorted(used) == [(layer, expert) for layer in experts.layers for expert in range(experts.count)]
    assert {layer for layer, _ in calls[: len(experts.layers)]} == set(experts.layers)


def test_no_more_experts_than_memory_holds_take_part(experts: Experts) -> None:
    each = experts.nbytes // (experts.count * len(experts.layers))
    assert len(calls_in_turn(experts, 2, limit=6 * each)) == 3
    assert len(calls_in_turn(experts, 2, limit=0)) == 1


def test_a_layer_of_an_odd_number_of_experts_is_used_as_far_as_groups_go(experts: Experts) -> None:
    calls = calls_in_turn(experts, 3)
    assert all(len(set(chosen.tolist())) == 3 and max(chosen.tolist()) < experts.count for _, chosen in calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_runs_every_expert_on_as_many_tokens(experts: Experts, dtype: str) -> None:
    side = LocalCpuSide(experts, dtype, experts_per_token=2, cpu_threads=1)
    assert side.experts_per_call == 2 and side.description.startswith("local")
    for tokens in (1, 7):
        side.cpu = timed = TimedCpu(side.cpu, StandInDevice())
        side.prepare(tokens)
        side.run(tokens)
        assert timed.ran == [tokens, tokens]


def test_a_device_is_measured_as_it_is(experts: Experts) -> None:
    speeds = Speeds(copy_s=4.0, gpu_s=0.5, cpu_s=1.0, activation_s=0.125)
    device = StandInDevice(speeds=speeds)
    cpu = LocalCpuSide(experts, "float32", experts_per_token=1, cpu_threads=1)
    cpu.cpu = TimedCpu(cpu.cpu, device)
    gpu, notices = open_gpu_side(device, experts, "float32", 1, quiet)
    assert notices == [] and gpu.name == "the stand-in"
    figures = measure(cpu, gpu, lambda: 1e9, device.now, budget_s=100.0)
    found = calibration_of(figures, "stand-in", shape_of(experts))
    assert found.weight_copy == pytest.approx(4.0)
    assert found.gpu is not None and found.activation_copy is not None
    assert found.gpu.seconds == pytest.approx([0.5] * len(found.gpu.tokens))
    assert found.activation_copy.seconds == pytest.approx([0.25] * len(found.activation_copy.tokens))
    assert found.cpu.at(1) == pytest.approx(speeds.on_cpu(1))
    # The stand-in's sides do not slow one another.
    assert found.cpu_overlapped == pytest.approx(1.0) and found.copy_overlapped == pytest.approx(1.0)
    gpu.close()
    assert device.buffers == {} and device.locked == {}


def test_what_the_device_runs_is_the_expert_that_was_copied(experts: Experts) -> None:
    device = StandInDevice()
    gpu, _ = open_gpu_side(device, experts, "float32", 1, quiet)
    gpu.run(3)
    rows, out = gpu.rows(3)
    cpu = LocalCpuSide(experts, "float32", experts_per_token=1, cpu_threads=1).cpu
    expected = cpu.outputs(experts.layers[0], rows, torch.zeros(3, 1, dtype=torch.int32))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_refused_page_locks_are_said_and_measured_without(experts: Experts) -> None:
    device = StandInDevice(faults=Faults(page_locks="operation not supported"))
    gpu, notices = open_gpu_side(device, experts, "float32", 1, quiet)
    assert len(notices) == 1 and "operation not supported" in notices[0]
    gpu.copy()


@pytest.mark.parametrize(
    "device", [StandInDevice(memory=10), StandInDevice(faults=Faults(lost_at=3))], ids=["full", "lost"]
)
def test_a_device_without_room_or_life_is_an_error_and_leaves_nothing_locked(
    experts: Experts, device: StandInDevice
) -> None:
    with pytest.raises(DeviceError):
        open_gpu_side(device, experts, "float32", 1, quiet)
    assert device.locked == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(experts: Experts) -> None:
    side, notices = gpu_side(experts, "float32", 1, quiet)
    assert side is None
    assert notices == ["No GPU that torch can use was found: only the CPU was measured."]
