"""Benchmarks where a device shares the experts: a stand-in everywhere, a real GPU where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.stand_in_device import StandInDevice
from engine.bench.running import run_bench
from engine.calibration.calibration_file import check_calibration, shape_of
from engine.calibration.expert_cost import calibration_of, measure
from engine.ipc.messages import Bench, ExpertPolicy, Load
from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, gpu_side
from engine.runtimes.torch.runtime import TorchRuntime
from engine.session.session import Session
from tests.support.opened_experts import experts_of


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["balanced", "lru-offload", "stream"])
def test_sharing_experts_is_told_with_the_benchmark(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: ExpertPolicy
) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    folder = tiny_model("mixtral")
    load = Load(id=1, model=str(folder), partitioning="hybrid", policy=policy, cpu_threads=1)
    model = TorchRuntime(find_gpu=lambda: StandInDevice(memory=8 << 30)).load(folder, load, lambda *progress: None)
    session = Session(model, None, ends=(), defaults={})
    request = Bench(id=3, kind="beams", load=load, rounds=1)
    result = run_bench(request, session, folder, lambda *progress: None, lambda: False)
    movement = result.data["movement"]
    assert movement["tokens"] > 0 and movement["hits"] + movement["misses"] > 0
    assert (movement["weight_bytes"] > 0) == (policy == "stream")
    assert result.data["policy"] == policy
    assert any("of the active experts were on the GPU" in note for note in result.notes)
    model.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_gpu_is_measured(tiny_model: Callable[..., Path]) -> None:
    experts = experts_of(tiny_model("mixtral"))
    side, _ = gpu_side(experts, "float32", 2, lambda *progress: None)
    assert side is not None
    cpu = LocalCpuSide(experts, "float32", experts_per_token=2, cpu_threads=None)
    figures = measure(cpu, side, lambda: 1e10, time.perf_counter, budget_s=2.0)
    found = calibration_of(figures, "a machine", shape_of(experts))
    check_calibration(found)
    assert found.gpu is not None and found.weight_copy > 0
    side.close()
