"""Which node of a ring gets which experts: every expert at least once, then copies where memory is left. Pure.

All experts of a model are slabs of one size, so a placement exists exactly if the nodes' rooms, in whole slabs, hold
them all. In five steps, the same on every machine:

1. *Numbers.* Each node gets experts in proportion to its speed, as far as it has room, evenly over the layers.
2. *Experts.* Layer by layer, the most used experts first, each to the node with the least expected load so far.
3. *Copies.* What room is left, evenly over the layers too: the expert that only the busiest node holds and that is
   used most, to the node that shares the fewest with it. A token's experts can then be shared out more evenly, which
   lowers the expected maximum per layer (the overlapping placement of the paper of private LLMs on Apple Silicon,
   section 5.3).
4. *Changes.* Where a layer's outcomes are few enough to be gone through, single moves and exchanges as long as they
   lower the expected maximum.
5. *What for?* Copies that do not lower the expected maximum worth mentioning go again, those first that would have to
   be sent: room alone is no reason to send gigabytes.

For up to six experts on three nodes the result is within 5 % of the best placement of a layer (tested against all of
them); beyond that nothing is promised. Which layer gets the odd slot where memory does not divide by the layers is not
weighed by popularity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.planning.placement import Placement
from engine.planning.placing_copies import copied
from engine.planning.placing_moves import Improver
from engine.planning.placing_worth import SAMPLED, Leaner, Rows


@dataclass(frozen=True)
class _Layer:
    """What decides a layer's placement: layers that are alike in it are placed alike."""

    owned: tuple[int, ...]
    """Experts per rank."""
    further: tuple[int, ...]
    """Further copies per rank, at most."""
    popularity: tuple[float, ...]
    there: tuple[tuple[int, ...], ...]
    """Experts that are there already per rank."""


@dataclass(frozen=True)
class ExpertGrid:
    """The routed experts of a model: ``experts`` in each of the decoder layers ``layers``, each of ``slab_bytes``."""

    layers: tuple[int, ...]
    experts: int
    per_token: int
    slab_bytes: int

    @property
    def slabs(self) -> int:
        return len(self.layers) * self.experts


@dataclass(frozen=True)
class NodeRoom:
    """What one node offers: bytes for experts, and its seconds per expert, absolute or relative to the others'."""

    expert_bytes: int
    seconds: float = 1.0


@dataclass(frozen=True)
class Shortfall:
    """The experts do not fit: ``missing_bytes`` more are needed for one copy of each."""

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
    """A placement of ``grid`` on the nodes ``rooms``, in rank order, or what is missing for one.

    ``popularity``: routes counted before, [layer of the grid][expert]; empty: even use. ``overlap``: an expert may be
    held by more than one node. ``has``: per rank, layer to experts that are there already; where they serve as well as
    others they are taken. ``all_hold``: no node with room is without an expert, however slow it is, as long as another
    one has two. Raises ValueError without nodes, for a node without speed, or a popularity of another model.
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
    further = _further(spare, per_layer, grid.experts)
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
    improver = Improver(grid.per_token, seconds, len(different))
    placed = {layer: _holders(layer, grid.experts, seconds, overlap, improver) for layer in different}
    if overlap:
        placed = _leaner(placed, grid.per_token, seconds)
    rows = [placed[layer] for layer in layers]
    if all_hold:
        for rank, slot in enumerate(slots):
            rows = _with_one_for(rank, rows) if slot else rows
    return Placement(grid.layers, len(rooms), tuple(rows))


def _with_one_for(rank: int, rows: list[Rows]) -> list[Rows]:
    """``rows`` with an expert for ``rank`` if it holds none: one of whoever holds the most alone, if that is not its
    only one."""
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


def _holders(layer: _Layer, experts: int, seconds: Sequence[float], overlap: bool, improver: Improver) -> Rows:
    """The holders of one layer's experts."""
    kept = tuple(_some(each, experts) for each in layer.there)
    holders = spread(experts, layer.owned, layer.popularity, seconds, kept)
    if overlap:
        holders = copied(holders, layer.further, layer.popularity, seconds, kept)
    if any(kept):  # what is there already is not to be moved for a little gain
        return tuple(tuple(sorted(ranks)) for ranks in holders)
    limits = [own + more for own, more in zip(layer.owned, layer.further, strict=True)]
    return improver.improved(holders, limits, layer.popularity)


