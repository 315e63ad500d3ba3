"""The NVIDIA device itself. These run where a GPU is at hand; everything around it runs on the stand-in everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.runtimes.torch.offload.cuda_device import CudaDevice, find_gpu, unusable_reason
from engine.runtimes.torch.offload.devices import DeviceLost, OutOfDeviceMemory, ResidentExpert, tensors_in
from engine.runtimes.torch.offload.gates import Activation, FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.local_torch import run_expert
from engine.system import machine
from tests.support.opened_experts import experts_of

needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
SILU = FamilyGate(Activation("silu"), Activation("silu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_device() -> None:
    assert find_gpu() is None
    with pytest.raises((DeviceLost, RuntimeError, AssertionError)):
        CudaDevice()


def test_a_gpu_older_than_torchs_kernels_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert find_gpu() is None
    assert unusable_reason().startswith("it needs compute capability 7.5") and "has 6.1" in unusable_reason()


def test_a_driver_older_than_torchs_libraries_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "_asked_of_driver", lambda *query: "550.54.14\n")
    assert unusable_reason() == "it needs driver 580 or newer for CUDA 13.0, and 550.54.14 is installed"
    monkeypatch.setattr(machine, "_asked_of_driver", lambda *query: "")
    assert unusable_reason() == "see `nvidia-smi`"


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    yield CudaDevice()
    torch.cuda.empty_cache()


class TestCuda:
    pytestmark = needs_gpu

    def test_an_expert_runs_from_its_slot(self, device: CudaDevice, tiny_model: Callable[..., Path]) -> None:
        experts = experts_of(tiny_model("mixtral"))
        host = HostExperts(experts)
        lines = host.lock(device.lock_pages, device.unlock_pages, lambda *_: None)
        slots = device.allocate(host.slot_bytes, 2)
        rows = torch.randn(5, 48)
        there = device.upload(rows)
        out = torch.zeros(3, 5, 48, device=device.torch_device)
        device.begin()
        for number, expert in enumerate((0, 5, 7)):
            ticket = device.copy(slots[number % 2], host.pieces(0, expert))
            device.run([ResidentExpert(slots[number % 2], 0, 5)], host.layout(0), SILU, there, out[number], ticket)
        work = device.end()
        (found,) = device.download(out)
        begun, ended = work.interval()
        assert ended > begun
        for number, expert in enumerate((0, 5, 7)):
            slot = torch.zeros(host.slot_bytes, dtype=torch.uint8)
            for piece in host.pieces(0, expert):
                slot[piece.offset : piece.offset + piece.tensor.nbytes] = piece.tensor
            wanted = run_expert(tensors_in(slot, host.layout(0), torch.float32), SILU, rows)
            torch.testing.assert_close(found[number], wanted, rtol=1e-3, atol=1e-3)
        device.release(slots)
        host.close()
        assert len(lines) <= 1, "locked, or one line that says why not"

    def test_memory_comes_back(self, device: CudaDevice) -> None:
        free, total = device.memory()
        slots = device.allocate(1 << 26, 4)
        assert device.memory()[0] <= free - (1 << 28)
        device.release(slots)
        assert device.memory()[0] >= free - (1 << 22)
        with pytest.raises(OutOfDeviceMemory):
            device.allocate(total, 2)

    def test_a_refused_lock_leaves_the_device_alone(self, device: CudaDevice) -> None:
        assert device.lock_pages(8, 1 << 20) is not None
        assert torch.ones(3, device=device.torch_device).sum().item() == 3.0
