"""What ``bench experts`` counts: prompts, and the beginnings of their answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.bench import experts as bench_experts
from engine.bench.experts import ANSWER_TOKENS, BUDGET_S, calibration_prompts, count_routes
from engine.bench.subject import BenchSubject
from engine.errors import Cancelled
from engine.ipc.messages import Load
from engine.runtimes.protocol import LoadedModel
from engine.runtimes.torch.runtime import TorchRuntime


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
