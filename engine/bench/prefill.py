"""``bench prefill``: prompts of several lengths into an empty cache."""

from __future__ import annotations

from engine.bench.setting import Setting, random_tokens, read_prompt
from engine.calibration.spread import milliseconds, per_second
from engine.errors import ModelError
from engine.ipc.messages import BenchResult

LENGTHS = (64, 512, 2048)


def bench_prefill(setting: Setting, request_id: int) -> BenchResult:
    """Milliseconds per prompt, in chunks as a conversation has them. Raises ModelError (context), Cancelled."""
    limit = setting.facts.context_limit
    lengths = [length for length in LENGTHS if length <= limit] or [limit]
    if lengths[0] < 2:
        raise ModelError(
            f"The context of {limit} tokens is too short to measure a prompt; load the model with a larger limit.",
            kind="context",
        )
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    # The first pass of a length pays for buffers and kernels that a conversation pays for once: it is left out.
    passes = [(index, length) for index in range(setting.rounds + 1) for length in lengths]
    for done, (index, length) in enumerate(passes):
        setting.report(f"reading a prompt of {length} tokens", done, len(passes), "")
        prompt = random_tokens(7 + index, length, setting.facts.vocabulary)
        rows = setting.model.start()
        start = setting.clock()
        read_prompt(setting, rows, prompt)
        elapsed = setting.clock() - start
        del rows
        if index:
            seconds[length].append(elapsed)
    left_out = [length for length in LENGTHS if length not in lengths]
    notes = [f"In chunks of {setting.prefill_chunk} tokens; the logits of the last token are included."]
    if left_out:
        notes.append(f"Not measured, over the context of {limit}: {', '.join(map(str, left_out))} tokens.")
    return BenchResult(
        id=request_id,
        title=f"Prompts, {setting.facts.name}",
        columns=["tokens", "ms", "tokens/s"],
        rows=[[length, str(milliseconds(found)), str(per_second(found, length))] for length, found in seconds.items()],
        notes=notes,
        data={
            "prefill_chunk": setting.prefill_chunk,
            "seconds": {str(length): found for length, found in seconds.items()},
        },
    )
