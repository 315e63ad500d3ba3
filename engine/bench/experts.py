"""``bench experts``: the cost of one expert on this machine (the Twiddler paper's figure 7), kept for later decisions.

Beside that the calibration prompts are run: texts of different kinds whose routes seed the popularity profile.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from engine.bench.subject import WARM_UP_STEPS, BenchSubject, not_kept, random_tokens, read_prompt, steps
from engine.bench.throughput import keep_speed
from engine.calibration.calibration_file import calibration_key, save_calibration, shape_of
from engine.calibration.expert_cost import Figures, calibration_of, measure
from engine.calibration.memory_rate import StreamingRead
from engine.calibration.samples import Spread, figure, milliseconds
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import BenchResult
from engine.models.formats.model_files import Experts, ModelFiles
from engine.models.store.local_models import profile_key
from engine.moe.popularity import Popularity, model_of, save_profile
from engine.planning.calibration import Calibration
from engine.runtimes.protocol import TokenRows
from engine.system.locations import profile_paths

SHORT_PROMPT = 16
"""Tokens of the prompt of the short decoding run beside the experts."""
SHORT_STEPS = 8
"""Decoding steps of that run that count: enough for a plan, and short even where a step takes a second."""
SETTLING_S = 1.5
"""Seconds of warm-up steps before the measured ones. The first steps meet experts that the process has not read yet:
with 256 experts in a layer such a step takes a third longer."""
MOST_BATCHES = 12
"""Maximum repetitions of SHORT_STEPS within SETTLING_S."""

PROMPTS_FILE = "calibration_prompts.txt"
ANSWER_TOKENS = 12
"""Tokens decoded greedily after each calibration prompt: answers use other experts than questions."""
BUDGET_S = 20.0
"""Time in seconds after which no further calibration prompt is begun."""

EncodePrompt = Callable[[str], list[int]]
"""A question's text to the token ids of its chat prompt."""

COLUMNS = ["tokens", "CPU, ms", "CPU, GB/s of weights", "GPU, ms", "weights to the GPU, ms", "activations, ms"]


def bench_experts(
    subject: BenchSubject,
    request_id: int,
    files: ModelFiles,
    popularity: Popularity | None,
    encode: EncodePrompt | None,
) -> BenchResult:
    """Measure, keep the calibration, and count the calibration prompts' routes.

    Raises ModelError (bad-input for a dense model, disk if the calibration cannot be kept), Cancelled.
    """
    from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, gpu_side

    experts = files.experts
    if experts is None:
        raise ModelError(
            f"{subject.facts.name} is a dense model: it has no routed experts to measure; name an MoE model.",
            kind="bad-input",
        )
    subject.report("reading the experts", 0, 0, "")
    cpu = LocalCpuSide(experts, subject.facts.dtype, subject.facts.experts_per_token, subject.threads)
    gpu, lines = gpu_side(experts, subject.facts.dtype, subject.facts.experts_per_token, subject.report)
    memory = StreamingRead(subject.threads, subject.clock, subject.buffer_bytes)
    try:
        figures = measure(cpu, gpu, memory.rate, subject.clock, subject.report)
    finally:
        if gpu is not None:
            gpu.close()
    machine = calibration_key(subject.facts.dtype, subject.threads, gpu.name if gpu is not None else None)
    calibration = calibration_of(figures, machine, shape_of(experts))
    why = subject.unsteady_reason(figures.memory_read)
    path = "" if why else _kept(calibration)
    notes = [
        f"CPU: {cpu.description}, {cpu.experts_per_call} experts in a call.",
        *_overlap(figures, gpu.name if gpu is not None else ""),
        *lines,
        f"Streaming read in the same run: {_gigabytes(figures.memory_read)} GB/s.",
        not_kept(why) if why else f"Kept as {path}",
        _seed(subject, files, experts, popularity, encode),
        *([] if why else _beside_experts(subject, figures)),
    ]
    return BenchResult(
        id=request_id,
        title=f"One expert of {subject.facts.name}: {_described(calibration)}",
        columns=COLUMNS,
        rows=_rows(figures, calibration),
        notes=[*notes, *cpu.notices],
        data=_data(figures, calibration, path),
    )


def _kept(calibration: Calibration) -> str:
    """Save ``calibration`` and return its path. Raises ModelError (disk)."""
    try:
        return str(save_calibration(calibration))
    except OSError as error:
        raise ModelError(f"The calibration cannot be kept: {error.strerror or error}; make room.", "disk") from error


def _rows(figures: Figures, calibration: Calibration) -> list[list[str | int | float | None]]:
    slab = calibration.shape.expert_bytes
    rows: list[list[str | int | float | None]] = []
    for place, (tokens, seconds) in enumerate(sorted(figures.cpu.items())):
        rate = Spread.of(seconds).mapped(lambda value: slab / value / 1e9)
        gpu, activations = figures.gpu.get(tokens), figures.activations.get(tokens)
        # A copy of weights costs the same whatever the tokens: it is said once.
        copy = str(milliseconds(figures.weight_copy)) if figures.weight_copy and place == 0 else None
        rows.append(
            [
                tokens,
                str(milliseconds(seconds)),
                str(rate),
                str(milliseconds(gpu)) if gpu else None,
                copy,
                str(milliseconds(activations)) if activations else None,
            ]
        )
    return rows


