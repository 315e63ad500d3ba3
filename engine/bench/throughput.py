"""``bench decode``, ``bench prefill`` and ``bench beams``: the speed of a loaded model's forward passes."""

from __future__ import annotations

from statistics import median

from engine.bench.subject import (
    PROMPT_TOKENS,
    WARM_UP_STEPS,
    BenchSubject,
    not_kept,
    random_tokens,
    read_prompt,
    steps,
)
from engine.calibration.calibration_file import MLX_GPU, calibration_key, save_speed
from engine.calibration.memory_rate import StreamingRead
from engine.calibration.samples import Spread, figure, milliseconds, per_second
from engine.errors import ModelError
from engine.ipc.messages import BenchResult
from engine.runtimes.mlx.runtime import open_files_kept

STEPS = 16
"""Decoding steps per round; a round's figure is their median."""
WIDTHS = (1, 4, 8, 12)
"""Rows of a step: the beam widths that are measured."""
LENGTHS = (64, 512, 2048)
"""Prompt lengths in tokens."""
BEAM_STEPS = 6
"""Decoding steps per round and width; a round's figure is their median."""


def bench_decode(subject: BenchSubject, request_id: int) -> BenchResult:
    """Milliseconds per token of one row after a short prompt, beside the rate of memory. Raises ModelError (context),
    Cancelled."""
    room = STEPS + WARM_UP_STEPS
    prompt = random_tokens(1, subject.prompt_tokens(room), subject.facts.vocabulary)
    seconds: list[float] = []
    rates: list[float] = []
    memory = StreamingRead(subject.threads, subject.clock, subject.buffer_bytes) if subject.on_cpu else None
    gpu_rates: list[float] = []
    for index in range(subject.rounds):
        subject.report("decoding", index, subject.rounds, "")
        rows = subject.model.start()
        read_prompt(subject, rows, prompt)
        seconds.append(median(steps(subject, rows, STEPS, seed=100)))
        del rows
        if memory is not None:
            rates.append(memory.rate())
        elif subject.facts.runtime == "mlx":
            gpu_rates.append(_mlx_rate())
    read_bytes = (
        subject.weight_bytes + len(prompt) * subject.facts.key_value_bytes_per_token + 2 * subject.facts.state_bytes
    )
    rate = per_second(seconds, read_bytes)
    share = [read_bytes / one / streaming for one, streaming in zip(seconds, rates, strict=False)]
    notes = _notes(subject, rates)
    if rates:
        why = subject.unsteady_reason(rates)
        notes += [not_kept(why)] if why else keep_speed(subject, median(rates), median(seconds), read_bytes)
    elif gpu_rates:
        why = subject.unsteady_reason(gpu_rates)
        notes += [not_kept(why)] if why else keep_speed(subject, median(gpu_rates), median(seconds), read_bytes)
    return BenchResult(
        id=request_id,
        title=f"Decoding, {subject.facts.name}",
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
    with open_files_kept():
        from engine.runtimes.mlx.measuring import READ_BYTES, measure_gpu

    return measure_gpu(None, READ_BYTES).memory_read


def keep_speed(subject: BenchSubject, memory_read: float, step_s: float, read_bytes: int) -> list[str]:
    """Keep the rates that plans for other models use; a line if that fails."""
    facts = subject.facts
    overhead = max(0.0, step_s - read_bytes / memory_read) / facts.layers
    numbers = facts.dtype.rpartition(" ")[2]  # of "4-bit, bfloat16" what is computed with
    machine = calibration_key(numbers, subject.threads, None if subject.on_cpu else MLX_GPU)
    try:
        save_speed(machine, memory_read, facts.runtime, overhead, read_bytes / memory_read / step_s)
    except OSError as error:
        return [f"What was measured cannot be kept for plans: {error.strerror or error}."]
    return []


def _notes(subject: BenchSubject, rates: list[float]) -> list[str]:
    notes = [f"After a prompt of up to {PROMPT_TOKENS} tokens; a round is the median of {STEPS} tokens."]
    if rates:
        rate = Spread.of(rates).mapped(lambda value: value / 1e9)
        notes.append(
            f"Streaming read in the same run: {rate} GB/s with {subject.threads} "
            f"thread{'s' * (subject.threads != 1)}; a model that fits the processor's caches can exceed it."
        )
    else:
        notes.append("The share of the streaming rate is given on a CPU only: here the GPU's memory is read too.")
    return notes


def bench_prefill(subject: BenchSubject, request_id: int) -> BenchResult:
    """Milliseconds per prompt, in chunks as a conversation has them. Raises ModelError (context), Cancelled."""
    limit = subject.facts.context_limit
    lengths = [length for length in LENGTHS if length <= limit] or [limit]
    if lengths[0] < 2:
        raise ModelError(
            f"The context of {limit} tokens is too short to measure a prompt; load the model with a larger limit.",
            kind="context",
        )
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    # The first pass of a length pays for buffers and kernels that a conversation pays for once: it is left out.
    passes = [(index, length) for index in range(subject.rounds + 1) for length in lengths]
    for done, (index, length) in enumerate(passes):
        subject.report(f"reading a prompt of {length} tokens", done, len(passes), "")
        prompt = random_tokens(7 + index, length, subject.facts.vocabulary)
        rows = subject.model.start()
        start = subject.clock()
        read_prompt(subject, rows, prompt)
        elapsed = subject.clock() - start
        del rows
        if index:
            seconds[length].append(elapsed)
    left_out = [length for length in LENGTHS if length not in lengths]
    notes = [f"In chunks of {subject.prefill_chunk} tokens; the logits of the last token are included."]
    if left_out:
        notes.append(f"Not measured, over the context of {limit}: {', '.join(map(str, left_out))} tokens.")
    return BenchResult(
        id=request_id,
        title=f"Prompts, {subject.facts.name}",
        columns=["tokens", "ms", "tokens/s"],
        rows=[[length, str(milliseconds(found)), str(per_second(found, length))] for length, found in seconds.items()],
        notes=notes,
        data={
            "prefill_chunk": subject.prefill_chunk,
            "seconds": {str(length): found for length, found in seconds.items()},
        },
    )


def bench_beams(subject: BenchSubject, request_id: int) -> BenchResult:
    """Milliseconds per step of each width, and relative to one row of the same round. Raises ModelError, Cancelled."""
    prompt = random_tokens(1, subject.prompt_tokens(BEAM_STEPS + WARM_UP_STEPS), subject.facts.vocabulary)
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    total = subject.rounds * len(WIDTHS)
    for index in range(subject.rounds):
        single = subject.model.start()
        read_prompt(subject, single, prompt)
        turned = index % len(WIDTHS)  # a slow moment of the machine should not always meet the same width
        for place, width in enumerate(WIDTHS[turned:] + WIDTHS[:turned]):
            subject.report(f"stepping {width} row{'s' * (width != 1)}", index * len(WIDTHS) + place, total, "")
            rows = single.fan_out(width)
            seconds[width].append(median(steps(subject, rows, BEAM_STEPS, seed=100 + 1000 * width)))
            del rows
        del single
    relative = {
        width: [many / one for many, one in zip(samples, seconds[1], strict=True)] for width, samples in seconds.items()
    }
    return BenchResult(
        id=request_id,
        title=f"Beam steps, {subject.facts.name}",
        columns=["rows", "ms/step", "relative to 1 row", "tokens/s, all rows"],
        rows=[
            [width, str(milliseconds(samples)), str(Spread.of(relative[width])), str(per_second(samples, width))]
            for width, samples in seconds.items()
        ],
        notes=[
            f"Rows of different tokens after a common prompt of {len(prompt)}; a round is the median of {BEAM_STEPS} "
            "steps. Beams that resemble one another use fewer experts and cost less."
        ],
        data={
            "prompt_tokens": len(prompt),
            "steps_per_round": BEAM_STEPS,
            "seconds_per_step": {str(width): samples for width, samples in seconds.items()},
            "relative_to_one_row": {str(width): samples for width, samples in relative.items()},
        },
    )
