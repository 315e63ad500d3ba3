"""Whether a model goes onto the GPU where nobody chose: by measurements, which are made where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.stand_in_device import Faults, Speeds, StandInDevice, calibration_of
from engine.calibration.calibration_file import calibration_key, load_calibration, save_calibration, shape_of
from engine.errors import Cancelled
from engine.ipc.messages import Load, Plan
from engine.runtimes.torch.offload import cuda_device
from engine.session import gpu_choice, plan_model
from engine.session.gpu_choice import settle_gpu
from engine.session.loading import load_session
from engine.system.machine import Gpu
from tests.support.opened_experts import experts_of

GIB = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral")


def give_gpu(monkeypatch: pytest.MonkeyPatch, free: int = 6 * GIB) -> StandInDevice:
    """This machine seems to have a graphics card, on which experts are measured by the stand-in."""
    card = Gpu(StandInDevice.name, 8 * GIB, free)
    device = StandInDevice(8 * GIB)
    monkeypatch.setattr(gpu_choice.runtimes, "gpu_present", lambda: True)
    monkeypatch.setattr(gpu_choice, "gpu", lambda: card)
    monkeypatch.setattr(plan_model, "gpu", lambda: card)
    monkeypatch.setattr(cuda_device, "find_gpu", lambda: device)
    monkeypatch.setattr(gpu_choice, "BUDGET_S", 0.5)
    return device


def ask_for(folder: Path, **choices: Any) -> Load:
    return Load(id=1, model=str(folder), cpu_threads=1, **choices)


def keep(folder: Path, speeds: Speeds, operation_s: float = 1e-9) -> None:
    experts = experts_of(folder)
    shape = shape_of(experts)
    found = calibration_of(speeds, shape.expert_bytes)
    key = calibration_key("float32", 1, StandInDevice.name)
    save_calibration(msgspec.structs.replace(found, machine=key, shape=shape, gpu_operation_s=operation_s))


def settled(folder: Path, **choices: Any) -> tuple[str, list[str]]:
    request, lines = settle_gpu(ask_for(folder, **choices), folder, None, lambda *_: None)
    return request.partitioning, lines


SLOW = Speeds(cpu_s=1e-6, gpu_s=1.0, copy_s=1.0)
FAST = Speeds(cpu_s=1.0, gpu_s=1e-6, copy_s=1e-6)


def test_the_faster_one_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu(monkeypatch)
    keep(folder, FAST)
    assert settled(folder) == ("auto", [])
    keep(folder, SLOW)
    partitioning, (line,) = settled(folder)
    assert partitioning == "cpu"
    assert line.startswith("Everything runs on the CPU: the CPU alone is predicted to be faster: ")
    # Each of its layers is begun in a hundred steps, whatever the experts take.
    keep(folder, FAST, operation_s=1.0)
    assert settled(folder)[0] == "cpu"


def test_without_the_gpu_the_native_runtime_runs_the_model_and_the_preview_says_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch)
    keep(folder, SLOW)
    preview = plan_model.plan_model(Plan(id=1, load=ask_for(folder)))
    session = load_session(ask_for(folder), lambda *_: None)
    assert session.facts.runtime == "native"
    assert any("CPU alone is predicted to be faster" in line for line in session.facts.notices)
    assert [choice.choice for choice in preview.choices if choice.what == "runtime"] == ["native"]
    assert [memory.device for memory in preview.memory] == ["CPU"]
    session.close()


def test_what_was_never_measured_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = give_gpu(monkeypatch)
    said: list[str] = []
    request, _ = settle_gpu(ask_for(folder), folder, None, lambda stage, *_: said.append(stage))
    assert any(stage.startswith("measuring") for stage in said)
    assert device.buffers == {} and device.locked == {}
    experts = experts_of(folder)
    kept = load_calibration(shape_of(experts), calibration_key("float32", 1, StandInDevice.name))
    assert kept is not None and kept.gpu is not None
    said.clear()
    ran = len(device.trace)
    again, _ = settle_gpu(ask_for(folder), folder, None, lambda stage, *_: said.append(stage))
    assert again == request and said == [] and len(device.trace) == ran


def test_measuring_ends_when_it_is_cancelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = give_gpu(monkeypatch)

    def cancel(stage: str, *_: object) -> None:
        if stage.startswith("measuring"):
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        settle_gpu(ask_for(folder), folder, None, cancel)
    assert device.buffers == {} and device.locked == {}


def test_a_gpu_that_cannot_be_measured_is_used_and_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu(monkeypatch)
    monkeypatch.setattr(cuda_device, "find_gpu", lambda: StandInDevice(memory=10))
    partitioning, (line,) = settled(folder)
    assert partitioning == "auto" and "could not be measured" in line


def test_a_gpu_that_is_full_or_lost_while_it_is_measured_does_not_end_the_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch)
    full = StandInDevice(8 * GIB, faults=Faults(runs_without_room={3}))
    monkeypatch.setattr(cuda_device, "find_gpu", lambda: full)
    partitioning, (line,) = settled(folder)
    assert partitioning == "auto" and "could not be measured" in line
    assert full.buffers == {} and full.locked == {}
    lost = StandInDevice(8 * GIB, faults=Faults(lost_at=40))
    monkeypatch.setattr(cuda_device, "find_gpu", lambda: lost)
    partitioning, (line,) = settled(folder)
    assert partitioning == "cpu" and "stopped working while it was measured" in line
    assert lost.locked == {}


def test_a_gpu_that_torch_cannot_use_leaves_the_model_to_the_cpus_runtime(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch)
    monkeypatch.setattr(cuda_device, "find_gpu", lambda: None)
    partitioning, (line,) = settled(folder)
    assert partitioning == "cpu" and line.startswith("torch cannot use the stand-in")


def test_a_gpu_that_the_driver_does_not_list_is_left_to_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = give_gpu(monkeypatch)
    monkeypatch.setattr(gpu_choice, "gpu", lambda: None)
    assert settled(folder) == ("auto", []) and device.trace == []


def test_figures_of_other_kernels_are_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = give_gpu(monkeypatch)
    keep(folder, SLOW, operation_s=0.0)
    settled(folder)
    assert device.trace


def test_a_gpu_with_two_names_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = give_gpu(monkeypatch)
    other = Gpu("NVIDIA the stand-in", 8 * GIB, 6 * GIB)
    monkeypatch.setattr(gpu_choice, "gpu", lambda: other)
    monkeypatch.setattr(plan_model, "gpu", lambda: other)
    settled(folder)
    ran = len(device.trace)
    settled(folder)
    assert len(device.trace) == ran


@pytest.mark.parametrize(
    "choices", [{"partitioning": "hybrid"}, {"partitioning": "cpu"}, {"gpu_expert_bytes": 1000}, {"runtime": "native"}]
)
def test_a_persons_choice_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]) -> None:
    device = give_gpu(monkeypatch)
    keep(folder, SLOW)
    request, lines = settle_gpu(ask_for(folder, **choices), folder, None, lambda *_: None)
    assert request == ask_for(folder, **choices) and lines == [] and device.trace == []


def test_without_room_on_the_gpu_the_cpu_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu(monkeypatch, free=1000)
    keep(folder, FAST)
    partitioning, (line,) = settled(folder)
    assert partitioning == "cpu" and "lacks" in line


def test_a_dense_model_has_nothing_to_measure(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device = give_gpu(monkeypatch)
    assert settled(tiny_model("llama")) == ("auto", [])
    assert device.trace == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_asked(folder: Path) -> None:
    assert settled(folder) == ("auto", [])
