"""Measuring the cost of one expert on this machine: the Twiddler paper's figure 7, and CPU and GPU working together.

The timed work is behind two small protocols, and the clock is a parameter. This module decides what is measured how
often, and makes a :class:`engine.planning.calibration.Calibration` of it. Each round has one measurement of each kind,
so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve, ExpertShape

TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
"""Numbers of tokens to measure, as far as the time allows. The curve continues linearly beyond the last one."""
FEWEST_POINTS = 6
"""Minimum count of numbers of tokens to measure, however slow the machine is, as decisions about beams need them."""
FEWEST_ROUNDS = 3
"""Minimum number of rounds, however slow the machine is."""
MOST_ROUNDS = 25
BUDGET_S = 30.0
"""Seconds for all measurements."""
GPU_SHARE = 0.4
"""Fraction of the time for a GPU, if there is one: its copies and computing, and both sides together."""
LONG_S = 0.1
"""Seconds of a measured call after which it is told how far measuring is, and may be cancelled."""
OPERATIONS = 200
"""Small operations on the GPU that are timed together."""
OVERLAP_S = 0.1
"""Seconds of each measurement of both sides together."""

Clock = Callable[[], float]
Report = Callable[[str, int, int, str], None]
"""Progress callback like :data:`engine.ipc.progress.ProgressCallback`. Raises Cancelled."""


class CpuSide(Protocol):
    """Experts on the CPU, through the kernels that run them in an answer."""

    @property
    def experts_per_call(self) -> int:
        """Number of different experts that one :meth:`run` runs, as a layer does."""
        ...

    def prepare(self, tokens: int) -> None:
        """Prepare :meth:`run` for ``tokens`` tokens. Not timed."""
        ...

    def run(self, tokens: int) -> None:
        """Run the next experts on ``tokens`` tokens each. They differ from the last ones, so that the caches do not
        hold them."""
        ...


class GpuSide(Protocol):
    """A device that holds some experts. Each call but the ``start_`` ones returns when the device is done."""

    @property
    def name(self) -> str: ...

    @property
    def experts_per_call(self) -> int:
        """Number of resident experts that one :meth:`run` runs, as a layer does."""
        ...

    def run(self, tokens: int) -> None:
        """Run resident experts on ``tokens`` tokens each."""
        ...

    def copy(self) -> None:
        """Copy one expert's weights from host memory. It differs from the last one."""
        ...

    def operations(self, count: int) -> None:
        """Run ``count`` small operations, each begun by the host."""
        ...

    def activations(self, tokens: int) -> None:
        """Copy activations of ``tokens`` tokens to the CPU, and as many results back."""
        ...

    def start_copies(self, count: int) -> Callable[[], tuple[float, float]]:
        """Begin ``count`` copies, one after the other. The returned function waits for them, and returns when the first
        began and the last ended, in seconds of the same clock."""
        ...


@dataclass
class Figures:
    """Measured seconds, one figure per round. Keys of the curves are numbers of tokens."""

    cpu: dict[int, list[float]] = field(default_factory=dict)
    gpu: dict[int, list[float]] = field(default_factory=dict)
    activations: dict[int, list[float]] = field(default_factory=dict)
    weight_copy: list[float] = field(default_factory=list)
    cpu_overlapped: list[float] = field(default_factory=list)
    """Factors by which the CPU was slower while copies ran."""
    copy_overlapped: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    """Seconds of one small operation on the GPU."""
    memory_read: list[float] = field(default_factory=list)
    """Rate at which memory is read, in bytes per second."""


def measure(
    cpu: CpuSide,
    gpu: GpuSide | None,
    memory_read: Callable[[], float],
    clock: Clock,
    report: Report = lambda stage, done, total, unit: None,
    budget_s: float = BUDGET_S,
    tokens: Sequence[int] = TOKENS,
) -> Figures:
    """All figures, within about ``budget_s`` seconds unless the machine is too slow for the fewest rounds.

    ``memory_read`` measures the rate at which the memory is read, once, in bytes per second.
    """
    figures = Figures()
    cpu_share = budget_s * (1.0 - GPU_SHARE) if gpu is not None else budget_s
    _measure_cpu(cpu, memory_read, figures, clock, report, cpu_share, tokens)
    if gpu is not None:
        _measure_gpu(cpu, gpu, figures, clock, report, budget_s - cpu_share)
    return figures


def calibration_of(figures: Figures, machine: str, shape: ExpertShape) -> Calibration:
    """The medians of ``figures``, made into curves that never fall."""
    gpu = curve_of(figures.gpu) if figures.gpu else None
    return Calibration(
        version=CALIBRATION_VERSION,
        machine=machine,
        shape=shape,
        cpu=curve_of(figures.cpu),
        memory_read=statistics.median(figures.memory_read),
        gpu=gpu,
        weight_copy=statistics.median(figures.weight_copy) if gpu is not None else 0.0,
        activation_copy=curve_of(figures.activations) if gpu is not None else None,
        cpu_overlapped=_factor(figures.cpu_overlapped),
        copy_overlapped=_factor(figures.copy_overlapped),
        gpu_operation_s=statistics.median(figures.operations) if figures.operations else 0.0,
    )


