"""``bench experts``: what one expert costs here (the Twiddler paper's figure 7), kept for later decisions."""

from __future__ import annotations

from typing import Any

from engine.bench.decode import keep_speed
from engine.bench.prompts import PromptTokenizer, calibration_prompts, count_routes
from engine.bench.setting import WARM_UP_STEPS, Setting, median, not_kept, random_tokens, read_prompt, steps
from engine.calibration.calibration_file import calibration_key, save_calibration, shape_of
from engine.calibration.measuring import Figures, calibration_of, measure
from engine.calibration.spread import Spread, figure, milliseconds
from engine.calibration.streaming import StreamingRead
from engine.errors import ModelError
from engine.ipc.messages import BenchResult
from engine.models.files import Experts, ModelFiles
from engine.models.profiles import profile_paths
from engine.models.store import profile_key
from engine.moe.popularity import Popularity
from engine.moe.popularity_file import model_of, save_profile
from engine.planning.calibration import Calibration

SHORT_PROMPT = 16
SHORT_STEPS = 8
"""Decoded once beside the experts: enough for a plan, and short even where a step takes a second."""

COLUMNS = ["tokens", "CPU, ms", "CPU, GB/s of weights", "GPU, ms", "weights to the GPU, ms", "activations, ms"]


def bench_experts(
    setting: Setting,
    request_id: int,
    files: ModelFiles,
    popularity: Popularity | None,
    tokenizer: PromptTokenizer | None,
) -> BenchResult:
    """Measure, keep the calibration, and count the calibration prompts' routes.

    Raises ModelError (bad-input for a dense model, disk if the calibration cannot be kept), Cancelled.
    """
    from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, gpu_side

    experts = files.experts
    if experts is None:
        raise ModelError(
            f"{setting.facts.name} is a dense model: it has no routed experts to measure; name an MoE model.",
            kind="bad-input",
        )
    setting.report("reading the experts", 0, 0, "")
    cpu = LocalCpuSide(experts, setting.facts.dtype, setting.facts.experts_per_token, setting.threads)
    gpu, lines = gpu_side(experts, setting.facts.dtype, setting.report)
    memory = StreamingRead(setting.threads, setting.clock)
    try:
        figures = measure(cpu, gpu, memory.rate, setting.clock, setting.report)
    finally:
        if gpu is not None:
            gpu.close()
    machine = calibration_key(setting.facts.dtype, setting.threads, gpu.name if gpu is not None else None)
    calibration = calibration_of(figures, machine, shape_of(experts))
    why = setting.why_not_kept(figures.memory_read)
    path = "" if why else _kept(calibration)
    notes = [
        f"CPU: {cpu.description}, {cpu.experts_per_call} experts in a call.",
        *_overlap(figures, gpu.name if gpu is not None else ""),
        *lines,
        f"Streaming read in the same run: {_gigabytes(figures.memory_read)} GB/s.",
        not_kept(why) if why else f"Kept as {path}",
        _seed(setting, files, experts, popularity, tokenizer),
        *([] if why else _beside_experts(setting, figures)),
    ]
    return BenchResult(
        id=request_id,
        title=f"One expert of {setting.facts.name}: {_described(calibration)}",
        columns=COLUMNS,
        rows=_rows(figures, calibration),
        notes=[*notes, *cpu.notices],
        data=_data(figures, calibration, path),
    )


def _kept(calibration: Calibration) -> str:
    """Where it is kept. Raises ModelError (disk)."""
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
    setting: Setting,
    files: ModelFiles,
    experts: Experts,
    popularity: Popularity | None,
    tokenizer: PromptTokenizer | None,
) -> str:
    """Run the calibration prompts and keep what they used; one line about it."""
    if popularity is None:
        return f"The calibration prompts were not run: the {setting.facts.runtime} runtime does not count routes."
    if tokenizer is None:
        return "The calibration prompts were not run: the model has no tokenizer."
    prompts = calibration_prompts()
    counts, done = count_routes(setting, popularity, tokenizer, prompts)
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


def _beside_experts(setting: Setting, figures: Figures) -> list[str]:
    """Decode a little, so that plans know what the runtime adds to its weights; a line if that cannot be kept."""
    if not setting.on_cpu or setting.facts.context_limit <= SHORT_PROMPT + WARM_UP_STEPS + SHORT_STEPS:
        return []
    setting.report("decoding", 0, 0, "")
    prompt = random_tokens(1, SHORT_PROMPT, setting.facts.vocabulary)
    rows = setting.model.start()
    read_prompt(setting, rows, prompt)
    step_s = median(steps(setting, rows, SHORT_STEPS, seed=100))
    read_bytes = setting.weight_bytes + SHORT_PROMPT * setting.facts.key_value_bytes_per_token
    return keep_speed(setting, median(figures.memory_read), step_s, read_bytes)


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
