"""How long one MoE layer takes when its active experts are shared by GPU and CPU: what every decision rests on.

The CPU runs its experts one after another. The GPU runs the resident ones while the weights of the others arrive, on a
stream of copies of their own, and runs each of those once it is there: a flow shop of two machines, copies and
computing. With equal copies of ``w`` seconds and computing times ``g``, the best order (residents first, then the moved
ones, longest first: Johnson's rule) ends after

    max( sum of all g,  w + sum of the moved g,  moved * w + the smallest moved g )

so copies cost nothing while there is computing to hide them, and computing costs one expert at the end of the copies.
While copies and CPU run at once each slows the other, because both read the host's memory: by the calibration's
``copy_overlapped`` and ``cpu_overlapped``, and only for as long as both are at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from engine.planning.calibration import Calibration

Place = Literal["gpu", "pmove", "amove"]
"""Where an active expert runs: on the GPU, where its weights are; on the GPU, its weights copied there first; on the
CPU, its activations sent there."""


@dataclass(frozen=True)
class ActiveExpert:
    """An expert of the layer to which ``tokens`` (at least 1) tokens were sent; ``resident``: it is in GPU memory."""

    expert: int
    tokens: int
    resident: bool


class LayerLoad(NamedTuple):
    """What both sides have to do, in seconds of undisturbed work."""

    cpu: float = 0.0
    """All experts on the CPU, their activations' way there and back included."""
    resident: float = 0.0
    """The GPU computes experts that are in its memory."""
    moved: float = 0.0
    """The GPU computes experts that were copied."""
    smallest_moved: float = 0.0
    """The shortest of these."""
    copies: int = 0
    """Slabs copied to the GPU."""


def sides(load: LayerLoad, calibration: Calibration) -> tuple[float, float]:
    """Seconds until the CPU and until the GPU are done with ``load``, both starting at once."""
    if not load.copies:
        return load.cpu, load.resident + load.moved
    copying = load.copies * calibration.weight_copy
    cpu = load.cpu
    if cpu > 0.0:
        slow_cpu, slow_copy = calibration.cpu_overlapped, calibration.copy_overlapped
        if slow_cpu * cpu <= slow_copy * copying:
            cpu, copying = slow_cpu * cpu, copying + slow_cpu * cpu * (1.0 - 1.0 / slow_copy)
        else:
            cpu, copying = cpu + slow_copy * copying * (1.0 - 1.0 / slow_cpu), slow_copy * copying
    gpu = max(
        load.resident + load.moved, copying / load.copies + load.moved, copying + min(load.smallest_moved, load.moved)
    )
    return cpu, gpu


def cpu_seconds(tokens: int, calibration: Calibration) -> float:
    """One expert on the CPU: its computing and its activations' way there and back."""
    copy = calibration.activation_copy
    return calibration.cpu.at(tokens) + (copy.at(tokens) if copy is not None else 0.0)


def gpu_seconds(tokens: int, calibration: Calibration) -> float:
    """One expert on the GPU, its weights being there. Raises ValueError if the calibration knows no GPU."""
    if calibration.gpu is None:
        raise ValueError(f"the calibration of {calibration.machine!r} has no GPU: measure one before sharing experts")
    return calibration.gpu.at(tokens)


class _Remembered(dict[int, float]):
    """Seconds by tokens: every layer of every step asks for the same."""

    def __init__(self, seconds: Callable[[int, Calibration], float], calibration: Calibration) -> None:
        super().__init__()
        self._seconds = seconds
        self._calibration = calibration

    def __missing__(self, tokens: int) -> float:
        found = self[tokens] = self._seconds(tokens, self._calibration)
        return found


@lru_cache(maxsize=8)
def remembered_seconds(calibration: Calibration) -> tuple[dict[int, float], dict[int, float]]:
    """:func:`cpu_seconds` and :func:`gpu_seconds` by tokens, for looking up."""
    return _Remembered(cpu_seconds, calibration), _Remembered(gpu_seconds, calibration)


def load_of(active: Sequence[ActiveExpert], places: Sequence[Place], calibration: Calibration) -> LayerLoad:
    """The work that ``places`` (same order as ``active``) gives to either side."""
    on_cpu, on_gpu = remembered_seconds(calibration)
    cpu = resident = moved = 0.0
    smallest = float("inf")
    copies = 0
    for each, place in zip(active, places, strict=True):
        if place == "amove":
            cpu += on_cpu[each.tokens]
            continue
        computing = on_gpu[each.tokens]
        if place == "gpu":
            resident += computing
        else:
            moved += computing
            smallest = min(smallest, computing)
            copies += 1
    return LayerLoad(cpu, resident, moved, smallest if copies else 0.0, copies)


def layer_sides(
    active: Sequence[ActiveExpert], places: Sequence[Place], calibration: Calibration
) -> tuple[float, float]:
    """Seconds until the CPU and until the GPU are done with a layer whose active experts run in ``places``."""
    return sides(load_of(active, places, calibration), calibration)
