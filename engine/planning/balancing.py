"""The solver of the ``balanced`` policy: it chooses the active experts of a layer that run on the CPU, so that the
later side is done soonest.

Experts with the same number of tokens and the same residency are interchangeable, so an answer is the number of experts
of each *kind* on the CPU. Two steps, both deterministic:

1. Cuts, in O(E log E). Experts that are not resident leave the GPU in one of two orders: fewest tokens first (best when
copies bound the GPU's side, because each saves the same copy), or smallest gain from a GPU first (best when computing
bounds it). At every cut residents follow in order of their gain, up to the point at which both sides are level, which
bisection finds.

2. With few experts, branch and bound below the best cut, at most ``SEARCH_NODES`` nodes. Nine experts always fit, so
their answer is the optimum of this module's model. With many experts a cut is within about a percent: it can miss only
a part of one expert's time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from engine.planning.calibration import Calibration

SEARCH_NODES = 1500
"""Maximum nodes that branch and bound opens, about a microsecond each. Nine experts of nine kinds open at most 1023."""
SEARCH_KINDS = 32
SEARCH_EXPERTS = 64
"""Maximum kinds and active experts for the search. With more of them a cut misses only a small part of the whole."""

_ROUNDING = 1e-9
"""Relative rounding error of compared sums, always less than one expert's time."""


class Kind(NamedTuple):
    """``number`` active experts with the same number of tokens and the same residency. ``cpu``, ``gpu``: seconds of one
    expert on either side."""

    resident: bool
    number: int
    cpu: float
    gpu: float


@dataclass(frozen=True)
class Split:
    """The experts of each kind that run on the CPU (``on_cpu``), the seconds until the later side is done
    (``slowest``), and the seconds of all work (``work``)."""

    slowest: float
    work: float
    on_cpu: tuple[int, ...]

    def better_than(self, other: Split) -> bool:
        """Whether this split is done sooner or, if equally soon, with less work (fewer copies, less heat)."""
        return (self.slowest, self.work) < (other.slowest, other.work)


def share(counted: tuple[tuple[int, bool, int], ...], calibration: Calibration) -> tuple[int, ...]:
    """Number of experts of each kind ``(tokens, resident, count)`` that the CPU should run. Cached, because steps
    repeat."""
    return _share(counted, calibration)


@lru_cache(maxsize=8192)
def _share(counted: tuple[tuple[int, bool, int], ...], calibration: Calibration) -> tuple[int, ...]:
    cpu, gpu = remembered_seconds(calibration)
    kinds = [Kind(resident, count, cpu[tokens], gpu[tokens]) for tokens, resident, count in counted]
    on_cpu = _best_cut(kinds, calibration)
    if len(kinds) > SEARCH_KINDS or sum(kind.number for kind in kinds) > SEARCH_EXPERTS:
        return on_cpu
    return _SplitSearch(kinds, calibration, weigh(kinds, on_cpu, calibration)).run().on_cpu


def weigh(kinds: Sequence[Kind], on_cpu: Sequence[int], calibration: Calibration) -> Split:
    """The time and work of running ``on_cpu`` of each kind on the CPU and the others on the GPU."""
    cpu = resident = moved = 0.0
    smallest = float("inf")
    copies = 0
    for kind, there in zip(kinds, on_cpu, strict=True):
        here = kind.number - there
        cpu += there * kind.cpu
        if kind.resident:
            resident += here * kind.gpu
        elif here:
            moved += here * kind.gpu
            copies += here
            smallest = min(smallest, kind.gpu)
    load = LayerLoad(cpu, resident, moved, smallest if copies else 0.0, copies)
    return Split(max(sides(load, calibration)), _work(load, calibration), tuple(on_cpu))


def _work(load: LayerLoad, calibration: Calibration) -> float:
    return load.cpu + load.resident + load.moved + load.copies * calibration.weight_copy


@dataclass(frozen=True)
class _Queue:
    """Experts in the order in which they leave the GPU, with the sums of both sides at every cut."""

    kinds: list[int]
    cpu: list[float]
    """``cpu[n]``: seconds on the CPU of the first ``n``."""
    gpu: list[float]
    """``gpu[n]``: seconds on the GPU of all but the first ``n``."""
    smallest: list[float]
    """``smallest[n]``: seconds of the shortest of those, 0.0 if there are none."""
    length: int

    @classmethod
    def of(cls, kinds: Sequence[Kind], order: Sequence[int]) -> _Queue:
        places: list[int] = []
        cpu: list[float] = []
        gpu: list[float] = []
        for place in order:
            _, count, on_cpu, on_gpu = kinds[place]
            places += [place] * count
            cpu += [on_cpu] * count
            gpu += [on_gpu] * count
        gpu.reverse()
        return cls(
            kinds=places,
            cpu=list(accumulate(cpu, initial=0.0)),
            gpu=list(accumulate(gpu, initial=0.0))[::-1],
            smallest=[*list(accumulate(gpu, min))[::-1], 0.0],
            length=len(places),
        )


