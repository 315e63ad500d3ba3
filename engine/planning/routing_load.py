"""The assignment of a layer's active experts to the nodes that hold them, and the further experts that a node runs.

Every node of a ring computes it at every MoE layer of every pass, from the same routes, and must get the same answer.
So it is a pure and cheap function of whole numbers. An expert goes to one owner for all its tokens. (Paper of private
LLMs on Apple Silicon, sections 4.2 and 5.3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.planning.placement import Placement

LoadingRule = Literal["selected", "router-aided", "busy-full"]

ONE_READ_TOKENS = 4
"""Maximum tokens with which an expert takes as long as with one, because its weights are read once for all of them."""
REMEMBERED = 16384
"""Size of the cache of an :class:`Assigner`, in answers. Decoding returns to the same experts."""
_UNIT = 1024
"""The smallest weight as a whole number. Sums of whole numbers are the same on every machine."""
_SEARCHED = 10
"""Maximum experts with many tokens and several holders that are assigned by search."""
_SEARCH_NODES = 3000
"""Maximum partial assignments examined in a search, about a third of a microsecond each."""
_ROUNDS = 64
"""Maximum improvements tried if there are more such experts."""


class Assigner:
    """Assigns each active expert to an owner, so that the busiest node has as little to do as possible.

    ``weights``: relative seconds per expert of each rank (empty: all equal). Raises ValueError unless there is one
    positive number per node.
    """

    def __init__(self, placement: Placement, weights: Sequence[float] = (), remembered: int = REMEMBERED) -> None:
        self._weights = whole_weights(weights, placement.nodes)
        self._holders = dict(zip(placement.layers, placement.holders, strict=True))
        self._only = {
            layer: [ranks[0] for ranks in rows]
            for layer, rows in self._holders.items()
            if all(len(ranks) == 1 for ranks in rows)
        }
        self._remembered = remembered
        self._known: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def owners(self, layer: int, experts: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The rank that runs each of ``experts`` (active ones, ascending) for all of its ``counts`` tokens.

        The largest weighted load is minimal if no expert has more than ONE_READ_TOKENS tokens. Otherwise the assignment
        is greedy (longest first), improved by search if few experts have several holders, else by moves and swaps.
        Raises KeyError for a layer without experts.
        """
        only = self._only.get(layer)
        if only is not None:
            return [only[expert] for expert in experts]
        if not experts:
            return []
        if max(counts) > ONE_READ_TOKENS:
            held = self._holders[layer]
            return _greedy(
                [held[expert] for expert in experts], [max(ONE_READ_TOKENS, n) for n in counts], self._weights
            )
        key = (layer, tuple(experts))
        owners = self._known.get(key)
        if owners is None:
            held = self._holders[layer]
            owners = level([held[expert] for expert in experts], self._weights)
            if len(self._known) >= self._remembered:
                del self._known[next(iter(self._known))]
            self._known[key] = owners
        return owners.copy()


class RecentlyUsed:
    """The order in which a node's experts were last run, per layer, least recently used first."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self._order: dict[int, dict[int, None]] = {layer: {} for layer in placement.layers}
        for layer, rows in zip(placement.layers, placement.holders, strict=True):
            self._order[layer].update((expert, None) for expert, ranks in enumerate(rows) if rank in ranks)

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Record that ``experts``, all held here, were run in this order. Raises KeyError for one that is not held."""
        order = self._order[layer]
        for expert in experts:
            del order[expert]
            order[expert] = None

    def oldest(self, layer: int, count: int) -> tuple[int, ...]:
        """The ``count`` experts (or all, if fewer) that have not been run for longest."""
        order = self._order[layer]
        if count >= len(order):
            return tuple(order)
        oldest: list[int] = []
        for expert in order:
            if len(oldest) >= count:
                break
            oldest.append(expert)
        return tuple(oldest)

    def held(self, layer: int) -> int:
        """Number of experts of ``layer`` on this node."""
        return len(self._order[layer])


