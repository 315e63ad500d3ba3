"""Who runs the active experts of a layer when several nodes hold them, and what a node runs besides.

Every node of a ring asks this at every MoE layer of every pass, with the same routes, and must get the same answer; so
it is a pure function of them, made of whole numbers, and cheap. An expert goes to one owner for all its tokens. (Paper
of private LLMs on Apple Silicon, sections 4.2 and 5.3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.planning.placement import Placement

LoadingRule = Literal["selected", "router-aided", "busy-full"]

ONE_READ_TOKENS = 4
"""Maximum tokens for which an expert takes as long as for one: its weights are read once for all of them."""
REMEMBERED = 16384
"""Maximum answers kept by an :class:`Assigner`; decoding returns to the same experts."""
_UNIT = 1024
"""The smallest weight, as a whole number: sums of whole numbers are the same on every machine."""
_SEARCHED = 10
"""Maximum experts with many tokens and several holders that are shared out by search."""
_SEARCH_NODES = 3000
"""Maximum partial assignments examined in a search, about a third of a microsecond each."""
_ROUNDS = 64
"""Maximum improvements tried where there are more experts."""


class Assigner:
    """Finds each active expert's owner, so that the node with most to do has as little as possible.

    ``weights``: relative seconds per expert of each rank (empty: all alike). Raises ValueError for weights that are not
    one positive number per node.
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
        """The rank that runs each of ``experts`` (active ones, ascending), each for its ``counts`` tokens.

        The largest weighted load is the smallest possible while no expert has more than ONE_READ_TOKENS tokens. Beyond,
        it is the greedy one (longest first), improved by search if few experts have several holders, else by moves and
        swaps. Raises KeyError for a layer without experts.
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
    """In which order the experts that one node holds were run last, per layer: least recently used first."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self._order: dict[int, dict[int, None]] = {layer: {} for layer in placement.layers}
        for layer, rows in zip(placement.layers, placement.holders, strict=True):
            self._order[layer].update((expert, None) for expert, ranks in enumerate(rows) if rank in ranks)

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """``experts``, all held here, were run in this order. Raises KeyError for one that is not held."""
        order = self._order[layer]
        for expert in experts:
            del order[expert]
            order[expert] = None

    def oldest(self, layer: int, count: int) -> tuple[int, ...]:
        """The ``count`` experts (or as many as there are) whose last run is longest ago."""
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
        """How many experts of ``layer`` this node holds."""
        return len(self._order[layer])


class LoadingRules:
    """What the node ``rank`` runs in a layer besides the experts it owns; the results are thrown away.

    ``selected``: nothing. ``router-aided`` (the paper's L_R): as many experts as the busiest node has time for, the
    least recently used first, so that none is idle for long enough to be unwired. ``busy-full`` (L_B): all it holds.
    Keeps the order of use; one thread at a time.
    """

    def __init__(self, placement: Placement, rank: int, rule: LoadingRule, weights: Sequence[float] = ()) -> None:
        self._rank = rank
        self._rule = rule
        self._weights = whole_weights(weights, placement.nodes)
        self._recent = RecentlyUsed(placement, rank)

    def extra(self, layer: int, experts: Sequence[int], owners: Sequence[int]) -> tuple[int, ...]:
        """The further experts for a layer whose active ``experts`` are run by ``owners``; to be called once per layer.

        All experts that are run, these too, count as used now.
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
    """How many more experts ``rank`` can run without being done later than the busiest node. Among nodes that are
    alike, what it lacks to the largest number any of them runs (the paper, section 4.2)."""
    loads = [0] * len(weights)
    for owner in owners:
        loads[owner] += weights[owner]
    return (max(loads) - loads[rank]) // weights[rank]


def whole_weights(weights: Sequence[float], nodes: int) -> list[int]:
    """``weights`` as whole numbers, the smallest about 1024; all alike if there are none. Raises ValueError for another
    number of weights than ``nodes``, or one that is not positive and finite."""
    if not weights:
        return [_UNIT] * nodes
    smallest = min(weights)
    if len(weights) != nodes or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"{nodes} nodes need as many seconds per expert, all above 0, not {list(weights)}")
    return [round(_UNIT * weight / smallest) for weight in weights]


def level(holders: Sequence[tuple[int, ...]], weights: Sequence[int]) -> list[int]:
    """An owner for each of equally long jobs, one of its ``holders``, with the largest load as small as possible.

    Each job to the holder that is done with it soonest; then, as long as there is one, a chain of jobs passed on from
    the busiest rank that ends at a rank which is done before it even so. Where there is none, the ranks that can be
    reached have jobs that nobody else holds, and no room to give the busiest one's away: its load is the smallest.
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
    """Take one job off the busiest rank by passing jobs on, breadth first. False if no chain of them helps."""
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
    """An owner for each job of ``sizes``: the longest first, to the holder that is done with it soonest; then a search,
    or moves and swaps from the busiest rank as long as they help."""
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
    """Replace ``owners`` of the ``free`` jobs by better ones: depth first, the longest first, nothing followed that
    cannot be better than the best so far."""
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
    """Give one job of the busiest rank away, or exchange it for a shorter one, so that the later of the two ranks is
    done soonest. False if nothing helps."""
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
