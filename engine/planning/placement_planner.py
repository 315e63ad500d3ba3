"""Which node of a ring gets which experts: every expert once, then replicas where memory is left. Pure.

All experts of a model are slabs of one size, so a placement exists exactly if the nodes' rooms hold them all, counted
in whole slabs. The five steps give the same result on every machine:

1. *Numbers.* Each node gets experts in proportion to its speed, as far as it has room, evenly over the layers.
2. *Owners.* Layer by layer, the most used experts first, each to the node with the least expected load so far.
3. *Replicas.* The room left over, evenly over the layers: the most used expert that only the busiest node holds gets a
replica on the node that shares the fewest with it. A token's experts can then be shared out more evenly, which lowers
the expected maximum per layer (overlapping placement, section 5.3 of the paper of private LLMs on Apple Silicon).
4. *Local search.* Where a layer has few enough outcomes: single moves and exchanges that lower the expected maximum.
5. *Pruning.* Replicas that hardly lower the expected maximum are left out, first those that would have to be sent: free
   room alone is no reason to send gigabytes.

For up to six experts on three nodes the result is within 5 % of the best of all placements of a layer, as the tests
check. Larger instances have no such bound. Which layer gets the odd slot, where memory does not divide by the layers,
does not depend on popularity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.planning.placement import ExpertGrid, Placement
from engine.planning.placement_search import SAMPLED, LocalSearch, ReplicaPruning, Rows


@dataclass(frozen=True)
class _Layer:
    """The inputs of a layer's placement. Layers with equal inputs are placed alike."""

    owned: tuple[int, ...]
    """Number of experts that each rank owns."""
    further: tuple[int, ...]
    """Maximum number of replicas on each rank, beside those."""
    popularity: tuple[float, ...]
    there: tuple[tuple[int, ...], ...]
    """Experts that are already stored on each rank."""


@dataclass(frozen=True)
class NodeRoom:
    """The bytes that one node has for experts, and its seconds per expert, absolute or relative to the others'."""

    expert_bytes: int
    seconds: float = 1.0


@dataclass(frozen=True)
class Shortfall:
    """Reason without a placement: holding each expert once takes ``missing_bytes`` more."""

    missing_bytes: int
    needed_bytes: int
    room_bytes: int