class LoadingRules:
    """Chooses the further experts that the node ``rank`` runs in a layer beside its own. Their results are thrown away.

    ``selected``: none. ``router-aided`` (the paper's L_R): as many as fit in the time of the busiest node, the least
    recently used first, so that none idles until it is unwired. ``busy-full`` (L_B): all that it holds. Keeps the order
    of use. Not thread-safe.
    """

    def __init__(self, placement: Placement, rank: int, rule: LoadingRule, weights: Sequence[float] = ()) -> None:
        self._rank = rank
        self._rule = rule
        self._weights = whole_weights(weights, placement.nodes)
        self._recent = RecentlyUsed(placement, rank)

    def extra(self, layer: int, experts: Sequence[int], owners: Sequence[int]) -> tuple[int, ...]:
        """The further experts for a layer whose active ``experts`` are run by ``owners``. Call it once per layer.

        All experts that are run, the further ones too, then count as used.
        """
        if self._rule == "selected":
            return ()
        rank = self._rank
        own = [expert for expert, owner in zip(experts, owners, strict=True) if owner == rank]
        recent = self._recent
        recent.use(layer, own)
        idle = recent.held(layer) - len(own)
        # What was just used is at the end, so the oldest are never this node's own.
        spare = idle if self._rule == "busy-full" else min(idle, spare_quota(owners, rank, self._weights))
        if spare <= 0:
            return ()
        found = recent.oldest(layer, spare)
        recent.use(layer, found)
        return found


def spare_quota(owners: Sequence[int], rank: int, weights: Sequence[int]) -> int:
    """Number of further experts that ``rank`` can run without finishing after the busiest node.

    Among equal nodes, the difference to the largest number that any of them runs (the paper, section 4.2).
    """
    loads = [0] * len(weights)
    for owner in owners:
        loads[owner] += weights[owner]
    return (max(loads) - loads[rank]) // weights[rank]


def whole_weights(weights: Sequence[float], nodes: int) -> list[int]:
    """``weights`` as whole numbers, the smallest about 1024; all equal without weights.

    Raises ValueError for another number of weights than ``nodes``, or one that is not positive and finite.
    """
    if not weights:
        return [_UNIT] * nodes
    smallest = min(weights)
    if len(weights) != nodes or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"{nodes} nodes need as many seconds per expert, all above 0, not {list(weights)}")
    return [round(_UNIT * weight / smallest) for weight in weights]


def level(holders: Sequence[tuple[int, ...]], weights: Sequence[int]) -> list[int]:
    """One of its ``holders`` as the owner of each of equally long jobs, with the smallest possible largest load.

    Each job first goes to the holder that finishes it soonest. Then, while there is one, a chain of jobs is passed on
    from the busiest rank to a rank that still finishes earlier. Without such a chain the load is minimal: the ranks
    that could be reached have no room, and their jobs have no other holders.
    """
    owners = []
    loads = [0] * len(weights)
    for ranks in holders:
        best = ranks[0]
        soonest = loads[best] + weights[best]
        for rank in ranks[1:]:
            done = loads[rank] + weights[rank]
            if done < soonest:
                best, soonest = rank, done
        owners.append(best)
        loads[best] = soonest
    while _pass_on(holders, weights, owners, loads):
        pass
    return owners


def _pass_on(holders: Sequence[tuple[int, ...]], weights: Sequence[int], owners: list[int], loads: list[int]) -> bool:
    """Take one job off the busiest rank by passing jobs on, breadth first. Returns False if no chain helps."""
    most = max(loads)
    busiest = loads.index(most)
    came: dict[int, tuple[int, int]] = {busiest: (-1, -1)}  # rank: the job that would come to it, and from which rank
    queue = [busiest]
    for rank in queue:
        for job, owner in enumerate(owners):
            if owner != rank:
                continue
            for holder in holders[job]:
                if holder in came:
                    continue
                came[holder] = (job, rank)
                if loads[holder] + weights[holder] < most:
                    loads[holder] += weights[holder]
                    loads[busiest] -= weights[busiest]
                    end = holder
                    while end != busiest:
                        moved, before = came[end]
                        owners[moved], end = end, before
                    return True
                queue.append(holder)
    return False