def _best_cut(kinds: Sequence[Kind], calibration: Calibration) -> tuple[int, ...]:
    """Number of experts of each kind that run on the CPU after the best cut."""
    gain = [kind.cpu / max(kind.gpu, 1e-12) for kind in kinds].__getitem__
    missing = [place for place, kind in enumerate(kinds) if not kind.resident]
    residents = _Queue.of(kinds, sorted((place for place, kind in enumerate(kinds) if kind.resident), key=gain))
    orders = [sorted(missing, key=lambda place: kinds[place].cpu), sorted(missing, key=gain)]
    if orders[0] == orders[1]:
        del orders[1]
    cuts = [_Cuts(_Queue.of(kinds, order), residents, calibration) for order in orders]
    # Whatever is later than a cut that is there already is left out.
    soonest = min(cut.at_a_glance() for cut in cuts)
    best: tuple[float, float] | None = None
    chosen: tuple[_Queue, int, int] | None = None
    for cut in cuts:
        for left in cut.worth_a_look(soonest):
            value, followed = cut.best_following(left)
            if best is None or value < best:
                best, chosen = value, (cut.queue, left, followed)
                soonest = min(soonest, value[0])
    assert chosen is not None
    on_cpu = [0] * len(kinds)
    for place in (*chosen[0].kinds[: chosen[1]], *residents.kinds[: chosen[2]]):
        on_cpu[place] += 1
    return tuple(on_cpu)


class _Cuts:
    """Cuts of ``queue``. At each cut as many of ``residents`` follow to the CPU as helps."""

    def __init__(self, queue: _Queue, residents: _Queue, calibration: Calibration) -> None:
        self.queue = queue
        self._residents = residents
        self._calibration = calibration
        self._ahead = [cpu - gpu for cpu, gpu in zip(residents.cpu, residents.gpu, strict=True)]
        """Seconds by which the CPU's work exceeds the GPU's, by the number of residents on the CPU; ascending."""

    def at_a_glance(self) -> float:
        """Seconds in which a good cut is done. Cuts that take longer cannot be the best one."""
        low, high = 0, self.queue.length
        while low < high:
            middle = (low + high) // 2
            cpu, gpu, _ = self._sides(middle, self._level(middle))
            low, high = (low, middle) if cpu >= gpu else (middle + 1, high)
        return min(self.best_following(left)[0][0] for left in {max(0, low - 1), low})

    def worth_a_look(self, soonest: float) -> Iterator[int]:
        """The cuts, ascending, that may be done by ``soonest``. At the others one side alone takes longer."""
        queue, residents = self.queue, self._residents
        most, ahead, left_on_gpu = residents.length, self._ahead, residents.gpu
        weight_copy, latest = self._calibration.weight_copy, soonest * (1.0 + _ROUNDING)
        for left, (on_cpu, moved, smallest) in enumerate(zip(queue.cpu, queue.gpu, queue.smallest, strict=True)):
            if on_cpu > latest:
                return
            if (queue.length - left) * weight_copy + smallest > latest:
                continue
            level = min(most, bisect_left(ahead, moved - on_cpu))
            if level and left_on_gpu[level - 1] + moved <= latest:
                yield left
            elif on_cpu + residents.cpu[level] <= latest:
                # As copies slow it down.
                cpu, gpu, _ = self._sides(left, level)
                if (cpu if most else max(cpu, gpu)) <= latest:
                    yield left

    def best_following(self, left: int) -> tuple[tuple[float, float], int]:
        """The slowest side and the work, in seconds, with the best number of residents that follow ``left`` others to
        the CPU.

        The best number makes both sides level, or is one fewer, or zero.
        """
        sides_by_followers: dict[int, tuple[float, float, float]] = {}

        def at(followed: int) -> tuple[float, float, float]:
            if followed not in sides_by_followers:
                sides_by_followers[followed] = self._sides(left, followed)
            return sides_by_followers[followed]

        def cpu_is_later(followed: int) -> bool:
            cpu, gpu, _ = at(followed)
            return cpu >= gpu

        guess = low = self._level(left)
        high = self._residents.length
        # The copies are not in the guess: with them more residents, or fewer, may make both sides level.
        if guess == high or cpu_is_later(guess):
            low, high = (guess if guess and not cpu_is_later(guess - 1) else 0), guess
        else:
            low = guess + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if cpu_is_later(middle) else (middle + 1, high)
        return min(((max(cpu, gpu), work), n) for n in {0, max(0, low - 1), low} for cpu, gpu, work in [at(n)])

    def _level(self, left: int) -> int:
        """Number of residents that make both sides level, without copies."""
        even = self.queue.gpu[left] - self.queue.cpu[left]
        return min(self._residents.length, bisect_left(self._ahead, even))

    def _sides(self, left: int, followed: int) -> tuple[float, float, float]:
        """Seconds of the CPU, of the GPU, and of all work."""
        queue, residents = self.queue, self._residents
        load = LayerLoad(
            queue.cpu[left] + residents.cpu[followed],
            residents.gpu[followed],
            queue.gpu[left],
            queue.smallest[left],
            queue.length - left,
        )
        cpu, gpu = sides(load, self._calibration)
        return cpu, gpu, _work(load, self._calibration)


