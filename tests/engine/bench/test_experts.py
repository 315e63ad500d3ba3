"""Pieces of the benchmarks: figures, the streaming rate, this machine's name, the calibration prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import process_life
from engine.bench import experts as bench_experts
from engine.bench.experts import ANSWER_TOKENS, BUDGET_S, calibration_prompts, count_routes
from engine.bench.subject import BenchSubject
from engine.calibration.memory_rate import StreamingRead
from engine.calibration.samples import Spread, figure, milliseconds, per_second
from engine.errors import Cancelled
from engine.ipc.messages import Load
from engine.runtimes.protocol import LoadedModel
from engine.runtimes.torch.runtime import TorchRuntime
from engine.system.machine import Gpu, driver_problem, gpu, parse_gpus, processor


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (-12.34, "-12.3"), (0, "0.000")],
)
def test_figures_have_three_digits_that_mean_something(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_spread_is_a_median_and_its_range() -> None:
    assert str(milliseconds([0.010, 0.012, 0.011])) == "11.0 (10.0–12.0)"
    assert per_second([0.5, 0.25], 1.0) == Spread(median=1 / 0.375, low=2.0, high=4.0)
    assert per_second([0.0], 1.0).median == 0.0
    with pytest.raises(ValueError, match="no value"):
        Spread.of([])


def test_the_streaming_rate_is_that_of_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibration.memory_rate.available_bytes", lambda: 0)
    monkeypatch.setattr("engine.calibration.memory_rate.native_pool", lambda threads: None)
    times = iter([0.0, 9.0, 9.0, 18.0, 0.0, 4.0, 4.0, 6.0])
    read = StreamingRead(threads=3, clock=lambda: next(times))
    assert read.rate() == pytest.approx(64 * 2**20 / 2.0, rel=0.01)


def test_the_streaming_rate_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.calibration.memory_rate.available_bytes", lambda: 0)
    assert StreamingRead(threads=2).rate() > 1e6


SMI = "NVIDIA H200, 143771, 140000\nTesla, with a comma, 16384, 12\n"


@pytest.mark.parametrize(
    ("text", "visible", "found"),
    [
        (SMI, None, Gpu("NVIDIA H200", 143771 << 20, 140000 << 20)),
        (SMI, "1", Gpu("Tesla, with a comma", 16384 << 20, 12 << 20)),
        (SMI, "GPU-1234", Gpu("NVIDIA H200", 143771 << 20, 140000 << 20)),
        (SMI, "7", None),
        ("NVIDIA H200 MIG, [N/A], [Insufficient Permissions]\n", None, None),
        ("No devices were found\n", None, None),
        ("", None, None),
    ],
)
def test_what_the_drivers_program_tells(text: str, visible: str | None, found: Gpu | None) -> None:
    assert parse_gpus(text, visible) == found


def test_a_gpu_that_is_hidden_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'A card, 100, 50'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu() == Gpu("A card", 100 << 20, 50 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    assert gpu() is None


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        ("13.0", "550.54.14", "it needs driver 580 or newer for CUDA 13.0, and 550.54.14 is installed"),
        ("12.8", "470.256.02", "it needs driver 525 or newer for CUDA 12.8, and 470.256.02 is installed"),
        ("13.0", "580.65.06", ""),
        ("12.8", "550.54.14", ""),
        ("99.0", "550.54.14", ""),
        ("13.0", "[N/A]", ""),
        ("13.0", "", ""),
        (None, "550.54.14", ""),
    ],
)
def test_a_driver_that_is_too_old_is_named(cuda: str | None, driver: str, said: str) -> None:
    assert driver_problem(cuda, driver) == said


def test_the_driver_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && printf "570.1\\n570.1\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert driver_problem("13.0") == "it needs driver 580 or newer for CUDA 13.0, and 570.1 is installed"


def test_the_processor_has_a_name() -> None:
    assert processor().strip() == processor() != ""


def test_the_calibration_prompts_are_of_different_kinds() -> None:
    prompts = calibration_prompts()
    assert len(prompts) == len(set(prompts)) == 12
    assert all(40 < len(prompt) < 600 for prompt in prompts)


def letters(prompt: str) -> list[int]:
    """A tokenizer for tiny models: every letter a token."""
    return [3 + ord(letter) % 150 for letter in prompt]


class Clock:
    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> LoadedModel:
    load = Load(id=1, model="tiny", partitioning="cpu")
    return TorchRuntime().load(tiny_model("mixtral"), load, lambda *progress: None)


def subject_of(model: LoadedModel, clock: Clock, cancelled: Callable[[], bool] = lambda: False) -> BenchSubject:
    def report(stage: str, done: int, total: int, unit: str) -> None:
        if cancelled():
            raise Cancelled("Stopped.")

    return BenchSubject(model, model.facts, 1, 512, 1, 1, report, cancelled, clock)


def test_prompts_and_the_beginnings_of_their_answers_are_counted(model: LoadedModel) -> None:
    assert model.popularity is not None
    rows = model.start()
    rows.extend([5, 6, 7])  # somebody's conversation before: not counted
    prompts = ["abc", "", "defgh"]
    counts, done = count_routes(subject_of(model, Clock()), model.popularity, letters, prompts)
    # All of a prompt but its last token is read; that one begins the answer.
    routes = 2 * sum(len(prompt) - 1 + ANSWER_TOKENS for prompt in prompts if prompt)
    assert done == 3
    *layers, last = [sum(row) for row in counts.values()]
    assert layers == [routes] * len(layers)
    # The last layer need not run what no logits are asked of.
    assert 2 * 2 * ANSWER_TOKENS <= last <= routes


def test_no_prompt_is_begun_after_the_time_is_up(model: LoadedModel) -> None:
    assert model.popularity is not None
    subject = subject_of(model, Clock(step=BUDGET_S * 0.6))
    _, done = count_routes(subject, model.popularity, letters, ["abc"] * 5)
    assert 0 < done < 5


def test_counting_can_be_stopped(model: LoadedModel) -> None:
    assert model.popularity is not None
    with pytest.raises(Cancelled):
        count_routes(subject_of(model, Clock(), lambda: True), model.popularity, letters, ["abc"])


def test_measuring_the_memory_leaves_no_thread_busy() -> None:
    """In the engine's process: what is measured next has the cores for itself."""
    program = (
        "import time; from engine.calibration.memory_rate import StreamingRead\n"
        "StreamingRead(2, nbytes=1 << 26).rate()\n"
        "begun = time.process_time(); time.sleep(0.2); print(time.process_time() - begun)"
    )
    settings = {**os.environ, **process_life.environment(2)}
    said = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=True)
    assert float(said.stdout) < 0.05, "numpy's threads took 0.1 s of the processor after the product"


@pytest.mark.parametrize(("step_s", "most", "wanted"), [(0.06, 12, 2), (10.0, 12, 0), (0.001, 12, 11), (0.001, 2, 1)])
def test_a_step_counts_once_its_experts_were_read(
    monkeypatch: pytest.MonkeyPatch, step_s: float, most: int, wanted: int
) -> None:
    """Steps are repeated for a second and a half, or as often as the context allows; the last batch counts."""
    now, batches = [0.0], [0]

    def steps(subject: Any, rows: Any, count: int, seed: int) -> list[float]:
        now[0] += (count + 2) * step_s
        batches[0] += 1
        return [float(batches[0] - 1)] * count

    monkeypatch.setattr(bench_experts, "steps", steps)
    subject: Any = SimpleNamespace(clock=lambda: now[0])
    assert bench_experts._settled_step(subject, SimpleNamespace(), most) == wanted  # type: ignore[arg-type]
