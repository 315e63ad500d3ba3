"""Plan and Bench through a real engine process, and what the engine learns of a model's use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.ipc.messages import (
    Bench,
    BenchKind,
    BenchResult,
    Cancel,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Notice,
    Piece,
    Plan,
    Planned,
    Progress,
    Shutdown,
    WarmUp,
)
from engine.moe.kernels.pool import usable_cpus
from tests.engine.engine_process import EngineProcess
from tests.support.hooked_engine import hooked, measures_little
from tests.support.tiny_models import write_tiny_model

PROMPT = [5, 17, 101, 42, 9, 77, 30]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dense") / "dense", "llama")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[EngineProcess]:
    with EngineProcess(home, hooked(measures_little)) as process:
        yield process


def load_of(folder: Path, **choices: Any) -> Load:
    return Load(id=0, model=str(folder), partitioning="cpu", cpu_threads=1, **choices)


def result_of(events: list[Any]) -> BenchResult:
    *progress, last = events
    assert isinstance(last, BenchResult), last
    assert progress and all(isinstance(event, Progress) for event in progress)
    assert all(len(row) == len(last.columns) for row in last.rows)
    assert last.notes and last.data["model"] == "tiny"
    return last


def positive(seconds: list[float], rounds: int) -> bool:
    return len(seconds) == rounds and all(value > 0 for value in seconds)


def test_a_plan_loads_nothing(engine: EngineProcess, model: Path) -> None:
    (planned,) = engine.ask(Plan(id=1, load=load_of(model, context_limit=100)))
    assert isinstance(planned, Planned) and planned.fits and planned.shortfall == 0
    assert (planned.model, planned.family) == ("tiny", "mixtral")
    (cpu,) = planned.memory
    assert cpu.device == "CPU" and cpu.total > 0 and cpu.trunk > 0 and cpu.experts > 0
    assert planned.tokens_per_s is None and "privatellm bench experts" in planned.basis
    assert {"runtime", "numbers", "context"} <= {choice.what for choice in planned.choices}
    (failed,) = engine.ask(Generate(id=2, prompt_ids=PROMPT))
    assert isinstance(failed, Failed) and "No model is loaded" in failed.error


def test_keys_and_values_follow_the_context(engine: EngineProcess, model: Path) -> None:
    sizes = {}
    for number, context in ((3, 100), (4, 300)):
        (planned,) = engine.ask(Plan(id=number, load=load_of(model, context_limit=context)))
        assert isinstance(planned, Planned)
        sizes[context] = planned.memory[0].key_values
    assert sizes[300] == 3 * sizes[100] > 0


def test_a_plan_answers_while_an_answer_runs(engine: EngineProcess, model: Path) -> None:
    assert isinstance(engine.ask(load_of(model))[-1], Loaded)
    engine.send(Generate(id=10, prompt_ids=PROMPT))
    events = engine.events(10)
    assert any(isinstance(event, Piece) for event in events)
    # The answer has no end of its own: whatever comes now comes beside it.
    assert isinstance(engine.ask(Plan(id=11, load=load_of(model)))[-1], Planned)
    engine.send(Cancel(id=12, target=10))
    last = list(engine.events(10))[-1]
    assert isinstance(last, Finished) and last.finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"model": "no-such-model"}, "bad-input", "no-such-model"),
        ({"prefill_chunk": 0}, "bad-input", "prefill chunk"),
    ],
)
def test_what_cannot_be_planned_is_said(
    engine: EngineProcess, model: Path, change: dict[str, Any], kind: str, said: str
) -> None:
    load = Load(**{"id": 0, "model": str(model), **change})
    (failed,) = engine.ask(Plan(id=20, load=load))
    assert isinstance(failed, Failed) and failed.kind == kind and said in failed.error


def test_decoding_is_measured_and_helps_later_plans(engine: EngineProcess, model: Path, dense: Path) -> None:
    found = result_of(engine.ask(Bench(id=30, kind="decode", load=load_of(model), rounds=2, even_if_busy=True)))
    assert positive(found.data["seconds_per_token"], 2) and positive(found.data["streaming_bytes_per_s"], 2)
    sizes = found.data["bytes_per_token"]
    assert 0 < sizes < sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert found.data["threads"] == 1 and found.data["runtime"] in ("native", "torch")
    (planned,) = engine.ask(Plan(id=31, load=load_of(dense)))
    assert isinstance(planned, Planned) and planned.tokens_per_s is not None and planned.tokens_per_s > 0
    assert "GB/s" in planned.basis


def test_prompts_are_measured_as_far_as_the_context_goes(engine: EngineProcess, model: Path) -> None:
    found = result_of(engine.ask(Bench(id=40, kind="prefill", load=load_of(model, context_limit=600), rounds=2)))
    assert [row[0] for row in found.rows] == [64, 512]
    assert all(positive(seconds, 2) for seconds in found.data["seconds"].values())
    assert any("2048" in note for note in found.notes)


def test_beam_steps_are_measured_beside_one_row(engine: EngineProcess, model: Path) -> None:
    found = result_of(engine.ask(Bench(id=50, kind="beams", load=load_of(model), rounds=1)))
    assert [row[0] for row in found.rows] == [1, 4, 8, 12]
    assert found.data["relative_to_one_row"]["1"] == [1.0]
    assert all(positive(seconds, 1) for seconds in found.data["seconds_per_step"].values())


@pytest.mark.slow
def test_experts_are_measured_once_and_plans_rest_on_it(engine: EngineProcess, home: Path, model: Path) -> None:
    found = result_of(engine.ask(Bench(id=60, kind="experts", load=load_of(model), even_if_busy=True)))
    calibration = found.data["calibration"]
    assert json.loads(Path(found.data["path"]).read_bytes()) == calibration
    assert Path(found.data["path"]).is_relative_to(home)
    assert [row[0] for row in found.rows] == calibration["cpu"]["tokens"]
    assert calibration["shape"]["hidden"] == 48 and calibration["memory_read"] > 0
    # The tiny model has no tokenizer, and without a GPU that is said, too.
    assert any("no tokenizer" in note for note in found.notes)
    (planned,) = engine.ask(Plan(id=61, load=load_of(model)))
    assert isinstance(planned, Planned) and planned.tokens_per_s is not None
    assert planned.prefill_tokens_per_s is not None and "privatellm bench experts" in planned.basis
    assert [each.answers for each in planned.answers] == [1, 2, 4, 8, 16]
    assert planned.answers[0].tokens_per_s == planned.tokens_per_s
    assert "at best" not in planned.basis  # what the runtime adds was measured beside
    (other,) = engine.ask(Plan(id=62, load=Load(id=0, model=str(model), partitioning="cpu", cpu_threads=2)))
    assert isinstance(other, Planned) and other.tokens_per_s is None  # measured with one thread


def test_a_dense_model_has_no_experts_to_measure(engine: EngineProcess, dense: Path) -> None:
    *_, failed = engine.ask(Bench(id=70, kind="experts", load=load_of(dense)))
    assert isinstance(failed, Failed) and failed.kind == "bad-input" and "dense" in failed.error


@pytest.mark.parametrize(("rounds", "said"), [(0, "0 rounds"), (10**6, "1000000 rounds")])
def test_rounds_that_mean_nothing(engine: EngineProcess, model: Path, rounds: int, said: str) -> None:
    *_, failed = engine.ask(Bench(id=71, kind="decode", load=load_of(model), rounds=rounds))
    assert isinstance(failed, Failed) and failed.kind == "bad-input" and said in failed.error


@pytest.mark.parametrize("kind", ["decode", "beams"])
def test_a_context_that_is_too_short_is_said(engine: EngineProcess, model: Path, kind: BenchKind) -> None:
    *_, failed = engine.ask(Bench(id=72, kind=kind, load=load_of(model, context_limit=2), rounds=1))
    assert isinstance(failed, Failed) and failed.kind == "context" and "too short" in failed.error


def test_more_threads_than_cpus_are_not_started(engine: EngineProcess, model: Path) -> None:
    load = Load(id=74, model=str(model), partitioning="cpu", cpu_threads=1000)
    engine.send(load)
    said = []
    while not isinstance(event := engine.next(), Loaded):
        assert isinstance(event, Progress | Notice | WarmUp)  # of the model before
        said += [event.text] if isinstance(event, Notice) else []
    assert len(said) == 1 and said[0].startswith("1000 CPU threads were asked for; this machine runs ")
    found = engine.ask(Bench(id=75, kind="beams", load=load, rounds=1))[-1]
    assert isinstance(found, BenchResult) and found.data["threads"] == usable_cpus()


def test_a_model_that_cannot_be_loaded_ends_the_benchmark(engine: EngineProcess, model: Path) -> None:
    load = Load(id=0, model="no-such-model")
    *_, failed = engine.ask(Bench(id=73, kind="decode", load=load))
    assert isinstance(failed, Failed) and "no-such-model" in failed.error


@pytest.mark.parametrize("kind", ["decode", "prefill", "beams", "experts"])
def test_a_benchmark_can_be_cancelled_and_the_engine_goes_on(
    engine: EngineProcess, model: Path, kind: BenchKind
) -> None:
    engine.send(Bench(id=80, kind=kind, load=load_of(model), rounds=1000))
    events = engine.events(80)
    stages = ("decoding", "reading a prompt", "stepping", "trying experts", "measuring experts")
    assert any(isinstance(event, Progress) and event.stage.startswith(stages) for event in events)
    engine.send(Cancel(id=81, target=80))
    last = list(events)[-1]
    assert isinstance(last, Failed) and "Stopped" in last.error
    answer = engine.ask(Generate(id=82, prompt_ids=PROMPT, max_tokens=2))[-1]
    assert isinstance(answer, Finished) and len(answer.token_ids) == 2


def profiles(home: Path) -> list[Path]:
    return sorted((home / "data" / "popularity").glob("*.json"))


def test_the_use_of_experts_is_kept_when_the_engine_ends(tmp_path: Path, model: Path) -> None:
    for session in (1, 2):
        with EngineProcess(tmp_path) as process:
            assert isinstance(process.ask(load_of(model))[-1], Loaded)
            process.ask(Bench(id=5, kind="beams", load=load_of(model), rounds=1))
            answer = process.ask(Generate(id=6, prompt_ids=PROMPT, max_tokens=5))[-1]
            assert isinstance(answer, Finished)
            process.send(Shutdown(id=7))
            assert process.wait_for_end() == 0
        (path,) = profiles(tmp_path)
        profile = json.loads(path.read_bytes())
        # Prompt and answer but for its last token, which is never run: two experts each; the benchmark left no trace.
        *layers, last = [round(sum(row)) for row in profile["routes"]]
        assert layers == [session * 2 * (len(PROMPT) + 4)] * len(layers)
        # The last layer need not run what no logits are asked of.
        assert session * 2 * 5 <= last <= layers[0]


def test_the_use_of_experts_is_kept_when_another_model_comes(tmp_path: Path, model: Path, dense: Path) -> None:
    with EngineProcess(tmp_path) as process:
        process.ask(load_of(model))
        process.ask(Generate(id=2, prompt_ids=PROMPT, max_tokens=3))
        assert profiles(tmp_path) == []
        assert isinstance(process.ask(load_of(dense))[-1], Loaded)
        assert len(profiles(tmp_path)) == 1
