"""What one machine's GPU and CPU need for one expert, as measured: the numbers every placement decision rests on.

All times are seconds, all rates bytes per second. Measuring is :mod:`engine.calibration.expert_cost`'s business; here
is only what was measured, and what follows from it. (Twiddler paper, section 3.3 and appendix A, figure 7.)
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

CALIBRATION_VERSION = 1
"""Version of the format. It is raised when the meaning of a field changes; other versions are refused."""


ESTIMATED_TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of tokens at which the curves of :func:`estimated` have points."""


class ExpertShape(msgspec.Struct, frozen=True):
    """What makes two experts cost the same."""

    hidden: int
    ffn: int
    dtype: str
    """As stored: ``BF16`` or ``F32``."""
    expert_bytes: int
    """One expert's slab: gate, up, down and biases."""


class Curve(msgspec.Struct, frozen=True):
    """Seconds over a number of tokens, as measured at ``tokens`` (ascending, the first is 1 or less).

    Not a line through zero: on a CPU few tokens cost as much as one, because the weights are read once for all.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Interpolated linearly between the measured points, beyond the last with the slope of the last two (never
        falling). 0.0 for no tokens."""
        if tokens <= 0:
            return 0.0
        place = bisect_left(self.tokens, tokens)
        if place == 0:
            return self.seconds[0]
        if place < len(self.tokens):
            left, right = place - 1, place
        elif len(self.tokens) > 1:
            left, right = place - 2, place - 1
        else:
            return self.seconds[-1]
        slope = (self.seconds[right] - self.seconds[left]) / (self.tokens[right] - self.tokens[left])
        if place == len(self.tokens):
            return self.seconds[right] + max(0.0, slope) * (tokens - self.tokens[right])
        return self.seconds[left] + slope * (tokens - self.tokens[left])


class Processor(msgspec.Struct, frozen=True):
    """What :func:`estimated` takes for a processor: bytes per second, operations per second, and seconds per expert."""

    memory_rate: float
    operations_rate: float
    fixed_s: float = 0.0

    def curve(self, shape: ExpertShape, bytes_per_weight: int) -> Curve:
        """Seconds of one expert for ESTIMATED_TOKENS."""
        reading = shape.expert_bytes / self.memory_rate
        weights = shape.expert_bytes / bytes_per_weight
        return Curve(
            ESTIMATED_TOKENS,
            tuple(self.fixed_s + max(reading, 2 * n * weights / self.operations_rate) for n in ESTIMATED_TOKENS),
        )


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The measured costs of one expert on one machine."""

    version: int
    machine: str
    """Processor, instruction set, threads and GPU: a calibration of another machine is refused."""
    shape: ExpertShape
    cpu: Curve
    """One expert on the CPU."""
    memory_read: float
    """The rate at which the CPU streams weights."""
    gpu: Curve | None = None
    """One expert whose weights are in GPU memory; None without a GPU."""
    weight_copy: float = 0.0
    """One slab from host to GPU memory."""
    activation_copy: Curve | None = None
    """Activations of so many tokens to the CPU and their results back."""
    cpu_overlapped: float = 1.0
    """The CPU takes so many times as long while weights are being copied (at least 1)."""
    copy_overlapped: float = 1.0
    """A copy takes so many times as long while the CPU runs experts (at least 1)."""


def estimated(
    shape: ExpertShape,
    *,
    cpu: Processor,
    gpu: Processor | None = None,
    pcie_rate: float = 0.0,
    machine: str = "estimated",
    bytes_per_weight: int = 2,
) -> Calibration:
    """A calibration from rates alone, not from measurements: for other people's machines, and before measuring.

    An expert takes what reading its weights takes, or its operations, whichever is longer, and a fixed time on top.
    Activations travel in bytes_per_weight, there and back. Nothing is assumed about what happens when both sides are
    busy. Raises ValueError for a GPU without a ``pcie_rate``.
    """
    if gpu is not None and pcie_rate <= 0:
        raise ValueError(f"a GPU needs a rate to copy weights at, not {pcie_rate:g} bytes/s")
    activations = tuple(
        (gpu.fixed_s if gpu else 0.0) + 2 * tokens * shape.hidden * bytes_per_weight / pcie_rate if gpu else 0.0
        for tokens in ESTIMATED_TOKENS
    )
    return Calibration(
        version=CALIBRATION_VERSION,
        machine=machine,
        shape=shape,
        cpu=cpu.curve(shape, bytes_per_weight),
        memory_read=cpu.memory_rate,
        gpu=gpu.curve(shape, bytes_per_weight) if gpu else None,
        weight_copy=shape.expert_bytes / pcie_rate if gpu else 0.0,
        activation_copy=Curve(ESTIMATED_TOKENS, activations) if gpu else None,
    )