def place(
    grid: ExpertGrid,
    rooms: Sequence[NodeRoom],
    popularity: Sequence[Sequence[float]] = (),
    overlap: bool = True,
    has: Sequence[Mapping[int, Sequence[int]]] = (),
    all_hold: bool = False,
) -> Placement | Shortfall:
    """A placement of ``grid`` on the nodes ``rooms``, in rank order, or the shortfall.

    ``popularity``: routes counted before, [layer of the grid][expert]; empty: even use. ``overlap``: an expert may be
    held by more than one node. ``has``: per rank, layer to experts that are already stored there; they are preferred
    where they serve as well as others. ``all_hold``: every node with room gets an expert, however slow it is, as long
    as another one has two. Raises ValueError without nodes, for a node without speed, or a popularity of another model.
    """
    check(grid, rooms, popularity)
    slots = [min(max(0, room.expert_bytes) // grid.slab_bytes, grid.slabs) if grid.slab_bytes else 0 for room in rooms]
    if sum(slots) < grid.slabs:
        room_bytes = sum(max(0, room.expert_bytes) for room in rooms)
        missing = (grid.slabs - sum(slots)) * grid.slab_bytes
        return Shortfall(missing, grid.slabs * grid.slab_bytes, room_bytes)
    seconds = [room.seconds for room in rooms]
    owned = numbers(slots, seconds, grid.slabs)
    per_layer = dealt(owned, len(grid.layers))
    spare = [slot - own for slot, own in zip(slots, owned, strict=True)]
    further = _replica_slots(spare, per_layer, grid.experts)
    layers = [
        _Layer(
            per_layer[at],
            further[at],
            tuple(popularity[at]) if popularity else (),
            tuple(tuple(sorted(set(each.get(layer, ())))) for each in has) or ((),) * len(rooms),
        )
        for at, layer in enumerate(grid.layers)
    ]
    different = list(dict.fromkeys(layers))
    search = LocalSearch(grid.per_token, seconds, len(different))
    placed = {layer: _holders(layer, grid.experts, seconds, overlap, search) for layer in different}
    if overlap:
        placed = _pruned(placed, grid.per_token, seconds)
    rows = [placed[layer] for layer in layers]
    if all_hold:
        for rank, slot in enumerate(slots):
            rows = _with_one_for(rank, rows) if slot else rows
    return Placement(grid.layers, len(rooms), tuple(rows))


def place_held(
    grid: ExpertGrid, rooms: Sequence[NodeRoom], has: Sequence[Mapping[int, Sequence[int]]], overlap: bool = True
) -> Placement | None:
    """A placement in which every node uses only experts that it ``has`` (per rank, by layer), or None if there is none.

    Each expert has one owner. The owners of a layer are as even, by the nodes' seconds, as what they have allows. With
    ``overlap`` the room left over is for replicas.
    """
    slots = [min(max(0, room.expert_bytes) // grid.slab_bytes, grid.slabs) for room in rooms]
    able = {
        (layer, expert): [rank for rank, each in enumerate(has) if slots[rank] and expert in each.get(layer, ())]
        for layer in grid.layers
        for expert in range(grid.experts)
    }
    owners = _Owners(slots, [room.seconds for room in rooms], able)
    # Who alone has an expert owns it; then one of each layer after the other, so that no layer gets all of the room.
    order = sorted(able, key=lambda place: (len(able[place]), place[1], place[0]))
    if sum(slots) < grid.slabs or not all(map(owners.own, order)):
        return None
    for layer in grid.layers:
        owners.even_out([(layer, expert) for expert in range(grid.experts)])
    holders = {place: [owner] for place, owner in owners.of.items()}
    if overlap:
        for rank, slot in enumerate(slots):
            others = [place for place in order if rank in able[place] and rank not in holders[place]]
            for place in others[: slot - owners.count[rank]]:
                holders[place].append(rank)
    rows = [tuple(tuple(sorted(holders[layer, expert])) for expert in range(grid.experts)) for layer in grid.layers]
    return Placement(grid.layers, len(rooms), tuple(rows))


class _Owners:
    """One owner for each expert (layer, expert) among the ranks that are ``able``; no rank has more than its slots."""

    def __init__(
        self, slots: Sequence[int], seconds: Sequence[float], able: Mapping[tuple[int, int], Sequence[int]]
    ) -> None:
        self._slots = slots
        self._seconds = seconds
        self._able = able
        self.of: dict[tuple[int, int], int] = {}
        self.count = [0] * len(slots)
        self._loads: dict[tuple[int, int], int] = {}
        """Number of owned experts, by layer and rank."""
        self._could: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
        """Owned experts, by their owner and another rank that could own them."""

    def own(self, place: tuple[int, int]) -> bool:
        """Give ``place`` an owner. Full ranks pass experts on to make room. Returns False if no rank can take it."""
        came: dict[int, int | None] = dict.fromkeys(self._able[place])
        queue = sorted(came, key=lambda rank: self._after(place[0], rank))
        for rank in queue:  # grows while it is gone through: the shortest chain of ranks that hand something on
            if self.count[rank] < self._slots[rank]:
                break
            for other in range(len(self._slots)):
                if other not in came and self._could.get((rank, other)):
                    came[other] = rank
                    queue.append(other)
        else:
            return False
        while (before := came[rank]) is not None:
            handed = next(iter(self._could[before, rank]))
            self._give(handed, rank)
            rank = before
        self._give(place, rank)
        return True

    def even_out(self, places: Sequence[tuple[int, int]]) -> None:
        """Take some of ``places``, the experts of one layer, from the slowest rank, until no rank that has room would
        finish sooner with one more. Ranks between them pass another expert of the layer on."""
        layer, ranks = places[0][0], range(len(self._slots))
        while True:
            busiest = max(ranks, key=lambda rank: self._loads.get((layer, rank), 0) * self._seconds[rank])
            longest = self._loads.get((layer, busiest), 0) * self._seconds[busiest]
            came: dict[int, tuple[int, tuple[int, int]]] = {}
            queue = [busiest]
            for before in queue:  # grows while it is gone through
                for place in places:
                    for rank in self._able[place] if self.of[place] == before else ():
                        if rank not in came and rank != busiest:
                            came[rank] = before, place
                            queue.append(rank)
            sooner = [rank for rank in came if self.count[rank] < self._slots[rank]]
            rank = min(sooner, key=lambda rank: (self._after(layer, rank), rank), default=busiest)
            if rank == busiest or self._after(layer, rank) >= longest:
                return
            while rank != busiest:
                before, place = came[rank]
                self._give(place, rank)
                rank = before

    def _after(self, layer: int, rank: int) -> float:
        """Seconds of ``layer`` on ``rank`` with one more expert."""
        return (self._loads.get((layer, rank), 0) + 1) * self._seconds[rank]

    def _give(self, place: tuple[int, int], rank: int) -> None:
        before = self.of.get(place)
        if before is not None:
            self.count[before] -= 1
            self._loads[place[0], before] -= 1
            for other in self._able[place]:
                self._could.get((before, other), {}).pop(place, None)
        self.of[place] = rank
        self.count[rank] += 1
        self._loads[place[0], rank] = self._loads.get((place[0], rank), 0) + 1
        for other in self._able[place]:
            if other != rank:
                self._could.setdefault((rank, other), {})[place] = None


def _with_one_for(rank: int, rows: list[Rows]) -> list[Rows]:
    """``rows`` with an expert for ``rank`` if it holds none. It comes from the rank that holds the most and keeps at
    least one."""
    counts: dict[int, int] = {}
    for holders in (each for row in rows for each in row):
        for holder in holders:
            counts[holder] = counts.get(holder, 0) + 1
    alone = {holders[0] for row in rows for holders in row if len(holders) == 1}
    most = max(alone, key=lambda one: (counts[one], -one), default=rank)
    if rank in counts or counts.get(most, 0) < 2:
        return rows
    at = next(at for at in reversed(range(len(rows))) if (most,) in rows[at])
    expert = max(index for index, holders in enumerate(rows[at]) if holders == (most,))
    changed = tuple((rank,) if index == expert else holders for index, holders in enumerate(rows[at]))
    return [changed if index == at else row for index, row in enumerate(rows)]


def _holders(layer: _Layer, experts: int, seconds: Sequence[float], overlap: bool, search: LocalSearch) -> Rows:
    """The holders of one layer's experts."""
    kept = tuple(_some(each, experts) for each in layer.there)
    holders = spread(experts, layer.owned, layer.popularity, seconds, kept)
    if overlap:
        holders = with_replicas(holders, layer.further, layer.popularity, seconds, kept)
    if any(kept):  # what is stored already is not moved for a little gain
        return tuple(tuple(sorted(ranks)) for ranks in holders)
    limits = [own + more for own, more in zip(layer.owned, layer.further, strict=True)]
    return search.improved(holders, limits, layer.popularity)


def _pruned(placed: Mapping[_Layer, Rows], per_token: int, seconds: Sequence[float]) -> dict[_Layer, Rows]:
    """``placed`` without needless replicas.

    If many layers differ, evenly spread layers are examined. The others lose the same share as the neediest of these.
    """
    layers = list(placed)
    looked = [layers[at * len(layers) // SAMPLED] for at in range(SAMPLED)] if len(layers) > SAMPLED else layers
    pruning = ReplicaPruning(per_token, seconds, len(looked))
    parts = {layer: pruning.parts(placed[layer], layer.popularity, layer.there) for layer in looked}
    least = min(first for first, _ in parts.values()), min(second for _, second in parts.values())
    return {
        layer: pruning.pruned(rows, layer.popularity, layer.there, parts.get(layer, least))
        for layer, rows in placed.items()
    }


def _some(there: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """The experts of a layer stored on a rank. Empty if it stores all of them, because then none needs preference."""
    return there if len(there) < experts else ()


def check(grid: ExpertGrid, rooms: Sequence[NodeRoom], popularity: Sequence[Sequence[float]]) -> None:
    """Check the arguments of :func:`place`. Raises ValueError."""
    if not rooms:
        raise ValueError("a placement needs at least one node")
    if any(not 0 < room.seconds < float("inf") for room in rooms):
        raise ValueError(f"every node needs its seconds per expert, above 0, not {[room.seconds for room in rooms]}")
    if popularity and [len(row) for row in popularity] != [grid.experts] * len(grid.layers):
        raise ValueError(f"popularity must have {len(grid.layers)} layers of {grid.experts} experts")


def numbers(slots: Sequence[int], seconds: Sequence[float], slabs: int) -> list[int]:
    """The number of the ``slabs`` experts on each node: in proportion to its speed, at most its ``slots``.

    There must be room for all. The largest remainders round up; ties go to the lower rank.
    """
    given = [0] * len(slots)
    open_ = [rank for rank, slot in enumerate(slots) if slot]
    left = slabs
    while open_ and left:
        speed = sum(1.0 / seconds[rank] for rank in open_)
        full = [rank for rank in open_ if slots[rank] * seconds[rank] * speed <= left]
        if not full:
            break
        for rank in full:
            given[rank] = slots[rank]
            left -= slots[rank]
        open_ = [rank for rank in open_ if rank not in full]
    if not (open_ and left):
        return given
    speed = sum(1.0 / seconds[rank] for rank in open_)
    exact = {rank: left / seconds[rank] / speed for rank in open_}
    for rank in open_:
        given[rank] = min(slots[rank], int(exact[rank]))
        left -= given[rank]
    for rank in sorted(open_, key=lambda rank: (int(exact[rank]) - exact[rank], rank)):
        more = min(left, 1, slots[rank] - given[rank])
        given[rank] += more
        left -= more
    for rank in open_:  # only where rounding above met a limit
        more = min(left, slots[rank] - given[rank])
        given[rank] += more
        left -= more
    return given


def dealt(totals: Sequence[int], layers: int) -> list[tuple[int, ...]]:
    """Each node's total split into whole numbers per layer that differ by at most one.

    The remainders are dealt out layer by layer, so that all layers have the same sum if ``layers`` divides the totals'
    sum.
    """
    rows = [[total // layers for total in totals] for _ in range(layers)]
    at = 0
    for rank, total in enumerate(totals):
        for _ in range(total % layers):
            rows[at % layers][rank] += 1
            at += 1
    return [tuple(row) for row in rows]


def _replica_slots(spare: Sequence[int], per_layer: Sequence[tuple[int, ...]], experts: int) -> list[tuple[int, ...]]:
    """The number of replicas per layer and node: the ``spare`` slots, as evenly as the layers' experts allow.

    The remainder goes to the layers with the fewest replicas, and among these to those with the fewest experts on the
    node.
    """
    rows = [[0] * len(spare) for _ in per_layer]
    for rank, slots in enumerate(spare):
        left = slots
        while left > 0:
            open_ = [at for at, row in enumerate(rows) if per_layer[at][rank] + row[rank] < experts]
            if not open_:
                break
            if left < len(open_):
                open_ = sorted(open_, key=lambda at: (sum(rows[at]), per_layer[at][rank] + rows[at][rank], at))[:left]
            free = min(experts - per_layer[at][rank] - rows[at][rank] for at in open_)
            each = max(1, min(left // len(open_), free))
            for at in open_:
                rows[at][rank] += each
            left -= each * len(open_)
    return [tuple(row) for row in rows]


def spread(
    experts: int,
    numbers_: Sequence[int],
    popularity: Sequence[float],
    seconds: Sequence[float],
    has: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """One holder for each expert of a layer, ``numbers_`` experts per rank.

    The most used experts come first. Each goes to the rank that is expected to finish soonest. A rank keeps what it
    ``has`` already, up to its number.
    """
    total = sum(popularity)
    use = (
        [(routes + 0.5) / (total + 0.5 * experts) for routes in popularity] if total > 0 else [1.0 / experts] * experts
    )
    left = list(numbers_)
    loads = [0.0] * len(left)
    holders: list[list[int]] = [[] for _ in range(experts)]
    experts_there = [frozenset(each) for each in has]
    order = sorted(range(experts), key=lambda expert: (-use[expert], expert))
    for kept in (True, False) if experts_there else (False,):
        for expert in order:
            if holders[expert]:
                continue
            ranks = [r for r, n in enumerate(left) if n and (not kept or expert in experts_there[r])]
            if ranks:
                # Of ranks equally soon the one with more left: else the last experts would all go to one.
                best = min(ranks, key=lambda r: (round((loads[r] + use[expert]) * seconds[r], 12), -left[r], r))
                holders[expert].append(best)
                left[best] -= 1
                loads[best] += use[expert]
    return holders


def with_replicas(
    first: Sequence[Sequence[int]],
    slots: Sequence[int],
    popularity: Sequence[float],
    seconds: Sequence[float],
    has: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """``first`` (one holder per expert) with replicas: ``slots`` more experts on each rank, none twice.

    Raises ValueError if a rank has more slots than there are experts it does not hold.
    """
    experts = len(first)
    holders = [list(ranks) for ranks in first]
    if any(slot > experts - sum(rank in ranks for ranks in holders) for rank, slot in enumerate(slots)):
        raise ValueError("a rank cannot hold more experts than a layer has")
    total = sum(popularity)
    use = (
        [(routes + 0.5) / (total + 0.5 * experts) for routes in popularity] if total > 0 else [1.0 / experts] * experts
    )
    dealing = _Dealing(holders, list(slots), use, seconds, [frozenset(each) for each in has])
    while any(dealing.left):
        dealing.next_replica()
    return [sorted(ranks) for ranks in holders]


class _Dealing:
    """Deals out the replicas of one layer. ``left``: free slots per rank."""

    def __init__(
        self,
        holders: list[list[int]],
        left: list[int],
        use: Sequence[float],
        seconds: Sequence[float],
        has: Sequence[frozenset[int]],
    ) -> None:
        self.left = left
        self._holders = holders
        self._use = use
        self._seconds = seconds
        self._has = has
        nodes = len(left)
        self._loads = [0.0] * nodes
        self._shared = [[0.0] * nodes for _ in range(nodes)]
        # Experts by first holder, the most used last: the next to get a replica is popped.
        self._waiting: list[list[int]] = [[] for _ in range(nodes)]
        for expert in sorted(range(len(holders)), key=lambda expert: (use[expert], -expert)):
            self._waiting[holders[expert][0]].append(expert)
            self._loads[holders[expert][0]] += use[expert]
        self._passed: list[int] = []
        self._copies = 1

    def next_replica(self) -> None:
        """Give one expert another holder, or set it aside until all experts have equally many."""
        ranks = [rank for rank, experts in enumerate(self._waiting) if experts]
        if not ranks:
            self._next_round()
            return
        busiest = max(ranks, key=lambda rank: (self._loads[rank] * self._seconds[rank], -rank))
        expert = self._waiting[busiest].pop()
        held = self._holders[expert]
        free = [rank for rank, slots in enumerate(self.left) if slots and rank not in held]
        if free:
            best = min(free, key=lambda rank: self._cost(expert, rank, busiest))
            self._give(expert, best)
        self._passed.append(expert)

    def _cost(self, expert: int, rank: int, busiest: int) -> tuple[bool, float, float, int]:
        """The sort key of a replica of ``expert`` on ``rank``: whether it must be sent, then how many experts the two
        ranks share already, then the load of ``rank``."""
        absent = bool(self._has) and expert not in self._has[rank]
        seconds = self._seconds[rank]
        return (
            absent,
            self._shared[busiest][rank] * seconds,
            (self._loads[rank]) * seconds / (1 + self.left[rank]),
            rank,
        )

    def _give(self, expert: int, rank: int) -> None:
        held = self._holders[expert]
        part = self._use[expert] / len(held) - self._use[expert] / (len(held) + 1)
        for other in held:
            self._loads[other] -= part
            self._shared[other][rank] += self._use[expert]
            self._shared[rank][other] += self._use[expert]
        self._loads[rank] += self._use[expert] / (len(held) + 1)
        held.append(rank)
        self.left[rank] -= 1

    def _next_round(self) -> None:
        """Begin again with all experts that can have another replica."""
        for expert in sorted(self._passed, key=lambda expert: (self._use[expert], -expert)):
            held = self._holders[expert]
            if any(slots and rank not in held for rank, slots in enumerate(self.left)):
                self._waiting[max(held, key=lambda rank: (self._loads[rank] * self._seconds[rank], -rank))].append(
                    expert
                )
        self._passed = []
        if not any(self._waiting):
            self.left[:] = [0] * len(self.left)
