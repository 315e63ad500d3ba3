"""The choice of machines for a ring if some links between them cannot be made: the largest set with all links. Pure.

Every two nodes of a ring have a link, in central mode too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from engine.planning.ring_plan import RingDecision

Pair = frozenset[str]
"""Node ids of the two ends of a link, in either order."""
Plan = Callable[[Sequence[str]], RingDecision]
"""Function from the node ids of the other machines to a plan for the head and them."""
MOST_SETS = 256
"""Maximum sets examined. Up to fifteen other machines have no more sets, whichever links are broken. With more
machines, some sets are not examined if hardly any two machines reach each other."""
MOST_SEEN = 64 * MOST_SETS
MOST_PLANNED = 16
"""Maximum sets of one size that are planned. A plan takes milliseconds."""


@dataclass(frozen=True)
class Reaching:
    """A decision, and the machines beside the head for which it was planned (``others``), in their order."""

    decision: RingDecision
    others: tuple[str, ...]


def plan_reaching(head: str, others: Sequence[str], broken: Collection[Pair], plan: Plan) -> Reaching:
    """The ring of the most machines that all reach one another and can hold the model.

    Among several such sets, the one with the fastest predicted ring. If none can hold the model, the refusal with the
    smallest shortfall.
    """
    reached = tuple(one for one in others if frozenset((head, one)) not in broken)
    whole = Reaching(plan(reached), reached)
    if whole.decision.kind == "refused" or not _needs(whole.decision, broken):
        return whole
    refused = []
    for _, sets in groupby(reaching_sets(reached, broken), key=len):
        planned = [Reaching(plan(reaching), reaching) for reaching in list(sets)[:MOST_PLANNED]]
        holding = [reaching for reaching in planned if reaching.decision.kind != "refused"]
        if holding:
            return min(holding, key=lambda reaching: _seconds(reaching.decision))
        refused += planned
    return min(refused, key=lambda reaching: reaching.decision.shortfall)


def reaching_sets(others: Sequence[str], broken: Collection[Pair]) -> list[tuple[str, ...]]:
    """The largest sets of ``others`` without a broken link, to which no machine can be added. Larger sets come
    first."""
    ends = {machine: {other for other in others if frozenset((machine, other)) in broken} for machine in others}
    sets: dict[frozenset[str], None] = {}
    for members in islice(_independent(frozenset(others), ends), MOST_SEEN):
        if all(ends[machine] & members for machine in others if machine not in members):
            sets.setdefault(members)
        if len(sets) >= MOST_SETS:
            break
    ordered = (tuple(machine for machine in others if machine in members) for members in sets)
    return sorted(ordered, key=len, reverse=True)


def why_apart(one: str, others: Collection[str], broken: Mapping[Pair, str]) -> dict[str, str]:
    """Reasons why the machine ``one`` has no link, by the other machine's node id."""
    return {other: broken[pair] for other in others if (pair := frozenset((one, other))) in broken}


def _independent(left: frozenset[str], ends: Mapping[str, Collection[str]]) -> Iterator[frozenset[str]]:
    """Sets without a broken link, among them all maximal ones: the machine with the most broken links is left out, or
    kept."""
    worst = max(left, key=lambda one: (sum(other in left for other in ends[one]), one), default=None)
    if worst is None or not any(other in left for other in ends[worst]):
        yield left
        return
    yield from _independent(left - {worst}, ends)
    for rest in _independent(left - {worst} - frozenset(ends[worst]), ends):
        yield rest | {worst}


def _needs(decision: RingDecision, broken: Collection[Pair]) -> bool:
    """Whether ``decision`` uses a link that is ``broken``."""
    return decision.kind == "ring" and any(pair <= set(decision.ranks) for pair in broken)


def _seconds(decision: RingDecision) -> float:
    step = decision.chosen_step
    return step.seconds if step is not None else float("inf")