def _greedy(holders: Sequence[tuple[int, ...]], sizes: Sequence[int], weights: Sequence[int]) -> list[int]:
    """The owner of each job of ``sizes``: longest first, to the holder that finishes it soonest.

    Then a search, or moves and swaps from the busiest rank while they help.
    """
    owners = [ranks[0] for ranks in holders]
    loads = [0] * len(weights)
    free = []
    for job, ranks in enumerate(holders):
        if len(ranks) == 1:
            loads[ranks[0]] += sizes[job] * weights[ranks[0]]
        else:
            free.append(job)
    for job in sorted(free, key=lambda job: (-sizes[job], job)):
        best, soonest = -1, 0
        for rank in holders[job]:
            done = loads[rank] + sizes[job] * weights[rank]
            if best < 0 or done < soonest:
                best, soonest = rank, done
        owners[job] = best
        loads[best] = soonest
    if len(free) <= _SEARCHED:
        _search(free, holders, sizes, weights, owners, loads)
        return owners
    for _ in range(_ROUNDS):
        if not _relieve(free, holders, sizes, weights, owners, loads):
            break
    return owners


def _search(
    free: Sequence[int],
    holders: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    weights: Sequence[int],
    owners: list[int],
    loads: list[int],
) -> None:
    """Improve ``owners`` of the ``free`` jobs by depth-first search, longest first. Branches that cannot beat the best
    are cut off."""
    fixed = loads.copy()
    for job in free:
        fixed[owners[job]] -= sizes[job] * weights[owners[job]]
    order = sorted(free, key=lambda job: (-sizes[job], job))
    best, chosen, left = max(loads), [0] * len(order), _SEARCH_NODES

    def descend(depth: int) -> None:
        nonlocal best, left
        if depth == len(order):
            best = max(fixed)
            for job, rank in zip(order, chosen, strict=True):
                owners[job] = rank
            return
        job = order[depth]
        ends = sorted((fixed[rank] + sizes[job] * weights[rank], rank) for rank in holders[job])
        for end, rank in ends:
            if end >= best or left <= 0:
                return
            left -= 1
            before, fixed[rank], chosen[depth] = fixed[rank], end, rank
            descend(depth + 1)
            fixed[rank] = before

    if max(fixed) < best:
        descend(0)


def _relieve(
    free: Sequence[int],
    holders: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    weights: Sequence[int],
    owners: list[int],
    loads: list[int],
) -> bool:
    """Move one job from the busiest rank, or swap it for a shorter one, so that the later of the two ranks finishes
    soonest.

    Returns False if nothing helps.
    """
    busiest = max(range(len(loads)), key=loads.__getitem__)
    best, change = loads[busiest], None
    for job in free:
        if owners[job] != busiest:
            continue
        for rank in holders[job]:
            if rank == busiest:
                continue
            here = loads[busiest] - sizes[job] * weights[busiest]
            load = loads[rank] + sizes[job] * weights[rank]
            if max(here, load) < best:
                best, change = max(here, load), (job, rank, -1)
            for back in free:
                if owners[back] != rank or sizes[back] >= sizes[job] or busiest not in holders[back]:
                    continue
                later = max(here + sizes[back] * weights[busiest], load - sizes[back] * weights[rank])
                if later < best:
                    best, change = later, (job, rank, back)
    if change is None:
        return False
    job, rank, back = change
    for moved, to in ((job, rank), (back, busiest)):
        if moved >= 0:
            loads[owners[moved]] -= sizes[moved] * weights[owners[moved]]
            owners[moved] = to
            loads[to] += sizes[moved] * weights[to]
    return True
