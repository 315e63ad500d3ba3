"""What goes wrong beside the CPU: each time the same tokens, and one line that says what happened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.stand_in_device import Faults, Speeds, StandInDevice, TimedCpu, calibration_of
from engine.calibration.calibration_file import calibration_key, save_calibration, shape_of
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Load
from engine.planning.calibration import Calibration
from engine.planning.hybrid import GPU_RUNTIME_BYTES
from engine.residency import resident_model
from engine.residency.mapped import MappedWeights
from engine.residency.resident_model import ResidentModel
from engine.runtimes.torch import gpu_memory_plan as sharing
from engine.runtimes.torch.cache import KeyValueCache
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload import device_cache, device_check, device_side, hybrid
from engine.runtimes.torch.offload.devices import DeviceLost
from engine.runtimes.torch.runtime import TorchRuntime
from engine.session.session import Session
from engine.system.free_memory import RESERVE_BYTES
from tests.engine.runtimes.torch.offload.test_hybrid_models import MEMORY, PROMPT, executor_of, greedy, load, same
from tests.support.opened_experts import experts_of

pytestmark = pytest.mark.usefixtures("home")


ONE_EXPERT = 3 * 48 * 56 * 4


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral")


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVATELLM_HOME", str(tmp_path_factory.mktemp("home")))
        return greedy(load(folder, StandInDevice(MEMORY)))


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts share an allocation, as with experts of real size."""
    monkeypatch.setattr(device_cache, "GROUP_BYTES", 2 * ONE_EXPERT)


