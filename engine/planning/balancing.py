"""Which active experts of a layer go to the CPU, so that both sides are done soonest: the ``balanced`` policy's solver.

Experts with the same number of tokens and the same residency are interchangeable, so an answer is how many of each
*kind* the CPU gets. Two steps, both deterministic:

1. Cuts, in O(E log E). Experts that are not resident leave the GPU in one of two orders: fewest tokens first (right
   when copies bound the GPU's side, for then each saves the same copy), or smallest gain from a GPU first (right when
   computing bounds it). At every cut the residents follow in order of their gain, as far as that helps: where both
   sides are level, found by bisection.
2. If there are few kinds, branch and bound below the best cut, at most ``SEARCH_NODES`` nodes. Nine experts fit in any
   case, one row's experts always (they are of two kinds), and then the answer is the optimum of the model in
   :mod:`engine.planning.layer_time`. With many kinds a cut is within a percent or so: what it can miss is part of one
   expert's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from engine.planning.calibration import Calibration
from engine.planning.layer_time import Load, cpu_seconds, gpu_seconds, sides

SEARCH_NODES = 1500
"""Nodes that branch and bound may open, about a microsecond each: nine experts of nine kinds open at most 1023."""
SEARCH_KINDS = 32
"""With more kinds than this the cut is taken as it is."""


@dataclass(frozen=True)
class Kind:
    """``count`` active experts of the same number of tokens and residency; ``cpu``, ``gpu``: seconds of one there."""

    resident: bool
    count: int
    cpu: float
    gpu: float


@dataclass(frozen=True)
class Answer:
    """``on_cpu`` of each kind run on the CPU; ``slowest`` is the time of the later side, ``work`` that of all parts."""

    slowest: float
    work: float
    on_cpu: tuple[int, ...]

    def better_than(self, other: Answer) -> bool:
        """Sooner done; if equally soon, with less work (fewer copies, less heat)."""
        return (self.slowest, self.work) < (other.slowest, other.work)


def share(counted: tuple[tuple[int, bool, int], ...], calibration: Calibration) -> tuple[int, ...]:
    """How many experts of each kind ``(tokens, resident, count)`` the CPU should run. Remembered: steps repeat."""
    return _share(counted, calibration)


@lru_cache(maxsize=8192)
def _share(counted: tuple[tuple[int, bool, int], ...], calibration: Calibration) -> tuple[int, ...]:
    kinds = [
        Kind(resident, count, cpu_seconds(tokens, calibration), gpu_seconds(tokens, calibration))
        for tokens, resident, count in counted
    ]
    found = _best_cut(kinds, calibration)
    return (_Search(kinds, calibration, found).run() if len(kinds) <= SEARCH_KINDS else found).on_cpu


def weigh(kinds: Sequence[Kind], on_cpu: Sequence[int], calibration: Calibration) -> Answer:
    """What it takes to run ``on_cpu`` of each kind on the CPU and the others on the GPU."""
    cpu = resident = moved = 0.0
    smallest = float("inf")
    copies = 0
    for kind, there in zip(kinds, on_cpu, strict=True):
        here = kind.count - there
        cpu += there * kind.cpu
        if kind.resident:
            resident += here * kind.gpu
        elif here:
            moved += here * kind.gpu
            copies += here
            smallest = min(smallest, kind.gpu)
    load = Load(cpu, resident, moved, smallest if copies else 0.0, copies)
    return Answer(max(sides(load, calibration)), _work(load, calibration), tuple(on_cpu))


def _work(load: Load, calibration: Calibration) -> float:
    return load.cpu + load.resident + load.moved + load.copies * calibration.weight_copy


@dataclass(frozen=True)
class _Queue:
    """Experts in the order in which they leave the GPU, with the sums of both sides at every cut."""

    kinds: tuple[int, ...]
    cpu: tuple[float, ...]
    """``cpu[n]``: seconds on the CPU of the first ``n``."""
    gpu: tuple[float, ...]
    """``gpu[n]``: seconds on the GPU of all but the first ``n``."""
    smallest: tuple[float, ...]
    """``smallest[n]``: the shortest of those, 0.0 if there are none."""

    @classmethod
    def of(cls, kinds: Sequence[Kind], order: Sequence[int]) -> _Queue:
        places = tuple(place for place in order for _ in range(kinds[place].count))
        backwards = [kinds[place].gpu for place in reversed(places)]
        return cls(
            kinds=places,
            cpu=tuple(accumulate((kinds[place].cpu for place in places), initial=0.0)),
            gpu=tuple(reversed(list(accumulate(backwards, initial=0.0)))),
            smallest=(*reversed(list(accumulate(backwards, min))), 0.0),
        )

    @property
    def length(self) -> int:
        return len(self.kinds)


def _best_cut(kinds: Sequence[Kind], calibration: Calibration) -> Answer:
    def gain(place: int) -> float:
        return kinds[place].cpu / max(kinds[place].gpu, 1e-12)

    missing = [place for place, kind in enumerate(kinds) if not kind.resident]
    residents = _Queue.of(kinds, sorted((place for place, kind in enumerate(kinds) if kind.resident), key=gain))
    orders = [sorted(missing, key=lambda place: kinds[place].cpu), sorted(missing, key=gain)]
    best: tuple[float, float] | None = None
    cut: tuple[_Queue, int, int] | None = None
    for queue in [_Queue.of(kinds, order) for order in (orders if orders[0] != orders[1] else orders[:1])]:
        for left in range(queue.length + 1):
            value, followed = _best_following(queue, left, residents, calibration)
            if best is None or value < best:
                best, cut = value, (queue, left, followed)
    assert cut is not None
    on_cpu = [0] * len(kinds)
    for place in (*cut[0].kinds[: cut[1]], *residents.kinds[: cut[2]]):
        on_cpu[place] += 1
    return weigh(kinds, on_cpu, calibration)


def _best_following(
    queue: _Queue, left: int, residents: _Queue, calibration: Calibration
) -> tuple[tuple[float, float], int]:
    """(slowest side, work) and how many residents follow ``left`` others to the CPU for that."""

    def both(followed: int) -> tuple[float, float, float]:
        load = Load(
            cpu=queue.cpu[left] + residents.cpu[followed],
            resident=residents.gpu[followed],
            moved=queue.gpu[left],
            smallest_moved=queue.smallest[left],
            copies=queue.length - left,
        )
        cpu, gpu = sides(load, calibration)
        return cpu, gpu, _work(load, calibration)

    low, high = 0, residents.length
    while low < high:
        middle = (low + high) // 2
        cpu, gpu, _ = both(middle)
        if cpu >= gpu:
            high = middle
        else:
            low = middle + 1
    found = []
    for followed in {0, max(0, low - 1), low}:
        cpu, gpu, work = both(followed)
        found.append(((max(cpu, gpu), work), followed))
    return min(found)


class _Search:
    """Branch and bound, the kinds with the most work first; a branch whose sums already exceed the best is left."""

    def __init__(self, kinds: Sequence[Kind], calibration: Calibration, best: Answer) -> None:
        self._kinds = kinds
        self._calibration = calibration
        self._best = best
        self._order = sorted(range(len(kinds)), key=lambda place: -kinds[place].cpu)
        self._on_cpu = [0] * len(kinds)
        self._nodes = 0

    def run(self) -> Answer:
        self._open(0, 0.0, 0.0, 0)
        return self._best

    def _open(self, depth: int, cpu: float, computing: float, copies: int) -> None:
        self._nodes += 1
        bound = max(cpu, computing, copies * self._calibration.weight_copy)
        if self._nodes > SEARCH_NODES or bound > self._best.slowest:
            return
        if depth == len(self._order):
            found = weigh(self._kinds, self._on_cpu, self._calibration)
            if found.better_than(self._best):
                self._best = found
            return
        place = self._order[depth]
        kind = self._kinds[place]
        for there in range(kind.count + 1):
            here = kind.count - there
            self._on_cpu[place] = there
            more = 0 if kind.resident else here
            self._open(depth + 1, cpu + there * kind.cpu, computing + here * kind.gpu, copies + more)
        self._on_cpu[place] = 0
