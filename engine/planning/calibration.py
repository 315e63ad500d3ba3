"""The measured costs of one expert on one machine's GPU and CPU, on which every placement decision rests.

All times are in seconds, all rates in bytes per second. :mod:`engine.calibration.expert_cost` measures; this module
holds the results and what follows from them. (Twiddler paper, section 3.3 and appendix A, figure 7.)
"""

from __future__ import annotations

import math
from bisect import bisect_left

import msgspec

CALIBRATION_VERSION = 1
"""Version of the format. It rises when the meaning of a field changes. Other versions are refused."""


ESTIMATED_TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Numbers of tokens at which the curves of :func:`estimated` have points."""


UNPACKING_TRAFFIC = 32
"""Bytes read and written per packed weight while torch unpacks it: whole steps over codes, scales and products."""


class ExpertShape(msgspec.Struct, frozen=True):
    """The properties that decide an expert's cost."""

    hidden: int
    ffn: int
    dtype: str
    """The number format as stored: ``BF16``, ``F32``, or that of packed weights."""
    expert_bytes: int
    """Bytes of one expert as stored: gate, up, down and biases."""

    @property
    def weights(self) -> int:
        """Number of weights of gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def packed(self) -> bool:
        """Whether the weights are packed. Every plain format takes at least two bytes per weight."""
        return self.expert_bytes < 2 * self.weights


class Curve(msgspec.Struct, frozen=True):
    """Seconds by number of tokens, measured at ``tokens`` (ascending, the first is 1 or less).

    The curve is not a line through zero: on a CPU a few tokens cost as much as one, because the weights are read only
    once.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Seconds for ``tokens``, interpolated linearly between the measured points; 0.0 for no tokens.

        Beyond the last point the curve continues with the slope of the last two, but never falls.
        """
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
    """Assumptions of :func:`estimated` about a processor: bytes per second, operations per second, and seconds per
    expert."""

    memory_rate: float
    operations_rate: float
    fixed_s: float = 0.0
    unpacks: bool = False
    """Whether torch unpacks packed weights before it multiplies them."""

    def curve(self, shape: ExpertShape) -> Curve:
        """Seconds of one expert at ESTIMATED_TOKENS."""
        moved = shape.expert_bytes + (UNPACKING_TRAFFIC * shape.weights if self.unpacks and shape.packed else 0)
        reading, operations = moved / self.memory_rate, 2 * shape.weights / self.operations_rate
        return Curve(ESTIMATED_TOKENS, tuple(self.fixed_s + max(reading, n * operations) for n in ESTIMATED_TOKENS))


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The measured costs of one expert on one machine."""

    version: int
    machine: str
    """Processor, instruction set, threads and GPU. A calibration of another machine is refused."""
    shape: ExpertShape
    cpu: Curve
    """Seconds of one expert on the CPU."""
    memory_read: float
    """Rate at which the CPU streams weights, in bytes per second."""
    gpu: Curve | None = None
    """Seconds of one expert whose weights are in GPU memory; None without a GPU."""
    weight_copy: float = 0.0
    """Seconds of copying one slab from host to GPU memory."""
    activation_copy: Curve | None = None
    """Seconds of moving the activations of so many tokens to the CPU, and their results back."""
    cpu_overlapped: float = 1.0
    """Factor by which the CPU slows down while weights are being copied (at least 1)."""
    copy_overlapped: float = 1.0
    """Factor by which a copy slows down while the CPU runs experts (at least 1)."""
    gpu_operation_s: float = 0.0
    """Seconds of the host's time for one small operation on the GPU; 0: not measured."""


GUESSED_CPU = Processor(memory_rate=40e9, operations_rate=1e12, fixed_s=20e-6)
GUESSED_GPU = Processor(memory_rate=600e9, operations_rate=60e12, fixed_s=40e-6, unpacks=True)
GUESSED_PCIE = 20e9
GUESSED_OPERATION_S = 5e-6
"""Seconds of the host's time for one small operation on an unmeasured GPU. With the rates above it describes a desktop
computer with a mid-range GPU, in bytes and operations per second."""


def estimated(
    shape: ExpertShape,
    *,
    cpu: Processor,
    gpu: Processor | None = None,
    pcie_rate: float = 0.0,
    machine: str = "estimated",
    activation_bytes: int = 2,
) -> Calibration:
    """A calibration from rates alone, for other people's machines, and before measuring.

    An expert takes the time of reading its weights or of its operations, whichever is longer, plus a fixed time.
    Activations travel as numbers of ``activation_bytes``, both ways. No slowdown is assumed when both sides are busy.

    Raises ValueError for a GPU without a ``pcie_rate``.
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
    """An assumed calibration of a machine whose GPU was not measured. ``cpu``: the measured CPU, if there is one."""
    found = estimated(
        shape, cpu=GUESSED_CPU, gpu=GUESSED_GPU, pcie_rate=GUESSED_PCIE, activation_bytes=activation_bytes
    )
    found = msgspec.structs.replace(found, gpu_operation_s=GUESSED_OPERATION_S)
    return found if cpu is None else msgspec.structs.replace(found, cpu=cpu)


def with_trunk_on_host(calibration: Calibration) -> Calibration:
    """``calibration`` for a trunk on the CPU: activations travel to the GPU and back, instead of to the CPU."""
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