def time_the_cpu(device: StandInDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's experts take the virtual time that the device's speeds say."""
    make = sharing.make_cpu_backend

    def timed(*arguments: object) -> object:
        cpu, notices = make(*arguments)
        return TimedCpu(cpu, device), notices

    monkeypatch.setattr(sharing, "make_cpu_backend", timed)


def said(model: TorchModel) -> list[str]:
    return model.recorder.take_notices()


def calibrated(folder: Path, speeds: Speeds) -> Calibration:
    """Let the machine be measured with these speeds, true or not."""
    experts = experts_of(folder)
    shape = shape_of(experts)
    measured = calibration_of(speeds, shape.expert_bytes)
    key = calibration_key("float32", 1, StandInDevice.name)
    calibration = Calibration(
        **{name: getattr(measured, name) for name in measured.__struct_fields__} | {"machine": key, "shape": shape}
    )
    save_calibration(calibration)
    return calibration


def test_memory_taken_before_loading_makes_a_smaller_cache(folder: Path, expected: list[np.ndarray]) -> None:
    device = StandInDevice(MEMORY)
    taken = MEMORY - GPU_RUNTIME_BYTES - 10 * ONE_EXPERT

    def grab_after_the_plan(stage: str, done: int, total: int, unit: str) -> None:
        if stage == "page-locking the experts":
            device.taken_by_others = taken + GPU_RUNTIME_BYTES

    request = Load(id=1, model="mixtral", cpu_threads=1, gpu_expert_bytes=20 * ONE_EXPERT)
    model = TorchRuntime(lambda: device).load(folder, request, grab_after_the_plan)
    assert 0 < model.facts.gpu_expert_bytes < 20 * ONE_EXPERT
    (line,) = [notice for notice in model.facts.notices if "Another program holds GPU memory" in notice]
    assert "could be had for experts" in line
    assert same(greedy(model), expected)


@pytest.mark.soak
def test_memory_taken_while_running_shrinks_the_cache_and_it_grows_again(
    folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, small_groups: None
) -> None:
    monkeypatch.setattr(device_cache, "GROW_EVERY", 4)
    device = StandInDevice(MEMORY)
    model = load(folder, device)
    full = executor_of(model).gpu_expert_bytes
    device.taken_by_others = MEMORY - GPU_RUNTIME_BYTES // 2 - full // 2
    assert same(greedy(model), expected)
    assert 0 < executor_of(model).gpu_expert_bytes <= full // 2
    (line,) = said(model)
    assert line.startswith("GPU memory is short: the cache of experts shrank to")
    device.taken_by_others = 0
    for _ in range(4):
        assert same(greedy(model), expected)
    assert executor_of(model).gpu_expert_bytes == full
    assert sum(buffer.nbytes for buffer in device.buffers.values()) > full


def test_no_room_to_compute_runs_on_the_cpu(folder: Path, expected: list[np.ndarray], small_groups: None) -> None:
    device = StandInDevice(MEMORY)
    model = load(folder, device)
    device.faults.runs_without_room = {device._counts["run"] + number for number in (1, 2, 7)}
    full = executor_of(model).cache.capacity
    assert same(greedy(model), expected)
    assert executor_of(model).cache.capacity < full
    assert any("GPU memory is short" in line for line in said(model))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["refused", "damaged"])
@pytest.mark.parametrize("policy", ["balanced", "stream", "lru-offload"])
def test_a_failed_copy_runs_on_the_cpu(folder: Path, expected: list[np.ndarray], kind: str, policy: str) -> None:
    faults = Faults()
    device = StandInDevice(MEMORY, speeds=Speeds(copy_s=0.01), faults=faults)
    calibrated(folder, Speeds(copy_s=0.01))
    model = load(folder, device, policy=policy, gpu_expert_bytes=3 * ONE_EXPERT)
    wrong = {seen + device._counts["copy"] for seen in (1, 2, 5, 9)}
    (faults.copies_refused if kind == "refused" else faults.copies_damaged).update(wrong)
    assert same(greedy(model), expected)
    lines = said(model)
    assert lines
    assert all("runs on the CPU this time" in line and "a fault to order" in line for line in lines)


def test_copies_that_always_fail_are_told_a_few_times(folder: Path, expected: list[np.ndarray]) -> None:
    device = StandInDevice(MEMORY, faults=Faults(copies_refused=set(range(1, 10_000))))
    model = load(folder, device, policy="lru-offload")
    assert len(executor_of(model).cache) == 0
    assert same(greedy(model), expected)
    lines = said(model)
    assert len(lines) == device_side.FAILED_COPIES_TOLD
    assert lines[-1].endswith("more of these are not told.")


def test_refused_page_locks_are_said_and_change_nothing(folder: Path, expected: list[np.ndarray]) -> None:
    device = StandInDevice(MEMORY, faults=Faults(page_locks="operation not supported"))
    model = load(folder, device, gpu_expert_bytes=3 * ONE_EXPERT)
    (line,) = [notice for notice in model.facts.notices if "Page-locking was refused" in notice]
    assert "operation not supported" in line
    assert same(greedy(model), expected)
    locked = load(folder, other := StandInDevice(MEMORY), gpu_expert_bytes=3 * ONE_EXPERT)
    assert sum(other.locked.values()) >= locked.facts.expert_bytes
    locked.close()
    assert other.locked == {} and other.buffers == {}


def test_the_warmer_is_told_which_experts_the_gpu_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, StandInDevice(MEMORY), gpu_expert_bytes=3 * ONE_EXPERT)
    assert sum(map(len, model.experts_on_gpu.values())) == len(executor_of(model).cache) > 0
    told: list[object] = []

    def mapped(*given: object) -> MappedWeights:
        told.append(given[-1])
        return MappedWeights(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(resident_model, "MappedWeights", mapped)
    ResidentModel(model, folder, Load(id=1, model="m")).close()
    assert told == [model.experts_on_gpu]
    assert load(folder, None).experts_on_gpu == {}


def test_no_pages_are_locked_if_every_expert_is_on_the_gpu(folder: Path, expected: list[np.ndarray]) -> None:
    device = StandInDevice(MEMORY, faults=Faults(page_locks="operation not supported"))
    model = load(folder, device)
    assert executor_of(model).gpu_expert_bytes >= model.facts.expert_bytes
    assert device.locked == {} and not any("Page-locking" in notice for notice in model.facts.notices)
    assert same(greedy(model), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("after", [1, 2, 3, 10, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])
def test_a_device_lost_mid_answer_leaves_the_cpu(folder: Path, expected: list[np.ndarray], after: int) -> None:
    device = StandInDevice(MEMORY)
    model = load(folder, device, gpu_expert_bytes=10 * ONE_EXPERT)
    model.recorder.enabled = after % 2 == 0
    device.faults.lost_at = after
    assert same(greedy(model), expected)
    (line,) = said(model)
    assert "stopped working (a fault to order): all experts run on the CPU from now on." in line
    assert "GPU is lost" in executor_of(model).description
    assert model.recorder.frame(0).movement is not None
    assert same(greedy(model), expected)
    assert said(model) == []
    model.close()


def test_a_lost_device_with_the_trunk_on_it_ends_the_answer(folder: Path) -> None:
    device = StandInDevice(MEMORY, holds_trunk=True)
    model = load(folder, device)
    device.faults.lost_at = 30
    with pytest.raises(ModelError, match=r"stopped working .*, and the model's trunk is on it; load the model again"):
        greedy(model)
    model.close()


def test_a_device_lost_while_loading_is_one_sentence(folder: Path) -> None:
    device = StandInDevice(MEMORY, faults=Faults(lost_at=4))
    with pytest.raises(ModelError, match="stopped working while experts were copied to it"):
        load(folder, device)


def test_the_trunk_gets_the_experts_memory(
    folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, small_groups: None
) -> None:
    model = load(folder, StandInDevice(MEMORY))
    full = executor_of(model).cache.capacity
    forward, refusals = model._forward, iter(["first", "second"])

    def short(*arguments: object) -> object:
        if next(refusals, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*arguments)

    monkeypatch.setattr(model, "_forward", short)
    assert same(greedy(model), expected)
    assert executor_of(model).cache.capacity == full // 4
    assert any("GPU memory is short" in line for line in said(model))
    monkeypatch.setattr(model, "_forward", forward)
    assert same(greedy(model), expected)


def test_beams_get_the_experts_memory(
    folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, small_groups: None
) -> None:
    model = load(folder, StandInDevice(MEMORY, holds_trunk=True))
    full = executor_of(model).cache.capacity
    session = Session(model, None, ends=(), defaults={})
    free = executor_of(model)._device.memory()[0]
    assert session._memory() == free + full * ONE_EXPERT - RESERVE_BYTES
    rows = model.start()
    rows.extend(PROMPT)
    copied, refusals = KeyValueCache.rows_copied, iter(["first", "second", "third"])

    def short(*arguments: object) -> object:
        if next(refusals, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copied(*arguments)

    monkeypatch.setattr(KeyValueCache, "rows_copied", short)
    assert rows.fan_out(3).length == rows.length
    assert 0 < executor_of(model).cache.capacity <= full // 8
    assert any("GPU memory is short" in line for line in said(model))
    monkeypatch.setattr(KeyValueCache, "rows_copied", copied)
    assert same(greedy(model), expected)
    # On a device beside the trunk, keys and values are in the host's memory.
    assert load(folder, StandInDevice(MEMORY)).memory_for_rows() is None


@pytest.mark.parametrize("policy", ["lru-offload", "balanced"])
def test_no_room_for_activations_makes_room_and_runs_again(
    folder: Path, expected: list[np.ndarray], small_groups: None, policy: str
) -> None:
    # Copies are under way when it happens: what they were bringing must not be taken for being there.
    device = StandInDevice(MEMORY)
    model = load(folder, device, policy=policy, gpu_expert_bytes=15 * ONE_EXPERT)
    device.faults.uploads_without_room = {device._counts["upload"] + number for number in (1, 9)}
    assert same(greedy(model), expected)
    assert 0 < executor_of(model).cache.capacity < 15
    assert any("GPU memory is short" in line for line in said(model))


def test_memory_that_nothing_can_free_ends_in_the_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, StandInDevice(MEMORY))

    def never(*arguments: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "_forward", never)
    with pytest.raises(torch.OutOfMemoryError):
        greedy(model)
    assert executor_of(model).cache.capacity == 0


def test_a_file_that_changed_is_noticed_though_experts_are_on_the_device(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("mixtral", seed=5)
    model = load(folder, StandInDevice(MEMORY))
    greedy(model)
    file = folder / "model.safetensors"
    os.utime(file, ns=(1, 1))
    with pytest.raises(ModelError, match="was changed while the model was open"):
        model.start()


def test_a_slow_device_switches_the_cache_off_and_says_so_once(
    folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "WORTH_EVERY", 1)
    # Measured as fast, it is slow: 50 s an expert, where the CPU takes one.
    calibrated(folder, Speeds(gpu_s=0.1))
    device = StandInDevice(MEMORY, speeds=Speeds(gpu_s=50.0))
    time_the_cpu(device, monkeypatch)
    model = load(folder, device)
    executor_of(model)._worth.window = 12
    assert executor_of(model).gpu_expert_bytes > 0
    for _ in range(3):
        assert same(greedy(model), expected)
    assert executor_of(model).gpu_expert_bytes == 0
    assert model.recorder.frame(0).resident == [[], [], []]
    (line,) = said(model)
    assert "is switched off: layers took" in line
    taken_off = device.clock.seconds
    greedy(model)
    assert device.clock.seconds - taken_off < 50.0 * 3


def test_a_good_cache_stays(folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "WORTH_EVERY", 1)
    # The prediction is wrong the other way round: it promises too much of doing without.
    calibrated(folder, Speeds(cpu_s=0.001))
    device = StandInDevice(MEMORY, speeds=Speeds(cpu_s=3.0))
    time_the_cpu(device, monkeypatch)
    model = load(folder, device, policy="twiddler", partitioning="hybrid")
    executor_of(model)._judged = True
    executor_of(model)._worth.window = 12
    for _ in range(3):
        assert same(greedy(model), expected)
    assert executor_of(model)._worth.state == "decided"
    assert executor_of(model).gpu_expert_bytes > 0
    assert said(model) == []


def test_seeds_that_do_not_arrive_are_said(folder: Path, expected: list[np.ndarray]) -> None:
    device = StandInDevice(MEMORY, faults=Faults(copies_refused={2, 5}))
    model = load(folder, device, policy="twiddler")
    assert len(executor_of(model).cache) == executor_of(model).cache.capacity - 2
    (line,) = [notice for notice in model.facts.notices if notice.startswith("Copying 2 of 24 experts to")]
    assert "(a fault to order); they run on the CPU" in line
    assert same(greedy(model), expected)


def test_a_gpu_that_cannot_be_used_is_said_and_the_cpu_answers(
    folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> StandInDevice:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    lost = StandInDevice(MEMORY)
    monkeypatch.setattr(lost, "memory", gone)
    for find in (gone, lambda: lost):
        model = TorchRuntime(find).load(folder, Load(id=1, model="mixtral", cpu_threads=1), lambda *_: None)
        assert model.facts.policy is None
        (line,) = [notice for notice in model.facts.notices if notice.startswith("The GPU cannot be used (")]
        assert "so everything runs on the CPU; leave privatellm and start it again" in line
        assert [int(x.argmax()) for x in greedy(model)] == [int(x.argmax()) for x in expected]
    # The driver is there, and torch does not see it.
    monkeypatch.setattr(sharing, "gpu_present", lambda: True)
    assert any("but torch cannot use it" in notice for notice in load(folder, None).facts.notices)
    assert load(folder, None, partitioning="cpu").facts.notices == []


@pytest.mark.parametrize("finds_experts", [False, True])
def test_a_copy_that_arrived_damaged_is_found_when_the_model_is_loaded(
    folder: Path, expected: list[np.ndarray], finds_experts: bool
) -> None:
    device = StandInDevice(MEMORY, faults=Faults(copies_altered={2, 11}), runs_routes=finds_experts)
    model = load(folder, device)
    (line,) = [line for line in model.facts.notices if "damaged" in line]
    assert line == "2 experts had arrived damaged on the stand-in and were copied again."
    assert same(greedy(model), expected)
    assert executor_of(model).cache.capacity > 0


def test_a_device_that_computes_something_else_runs_nothing(folder: Path, expected: list[np.ndarray]) -> None:
    device = StandInDevice(MEMORY, faults=Faults(copies_altered=set(range(1, 1000))))
    model = load(folder, device)
    (line,) = [line for line in model.facts.notices if "is not what the CPU does" in line]
    assert line.startswith("What the stand-in computes for expert 0 of layer 0 and ")
    assert device.buffers == {} and device.locked == {}
    ran = device._counts["run"]
    assert same(greedy(model), expected)
    assert device._counts["run"] == ran
    assert "the GPU's results differ" in executor_of(model).description
    assert executor_of(model).gpu_expert_bytes == 0
    with pytest.raises(ModelError, match="gets no experts, because its results differ"):
        model.resize_experts(None)
    model.close()
    assert device.buffers == {}


def test_without_room_to_compare_or_in_little_memory_nothing_is_compared(
    folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = StandInDevice(MEMORY, faults=Faults(runs_without_room={1}))
    model = load(folder, full)
    assert not any("not what the CPU" in line for line in model.facts.notices)
    monkeypatch.setattr(device_check, "available_bytes", lambda: 1000)
    device = StandInDevice(MEMORY)
    model = load(folder, device)
    assert device._counts["run"] == 0
    assert same(greedy(model), expected)


@pytest.mark.parametrize("stage", ["page-locking", "copying experts", "comparing"])
def test_loading_that_is_cancelled_leaves_nothing_on_the_device(folder: Path, stage: str) -> None:
    device = StandInDevice(MEMORY)

    def cancel(text: str, *_: object) -> None:
        if text.startswith(stage):
            raise Cancelled("stopped")

    request = Load(id=1, model="mixtral", cpu_threads=1, gpu_expert_bytes=3 * ONE_EXPERT)
    with pytest.raises(Cancelled):
        TorchRuntime(lambda: device).load(folder, request, cancel)
    assert device.buffers == {} and device.locked == {}