def never_falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (pooled neighbours): more tokens never cost less, whatever the noise."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _measure_cpu(
    cpu: CpuSide,
    memory_read: Callable[[], float],
    figures: Figures,
    clock: Clock,
    report: Report,
    budget_s: float,
    numbers: Sequence[int],
) -> None:
    start = clock()
    points: list[int] = []
    longest = 0.0
    # The first pass finds out which numbers of tokens are affordable; its figures pay for cold pages and are dropped.
    for tokens in numbers:
        report(f"trying experts on {tokens} token{'s' * (tokens != 1)}", 0, 0, "")
        cpu.prepare(tokens)
        longest = max(longest, _timed(lambda tokens=tokens: cpu.run(tokens), clock))  # type: ignore[misc]
        points.append(tokens)
        spent = clock() - start
        # A point with twice the tokens takes at most about twice as long, in every round.
        if len(points) >= FEWEST_POINTS and spent + FEWEST_ROUNDS * (spent + 2 * longest) > budget_s:
            break
    figures.cpu = {tokens: [] for tokens in points}
    for index in _rounds(budget_s - (clock() - start), clock):
        report("measuring experts on the CPU", index, MOST_ROUNDS, "")
        figures.memory_read.append(memory_read())
        cpu.run(points[0])  # what comes first pays for threads that sleep: nobody in particular should
        turned = index % len(points)
        seconds = 0.0
        for tokens in points[turned:] + points[:turned]:
            # Whoever is told draws it, on the cores that are measured: not between short calls.
            if seconds > LONG_S:
                report("measuring experts on the CPU", index, MOST_ROUNDS, "")
            seconds = _timed(lambda tokens=tokens: cpu.run(tokens), clock)  # type: ignore[misc]
            figures.cpu[tokens].append(seconds / cpu.experts_per_call)


def _measure_gpu(cpu: CpuSide, gpu: GpuSide, figures: Figures, clock: Clock, report: Report, budget_s: float) -> None:
    points = list(figures.cpu)
    figures.gpu = {tokens: [] for tokens in points}
    figures.activations = {tokens: [] for tokens in points}
    for tokens in points:  # warm up
        gpu.run(tokens)
        gpu.activations(tokens)
    gpu.copy()
    for index in _rounds(budget_s, clock):
        report(f"measuring {gpu.name}", index, MOST_ROUNDS, "")
        for tokens in points:
            seconds = _timed(lambda tokens=tokens: gpu.run(tokens), clock)  # type: ignore[misc]
            figures.gpu[tokens].append(seconds / gpu.experts_per_call)
            figures.activations[tokens].append(
                _timed(lambda tokens=tokens: gpu.activations(tokens), clock)  # type: ignore[misc]
            )
        figures.operations.append(_timed(lambda: gpu.operations(OPERATIONS), clock) / OPERATIONS)
        alone = _timed(gpu.copy, clock)
        figures.weight_copy.append(alone)
        report(f"measuring {gpu.name}", index, MOST_ROUNDS, "")
        _measure_both(cpu, gpu, figures, clock, alone)


def _measure_both(cpu: CpuSide, gpu: GpuSide, figures: Figures, clock: Clock, copy_alone: float) -> None:
    """Measure one row per expert on the CPU while weights are copied, and how much either slows the other."""
    call = statistics.median(figures.cpu[TOKENS[0]]) * cpu.experts_per_call
    if call <= 0 or copy_alone <= 0:
        return
    calls = max(1, round(OVERLAP_S / call))
    count = max(1, round(calls * call / copy_alone))
    finish = gpu.start_copies(count)
    cpu_start = clock()
    for _ in range(calls):
        cpu.run(TOKENS[0])
    cpu_end = clock()
    copy_start, copy_end = finish()
    both = min(cpu_end, copy_end) - max(cpu_start, copy_start)
    slowed = slowed_by(cpu_end - cpu_start, both, calls * call)
    stretched = slowed_by(copy_end - copy_start, both, count * copy_alone)
    if slowed is not None and stretched is not None:
        figures.cpu_overlapped.append(slowed)
        figures.copy_overlapped.append(stretched)


def slowed_by(took: float, both: float, alone: float) -> float | None:
    """The factor by which work is slower while the other side works, too.

    The work took ``took`` seconds, ``both`` of them beside the other side, and takes ``alone`` seconds by itself. None
    if both hardly overlapped.
    """
    share = alone - (took - both)
    return both / share if both > 0 and share > 0.1 * alone else None


def _rounds(budget_s: float, clock: Clock) -> Iterator[int]:
    """Numbers of the rounds until the next one would exceed the budget; never fewer than FEWEST_ROUNDS."""
    start = clock()
    for index in range(MOST_ROUNDS):
        if index >= FEWEST_ROUNDS and (clock() - start) * (index + 1) / index > budget_s:
            return
        yield index


def _timed(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return clock() - start


def curve_of(samples: dict[int, list[float]]) -> Curve:
    """The medians of ``samples`` (seconds, by number of tokens) as a curve that never falls."""
    tokens = sorted(samples)
    # A coarse clock must not give a time of zero.
    medians = [max(1e-9, statistics.median(samples[count])) for count in tokens]
    return Curve(tuple(tokens), tuple(never_falling(medians)))


def _factor(values: Sequence[float]) -> float:
    return max(1.0, statistics.median(values)) if values else 1.0
