"""A ring's planner rests on what will run: on mlx's GPU, its experts and its waits. Here mlx has a CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from engine.bench import throughput  # noqa: E402
from engine.bench.subject import BenchSubject  # noqa: E402
from engine.bench.throughput import bench_decode  # noqa: E402
from engine.calibration.calibration_file import (  # noqa: E402
    MLX_GPU,
    calibration_key,
    load_speed,
    save_speed,
)
from engine.cluster.membership import measuring_node  # noqa: E402
from engine.cluster.membership.control_messages import WantedFacts  # noqa: E402
from engine.cluster.membership.measuring_node import measure_node  # noqa: E402
from engine.planning.calibration import Curve, ExpertShape  # noqa: E402
from engine.runtimes.mlx import eligible, measuring  # noqa: E402
from engine.runtimes.mlx.measuring import GpuFigures, like, measure_gpu  # noqa: E402
from tests.engine.runtimes.mlx_oracle import load, write_comparable  # noqa: E402

SHAPE = ExpertShape(64, 96, "F32", 3 * 64 * 96 * 4)
FIGURES = GpuFigures(4e11, Curve((1, 64), (2e-5, 9e-5)), 2e-4)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measuring, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    monkeypatch.setattr(measuring_node, "_gpus", {})


def test_figures_are_of_what_runs() -> None:
    # Every look at this clock takes a second: a thing measured takes one, and no more than waiting for nothing does.
    found = measure_gpu(SHAPE, 1 << 22, itertools.count(0.0).__next__)
    assert found.wait_s == 1.0
    assert found.expert is not None and found.expert.tokens == measuring.TOKENS
    assert all(seconds > 0 for seconds in found.expert.seconds)
    assert measure_gpu(None, 1 << 20).expert is None


def test_experts_are_measured_as_a_layer_runs_them_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    run = measuring.SwitchGLU.__call__
    monkeypatch.setattr(
        measuring.SwitchGLU,
        "__call__",
        lambda self, rows, slots: (shapes.append(slots.shape), run(self, rows, slots))[1],
    )
    measure_gpu(SHAPE, 1 << 22)
    assert shapes == [(tokens, measuring.AT_ONCE) for tokens in measuring.TOKENS] * measuring.ROUNDS


def test_more_tokens_never_cost_less() -> None:
    found = measure_gpu(SHAPE, 1 << 22).expert
    assert found is not None and list(found.seconds) == sorted(found.seconds)


@pytest.mark.parametrize(("dtype", "quantised"), [("F32", False), ("BF16", False), ("Q4", True), ("Q8", True)])
def test_experts_are_stored_as_the_models_are(dtype: str, quantised: bool) -> None:
    experts = like(ExpertShape(64, 96, dtype, 1), 3)
    assert ("scales" in experts.down_proj) == quantised
    out = experts(mx.ones((2, 64)), mx.array([[0], [2]]))
    assert out.shape == (2, 1, 64)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[ExpertShape | None]:
    """The shapes that were measured on what is taken for a Mac's GPU."""
    measured: list[ExpertShape | None] = []

    def measure(shape: ExpertShape | None, most_bytes: int) -> GpuFigures:
        assert 0 < most_bytes <= 3 * 10**9
        measured.append(shape)
        return FIGURES

    monkeypatch.setattr(eligible, "working_set_bytes", lambda: 12 * 10**9)
    monkeypatch.setattr(measuring, "measure_gpu", measure)
    return measured


def test_a_node_that_runs_mlx_tells_of_its_gpu(on_a_gpu: list[ExpertShape | None]) -> None:
    save_speed(calibration_key("float32", None, None), 1e10, "native", 3e-6)
    save_speed(calibration_key("float32", None, MLX_GPU), 4e11, "mlx", 5e-5)
    wanted = WantedFacts(shape=SHAPE, dtype="float32", runtime="mlx")
    found = measure_node(wanted)
    assert (found.memory_read, found.expert) == (FIGURES.memory_read, FIGURES.expert)
    assert found.layer_overhead_s == {"mlx": 5e-5}
    on_cpu = measure_node(WantedFacts(shape=SHAPE, dtype="float32", runtime="native"))
    assert found.fence_s == pytest.approx(on_cpu.fence_s + FIGURES.wait_s)
    assert found.central_s == pytest.approx(on_cpu.central_s + 2 * FIGURES.wait_s)
    assert on_cpu.layer_overhead_s == {"native": 3e-6} and on_cpu.memory_read == 1e10
    assert measure_node(wanted).expert == FIGURES.expert and on_a_gpu == [SHAPE], "once"


def test_mlx_on_a_cpu_is_measured_as_a_cpu() -> None:
    assert measuring_node.gpu_figures(WantedFacts(shape=SHAPE, runtime="mlx")) is None


def test_decoding_on_the_gpu_keeps_what_a_layer_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_comparable(tmp_path / "m", "mixtral")
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    model = load(folder, keep_resident=False)
    assert model.facts.device == "gpu"
    monkeypatch.setattr(throughput, "_mlx_rate", lambda: 1e15)
    setting = BenchSubject(
        model=model, facts=model.facts, rounds=1, prefill_chunk=64, threads=1, weight_bytes=1, report=lambda *_: None
    )
    bench_decode(setting, 1)
    kept = load_speed(calibration_key("float32", 1, MLX_GPU))
    assert kept is not None and kept.memory_read == 1e15 and kept.layer_overhead_s["mlx"] > 0
    assert load_speed(calibration_key("float32", 1, None)) is None


@pytest.mark.parametrize(("platform", "machine", "first"), [("darwin", "arm64", "mlx"), ("linux", "x86_64", "native")])
def test_every_runtime_of_a_node_is_offered_its_default_first(
    platform: str, machine: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring_node.sys, "platform", platform)
    monkeypatch.setattr(measuring_node.platform, "machine", lambda: machine)
    found = measuring_node.runtimes()
    assert found[0] == first and set(found) == {"mlx", "native", "torch"}