def _seed(
    subject: BenchSubject,
    files: ModelFiles,
    experts: Experts,
    popularity: Popularity | None,
    encode: EncodePrompt | None,
) -> str:
    """Run the calibration prompts and keep the routes they used; one line about it."""
    if popularity is None:
        return f"The calibration prompts were not run: the {subject.facts.runtime} runtime does not count routes."
    if encode is None:
        return "The calibration prompts were not run: the model has no tokenizer."
    prompts = calibration_prompts()
    counts, done = count_routes(subject, popularity, encode, prompts)
    path = profile_paths(profile_key(files.folder))[1]
    try:
        save_profile(path, model_of(experts), counts)
    except OSError as error:
        return f"The popularity of experts cannot be kept in {path}: {error.strerror or error}."
    used = sum(sum(1 for routes in row if routes) for row in counts.values())
    return (
        f"{done} of {len(prompts)} calibration prompts used {used} of {experts.count * len(experts.layers)} experts; "
        f"their popularity is kept as {path}"
    )


def _beside_experts(subject: BenchSubject, figures: Figures) -> list[str]:
    """Decode a few steps for the plans: what a step takes beyond reading the weights. A line if it cannot be kept."""
    batches = (subject.facts.context_limit - SHORT_PROMPT - 1) // (WARM_UP_STEPS + SHORT_STEPS)
    if not subject.on_cpu or batches < 1:
        return []
    subject.report("decoding", 0, 0, "")
    prompt = random_tokens(1, SHORT_PROMPT, subject.facts.vocabulary)
    rows = subject.model.start()
    read_prompt(subject, rows, prompt)
    step_s = _settled_step(subject, rows, min(batches, MOST_BATCHES))
    read_bytes = (
        subject.weight_bytes + SHORT_PROMPT * subject.facts.key_value_bytes_per_token + 2 * subject.facts.state_bytes
    )
    return keep_speed(subject, median(figures.memory_read), step_s, read_bytes)


def _settled_step(subject: BenchSubject, rows: TokenRows, most: int) -> float:
    """Seconds of a decoding step, by the last of up to ``most`` batches of steps."""
    settled = subject.clock() + SETTLING_S
    for batch in range(most):
        step_s = median(steps(subject, rows, SHORT_STEPS, seed=100 * (batch + 1)))
        if subject.clock() >= settled:
            break
    return step_s


def _overlap(figures: Figures, gpu: str) -> list[str]:
    if not gpu:
        return []
    if not figures.cpu_overlapped:
        return [f"GPU: {gpu}."]
    cpu, copy = Spread.of(figures.cpu_overlapped), Spread.of(figures.copy_overlapped)
    return [f"GPU: {gpu}; with both sides at work the CPU takes {cpu} and a copy {copy} times as long."]


def _described(calibration: Calibration) -> str:
    shape = calibration.shape
    return f"{shape.hidden} x {shape.ffn}, {shape.dtype}, {figure(shape.expert_bytes / 1e6)} MB"


def _gigabytes(rates: list[float]) -> str:
    return str(Spread.of(rates).mapped(lambda value: value / 1e9))


def _data(figures: Figures, calibration: Calibration, path: str) -> dict[str, Any]:
    import msgspec

    def by_tokens(samples: dict[int, list[float]]) -> dict[str, list[float]]:
        return {str(tokens): seconds for tokens, seconds in sorted(samples.items())}

    return {
        "calibration": msgspec.to_builtins(calibration),
        "path": path,
        "cpu_s": by_tokens(figures.cpu),
        "gpu_s": by_tokens(figures.gpu),
        "activation_copy_s": by_tokens(figures.activations),
        "weight_copy_s": figures.weight_copy,
        "cpu_overlapped": figures.cpu_overlapped,
        "copy_overlapped": figures.copy_overlapped,
        "memory_read_bytes_per_s": figures.memory_read,
    }


def calibration_prompts() -> list[str]:
    """The prompts, which blank lines part."""
    text = importlib.resources.files("assets").joinpath(PROMPTS_FILE).read_text(encoding="utf-8")
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def count_routes(
    subject: BenchSubject, popularity: Popularity, encode: EncodePrompt, prompts: Sequence[str]
) -> tuple[dict[int, list[float]], int]:
    """Routes per layer and expert over ``prompts`` and the beginnings of their answers, and how many prompts were run.

    Raises Cancelled.
    """
    before = {layer: popularity.counts(layer) for layer in popularity.layers}
    start = subject.clock()
    done = 0
    for done, prompt in enumerate(prompts):
        if done and subject.clock() - start > BUDGET_S:
            break
        subject.report("running the calibration prompts", done, len(prompts), "")
        tokens = encode(prompt)
        run_prompt(subject, tokens[: max(0, subject.facts.context_limit - ANSWER_TOKENS)])
    else:
        done = len(prompts)
    return _difference(before, popularity), done


def run_prompt(subject: BenchSubject, tokens: Sequence[int]) -> None:
    """Read ``tokens`` and decode the beginning of the likeliest answer. Does nothing without tokens."""
    if not tokens:
        return
    rows = subject.model.start()
    read_prompt(subject, rows, tokens[:-1])
    token = tokens[-1]
    for _ in range(ANSWER_TOKENS):
        if subject.cancelled():
            raise Cancelled("Stopped while running the calibration prompts.")
        token = int(np.argmax(rows.step([token])[0]))


def _difference(before: Mapping[int, Sequence[int]], popularity: Popularity) -> dict[int, list[float]]:
    return {
        layer: [float(now - was) for now, was in zip(popularity.counts(layer), row, strict=True)]
        for layer, row in before.items()
    }