def _leaner(placed: Mapping[_Layer, Rows], per_token: int, seconds: Sequence[float]) -> dict[_Layer, Rows]:
    """``placed`` without copies that are worth nothing. Where many layers differ, some are looked at, evenly spread,
    and the others do without what the most needy of these can do without."""
    layers = list(placed)
    looked = [layers[at * len(layers) // SAMPLED] for at in range(SAMPLED)] if len(layers) > SAMPLED else layers
    leaner = Leaner(per_token, seconds, len(looked))
    parts = {layer: leaner.parts(placed[layer], layer.popularity, layer.there) for layer in looked}
    least = min(first for first, _ in parts.values()), min(second for _, second in parts.values())
    return {
        layer: leaner.leaner(rows, layer.popularity, layer.there, parts.get(layer, least))
        for layer, rows in placed.items()
    }


def _some(there: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """What a rank has of a layer; nothing if it has all, for then it need not keep any."""
    return there if len(there) < experts else ()


def check(grid: ExpertGrid, rooms: Sequence[NodeRoom], popularity: Sequence[Sequence[float]]) -> None:
    """Raises ValueError, see :func:`place`."""
    if not rooms:
        raise ValueError("a placement needs at least one node")
    if any(not 0 < room.seconds < float("inf") for room in rooms):
        raise ValueError(f"every node needs its seconds per expert, above 0, not {[room.seconds for room in rooms]}")
    if popularity and [len(row) for row in popularity] != [grid.experts] * len(grid.layers):
        raise ValueError(f"popularity must have {len(grid.layers)} layers of {grid.experts} experts")


def numbers(slots: Sequence[int], seconds: Sequence[float], slabs: int) -> list[int]:
    """How many of ``slabs`` each node gets: in proportion to its speed, never more than its ``slots``, in all exactly
    ``slabs`` (there must be room). The largest remainders round up; ties go to the lower rank."""
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
    """Each node's total cut into whole numbers per layer that differ by one at most; every layer's sum is the same if
    the totals' sum is a multiple of ``layers``. What is left over after the even part is dealt round the layers."""
    rows = [[total // layers for total in totals] for _ in range(layers)]
    at = 0
    for rank, total in enumerate(totals):
        for _ in range(total % layers):
            rows[at % layers][rank] += 1
            at += 1
    return [tuple(row) for row in rows]


def _further(spare: Sequence[int], per_layer: Sequence[tuple[int, ...]], experts: int) -> list[tuple[int, ...]]:
    """Copies per layer and node: the ``spare`` slots, as even as the layers' experts allow; what is left over goes to
    the layers with the fewest copies, and to those in which the node has the fewest experts."""
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
    """One holder for each expert of a layer, ``numbers_`` of them per rank; those most used first, each to the rank
    that is expected to be done with it soonest. What a rank ``has`` already it keeps, as far as its number goes."""
    total = sum(popularity)
    use = (
        [(routes + 0.5) / (total + 0.5 * experts) for routes in popularity] if total > 0 else [1.0 / experts] * experts
    )
    left = list(numbers_)
    loads = [0.0] * len(left)
    holders: list[list[int]] = [[] for _ in range(experts)]
    there = [frozenset(each) for each in has]
    order = sorted(range(experts), key=lambda expert: (-use[expert], expert))
    for kept in (True, False) if there else (False,):
        for expert in order:
            if holders[expert]:
                continue
            ranks = [r for r, n in enumerate(left) if n and (not kept or expert in there[r])]
            if ranks:
                # Of ranks equally soon the one with more left: else the last experts would all go to one.
                best = min(ranks, key=lambda r: (round((loads[r] + use[expert]) * seconds[r], 12), -left[r], r))
                holders[expert].append(best)
                left[best] -= 1
                loads[best] += use[expert]
    return holders
