"""Measuring a node's GPU with mlx-lm's experts of the model's shape, in about a second.

The weights are synthetic, so no weight of the model is needed.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from engine.calibration.expert_cost import never_falling
from engine.planning.calibration import Curve, ExpertShape

Array = Any

TOKENS = (1, 2, 4, 8, 16, 64)
AT_ONCE = 8
"""Number of experts in one call, as in a layer: neither waiting for it nor its beginning dominates the time of one."""
CYCLE_BYTES = 512 << 20
"""Total bytes of the experts that are run in turn, more than the chips' caches."""
READ_BYTES = 256 << 20
ROUNDS = 12
_GROUP = 32


@dataclass(frozen=True)
class GpuFigures:
    """``memory_read`` in bytes per second; ``expert`` over its tokens, None for a dense model; ``wait_s``: seconds of
    waiting for the GPU when there is nothing for it to do."""

    memory_read: float
    expert: Curve | None
    wait_s: float


def measure_gpu(
    shape: ExpertShape | None, most_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> GpuFigures:
    """The figures of mlx's device, with at most ``most_bytes`` of its memory (but two experts, at least)."""
    wait_s = _wait(clock)
    words = mx.ones((max(1, min(READ_BYTES, most_bytes) // 4),), mx.float32)
    mx.eval(words)
    reading = min(_seconds(lambda: mx.sum(words), clock) for _ in range(4))
    rate = words.nbytes / max(reading - wait_s, 1e-9)
    return GpuFigures(rate, None if shape is None else _curve(shape, most_bytes, wait_s, clock), wait_s)


def _wait(clock: Callable[[], float]) -> float:
    one = mx.ones((8,), mx.float32)
    mx.eval(one)
    return statistics.median(_seconds(lambda: one + 1.0, clock) for _ in range(5 * ROUNDS))


def _curve(shape: ExpertShape, most_bytes: int, wait_s: float, clock: Callable[[], float]) -> Curve:
    count = max(2, min(64, min(CYCLE_BYTES, most_bytes) // max(1, shape.expert_bytes)))
    experts = like(shape, count)
    dtype = experts.down_proj["scales" if "scales" in experts.down_proj else "weight"].dtype
    given = {tokens: mx.full((tokens, shape.hidden), 0.01, dtype) for tokens in TOKENS}
    samples: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    turn = 0
    for _ in range(ROUNDS):
        for tokens in TOKENS:
            chosen = [(turn + number) % count for number in range(AT_ONCE)]
            turn += AT_ONCE
            seconds = _seconds(partial(_run, experts, given[tokens], chosen), clock)
            samples[tokens].append(max(1e-9, (seconds - wait_s) / AT_ONCE))
    # The first run of each compiles its kernel.
    medians = [statistics.median(samples[tokens][1:]) for tokens in TOKENS]
    return Curve(TOKENS, tuple(never_falling(medians)))


def like(shape: ExpertShape, count: int) -> Any:
    """``count`` experts of ``shape`` as mlx-lm has them: plain, or quantised to the bits that its dtype names (``Q4``),
    where groups of 32 divide its sizes. On a CPU in float32, as everything there."""
    experts = SwitchGLU(shape.hidden, shape.ffn, count)
    on_gpu = mx.default_device() == mx.gpu
    experts.set_dtype(mx.float32 if shape.dtype == "F32" or not on_gpu else mx.bfloat16)
    bits = re.fullmatch(r"Q([234568])", shape.dtype)
    if bits is not None and shape.hidden % _GROUP == shape.ffn % _GROUP == 0:
        nn.quantize(experts, group_size=_GROUP, bits=int(bits[1]))
    mx.eval(experts.parameters())
    return experts


def _run(experts: Any, rows: Array, chosen: Sequence[int]) -> Array:
    """All ``rows`` through each of the experts."""
    slots = mx.array(list(chosen), dtype=mx.int32)
    return experts(rows, mx.broadcast_to(slots, (rows.shape[0], len(chosen))))


def _seconds(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    begun = clock()
    mx.eval(work())
    return clock() - begun
