"""``bench decode``: one row, token by token, against the rate at which the machine can read its memory."""

from __future__ import annotations

from engine.bench.setting import (
    PROMPT_TOKENS,
    WARM_UP_STEPS,
    Setting,
    median,
    not_kept,
    random_tokens,
    read_prompt,
    steps,
)
from engine.calibration.calibration_file import calibration_key
from engine.calibration.speed_file import MLX_GPU, save_speed
from engine.calibration.spread import Spread, figure, milliseconds, per_second
from engine.calibration.streaming import StreamingRead
from engine.ipc.messages import BenchResult

STEPS = 16
"""Decoded per round; a round's figure is their median."""


def bench_decode(setting: Setting, request_id: int) -> BenchResult:
    """Milliseconds per token of one row after a short prompt. Raises ModelError (context), Cancelled."""
    room = STEPS + WARM_UP_STEPS
    prompt = random_tokens(1, setting.prompt_tokens(room), setting.facts.vocabulary)
    seconds: list[float] = []
    rates: list[float] = []
    memory = StreamingRead(setting.threads, setting.clock) if setting.on_cpu else None
    gpu_rates: list[float] = []
    for index in range(setting.rounds):
        setting.report("decoding", index, setting.rounds, "")
        rows = setting.model.start()
        read_prompt(setting, rows, prompt)
        seconds.append(median(steps(setting, rows, STEPS, seed=100)))
        del rows
        if memory is not None:
            rates.append(memory.rate())
        elif setting.facts.runtime == "mlx":
            gpu_rates.append(_mlx_rate())
    read_bytes = setting.weight_bytes + len(prompt) * setting.facts.key_value_bytes_per_token
    rate = per_second(seconds, read_bytes)
    share = [read_bytes / one / streaming for one, streaming in zip(seconds, rates, strict=False)]
    notes = _notes(setting, rates)
    if rates:
        why = setting.why_not_kept(rates)
        notes += [not_kept(why)] if why else keep_speed(setting, median(rates), median(seconds), read_bytes)
    elif gpu_rates:
        why = setting.why_not_kept(gpu_rates)
        notes += [not_kept(why)] if why else keep_speed(setting, median(gpu_rates), median(seconds), read_bytes)
    return BenchResult(
        id=request_id,
        title=f"Decoding, {setting.facts.name}",
        columns=["", "ms/token", "tokens/s", "GB read/token", "GB/s", "of the streaming rate"],
        rows=[
            [
                "1 row",
                str(milliseconds(seconds)),
                str(per_second(seconds, 1.0)),
                figure(read_bytes / 1e9),
                str(rate.mapped(lambda value: value / 1e9)),
                str(Spread.of(share).mapped(lambda value: 100.0 * value)) + " %" if share else None,
            ]
        ],
        notes=notes,
        data={
            "prompt_tokens": len(prompt),
            "steps_per_round": STEPS,
            "seconds_per_token": seconds,
            "bytes_per_token": read_bytes,
            "streaming_bytes_per_s": rates,
            "share_of_streaming_rate": share,
        },
    )


def _mlx_rate() -> float:
    """Bytes per second at which mlx's GPU reads the memory that it shares with the CPU."""
    from engine.runtimes.mlx.measuring import READ_BYTES, measure_gpu

    return measure_gpu(None, READ_BYTES).memory_read


def keep_speed(setting: Setting, memory_read: float, step_s: float, read_bytes: int) -> list[str]:
    """Keep what plans for other models can rest on; a line if that is not done."""
    facts = setting.facts
    overhead = max(0.0, step_s - read_bytes / memory_read) / facts.layers
    numbers = facts.dtype.rpartition(" ")[2]  # of "4-bit, bfloat16" what is computed with
    machine = calibration_key(numbers, setting.threads, None if setting.on_cpu else MLX_GPU)
    try:
        save_speed(machine, memory_read, facts.runtime, overhead)
    except OSError as error:
        return [f"What was measured cannot be kept for plans: {error.strerror or error}."]
    return []


def _notes(setting: Setting, rates: list[float]) -> list[str]:
    notes = [f"After a prompt of up to {PROMPT_TOKENS} tokens; a round is the median of {STEPS} tokens."]
    if rates:
        rate = Spread.of(rates).mapped(lambda value: value / 1e9)
        notes.append(
            f"Streaming read in the same run: {rate} GB/s with {setting.threads} "
            f"thread{'s' * (setting.threads != 1)}; a model that fits the processor's caches can exceed it."
        )
    else:
        notes.append("The share of the streaming rate is told on a CPU only: here the GPU's memory takes part.")
    return notes
