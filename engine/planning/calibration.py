"""What one machine's GPU and CPU need for one expert, as measured: the numbers every placement decision rests on.

All times are seconds, all rates bytes per second. Measuring is :mod:`engine.calibration.expert_cost`'s business; here
is only what was measured, and what follows from it. (Twiddler paper, section 3.3 and appendix A, figure 7.)
"""

from __future__ import annotations

import math
from bisect import bisect_left

import msgspec

CALIBRATION_VERSION = 1
"""Version of the format. It is raised when the meaning of a field changes; other versions are refused."""


ESTIMATED_TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of tokens at which the curves of :func:`estimated` have points."""


UNPACKING_TRAFFIC = 32
"""Bytes read and written per packed weight while torch unpacks it: whole steps over codes, scales and products."""


class ExpertShape(msgspec.Struct, frozen=True):
    """What makes two experts cost the same."""

    hidden: int
    ffn: int
    dtype: str
    """The number format as stored: ``BF16``, ``F32``, or that of packed weights."""
    expert_bytes: int
    """One expert as stored: gate, up, down and biases."""

    @property
    def weights(self) -> int:
        """Number of weights of gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def packed(self) -> bool:
        """Whether its weights are packed: no plain format takes less than two bytes for each."""
        return self.expert_bytes < 2 * self.weights


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

    def slope(self, most: int) -> float:
        """Seconds per token of the line through zero that fits the points of up to ``most`` tokens best (least
        squares). The first point is always among them."""
        points = [each for each in zip(self.tokens, self.seconds, strict=True) if each[0] <= max(most, self.tokens[0])]
        return sum(tokens * seconds for tokens, seconds in points) / sum(tokens * tokens for tokens, _ in points)


class Processor(msgspec.Struct, frozen=True):
    """What :func:`estimated` takes for a processor: bytes per second, operations per second, and seconds per expert."""

    memory_rate: float
    operations_rate: float
    fixed_s: float = 0.0
    unpacks: bool = False
    """Whether packed weights are unpacked by torch before they are multiplied."""

    def curve(self, shape: ExpertShape) -> Curve:
        """Seconds of one expert for ESTIMATED_TOKENS."""
        moved = shape.expert_bytes + (UNPACKING_TRAFFIC * shape.weights if self.unpacks and shape.packed else 0)
        reading, operations = moved / self.memory_rate, 2 * shape.weights / self.operations_rate
        return Curve(ESTIMATED_TOKENS, tuple(self.fixed_s + max(reading, n * operations) for n in ESTIMATED_TOKENS))


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
    gpu_operation_s: float = 0.0
    """Seconds that one small operation on the GPU costs the host, which begins one after the other. 0: not measured."""


GUESSED_CPU = Processor(memory_rate=40e9, operations_rate=1e12, fixed_s=20e-6)
GUESSED_GPU = Processor(memory_rate=600e9, operations_rate=60e12, fixed_s=40e-6, unpacks=True)
GUESSED_PCIE = 20e9
GUESSED_OPERATION_S = 5e-6
"""Rates of a machine that was not measured, in bytes and operations per second, and seconds: a desktop computer with
a GPU of the middle class."""


def estimated(
    shape: ExpertShape,
    *,
    cpu: Processor,
    gpu: Processor | None = None,
    pcie_rate: float = 0.0,
    machine: str = "estimated",
    activation_bytes: int = 2,
) -> Calibration:
    """A calibration from rates alone, not from measurements: for other people's machines, and before measuring.

    An expert takes what reading its weights takes, or its operations, whichever is longer, and a fixed time on top.
    Activations travel as numbers of ``activation_bytes``, there and back. Nothing is assumed about what happens when
    both sides are busy. Raises ValueError for a GPU without a ``pcie_rate``.
    """
    if gpu is not None and pcie_rate <= 0:
        raise ValueError(f"a GPU needs a rate to copy weights at, not {pcie_rate:g} bytes/s")
    activations = tuple(
        (gpu.fixed_s if gpu else 0.0) + 2 * tokens * shape.hidden * activation_bytes / pcie_rate if gpu else 0.0
        for tokens in ESTIMATED_TOKENS
    )
    return Calibration(
        version=CALIBRATION_VERSION,
        machine=machine,
        shape=shape,
        cpu=cpu.curve(shape),
        memory_read=cpu.memory_rate,
        gpu=gpu.curve(shape) if gpu else None,
        weight_copy=shape.expert_bytes / pcie_rate if gpu else 0.0,
        activation_copy=Curve(ESTIMATED_TOKENS, activations) if gpu else None,
    )


def guessed(shape: ExpertShape, activation_bytes: int = 2, cpu: Curve | None = None) -> Calibration:
    """The calibration of a machine with a GPU that was not measured. ``cpu``: what was measured of its CPU."""
    found = estimated(
        shape, cpu=GUESSED_CPU, gpu=GUESSED_GPU, pcie_rate=GUESSED_PCIE, activation_bytes=activation_bytes
    )
    found = msgspec.structs.replace(found, gpu_operation_s=GUESSED_OPERATION_S)
    return found if cpu is None else msgspec.structs.replace(found, cpu=cpu)


def with_trunk_on_host(calibration: Calibration) -> Calibration:
    """``calibration`` for a trunk that is on the CPU: activations travel to the GPU and back, and not to the CPU."""
    gpu, copy = calibration.gpu, calibration.activation_copy
    if gpu is None or copy is None:
        return calibration
    points = tuple(sorted({*gpu.tokens, *copy.tokens}))
    both = Curve(points, tuple(gpu.at(tokens) + copy.at(tokens) for tokens in points))
    return msgspec.structs.replace(calibration, gpu=both, activation_copy=None)


def check_calibration(calibration: Calibration) -> None:
    """Raises ValueError for figures that cannot have been measured."""
    rates = [calibration.memory_read, calibration.cpu_overlapped, calibration.copy_overlapped]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError("a rate is not a positive number")
    if calibration.cpu_overlapped < 1 or calibration.copy_overlapped < 1:
        raise ValueError("a factor of overlap is below 1")
    if not (math.isfinite(calibration.gpu_operation_s) and calibration.gpu_operation_s >= 0):
        raise ValueError("the time of an operation is not a number")
    if not (math.isfinite(calibration.weight_copy) and calibration.weight_copy >= 0):
        raise ValueError("the time of a copy is not a number")
    if calibration.gpu is not None and (calibration.weight_copy == 0 or calibration.activation_copy is None):
        raise ValueError("there is a GPU's curve without the copies to that GPU")
    for curve in (calibration.cpu, calibration.gpu, calibration.activation_copy):
        if curve is not None:
            _check_curve(curve)


def _check_curve(curve: Curve) -> None:
    if not curve.tokens or len(curve.tokens) != len(curve.seconds):
        raise ValueError("a curve has no points, or not one time for each number of tokens")
    if curve.tokens[0] < 1 or any(left >= right for left, right in zip(curve.tokens, curve.tokens[1:], strict=False)):
        raise ValueError("a curve's numbers of tokens do not ascend from 1 on")
    if not all(math.isfinite(seconds) and seconds > 0 for seconds in curve.seconds):
        raise ValueError("a curve holds a time that is not a positive number")