class _SplitSearch:
    """Branch and bound over the kinds, those with the most work first. Branches whose sums exceed the best are cut
    off."""

    def __init__(self, kinds: Sequence[Kind], calibration: Calibration, best: Split) -> None:
        self._kinds = kinds
        self._calibration = calibration
        self._best = best
        self._order = sorted(range(len(kinds)), key=lambda place: -kinds[place].cpu)
        self._on_cpu = [0] * len(kinds)
        self._nodes = 0

    def run(self) -> Split:
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
        for there in range(kind.number + 1):
            here = kind.number - there
            self._on_cpu[place] = there
            more = 0 if kind.resident else here
            self._open(depth + 1, cpu + there * kind.cpu, computing + here * kind.gpu, copies + more)
        self._on_cpu[place] = 0


# --- how long a layer takes ------------------------------------------------------------------------------------------


Place = Literal["gpu", "pmove", "amove"]
"""Device of an active expert. ``gpu``: the GPU, which has its weights. ``pmove``: the GPU, after its weights are copied
there. ``amove``: the CPU, to which its activations are sent."""


@dataclass(frozen=True)
class ActiveExpert:
    """An expert of the layer to which ``tokens`` (at least 1) tokens were sent; ``resident``: it is in GPU memory."""

    expert: int
    tokens: int
    resident: bool


class LayerLoad(NamedTuple):
    """The work of both sides of a layer, in seconds without disturbance."""

    cpu: float = 0.0
    """Seconds of all experts on the CPU, with the transfer of their activations both ways."""
    resident: float = 0.0
    """Seconds of resident experts on the GPU."""
    moved: float = 0.0
    """Seconds of copied experts on the GPU."""
    smallest_moved: float = 0.0
    """Seconds of the shortest copied expert."""
    copies: int = 0
    """Number of slabs copied to the GPU."""


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
    """Seconds of one expert on the CPU, with the transfer of its activations both ways."""
    copy = calibration.activation_copy
    return calibration.cpu.at(tokens) + (copy.at(tokens) if copy is not None else 0.0)


def gpu_seconds(tokens: int, calibration: Calibration) -> float:
    """Seconds of one expert on the GPU, whose weights are there. Raises ValueError if the calibration knows no GPU."""
    if calibration.gpu is None:
        raise ValueError(f"the calibration of {calibration.machine!r} has no GPU: measure one before sharing experts")
    return calibration.gpu.at(tokens)


class _Remembered(dict[int, float]):
    """A cache of seconds by number of tokens: every layer of every step asks for the same ones."""

    def __init__(self, seconds: Callable[[int, Calibration], float], calibration: Calibration) -> None:
        super().__init__()
        self._seconds = seconds
        self._calibration = calibration

    def __missing__(self, tokens: int) -> float:
        found = self[tokens] = self._seconds(tokens, self._calibration)
        return found


@lru_cache(maxsize=8)
def remembered_seconds(calibration: Calibration) -> tuple[dict[int, float], dict[int, float]]:
    """Caches of :func:`cpu_seconds` and :func:`gpu_seconds`, by number of tokens."""
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
