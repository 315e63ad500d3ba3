"""Which machines form a ring when some of the links between them cannot be made: the largest set that can. Pure.

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
"""Function from the node ids of the other machines to a plan of the head with them."""
MOST_SETS = 256
"""Maximum sets examined. Up to fifteen other machines have no more, whichever links are broken. Of more machines some
sets are not examined if hardly any two machines reach each other."""
MOST_SEEN = 64 * MOST_SETS
MOST_PLANNED = 16
"""Maximum sets of one size that are planned; a plan takes milliseconds."""


@dataclass(frozen=True)
class Reaching:
    """``others``: the machines that ``decision`` was planned with beside the head, in their order."""

    decision: RingDecision
    others: tuple[str, ...]


def plan_reaching(head: str, others: Sequence[str], broken: Collection[Pair], plan: Plan) -> Reaching:
    """The ring of the most machines that all reach one another and hold the model; of several the fastest, by its
    prediction. If none holds it, the refusal of those to whom the least is missing."""
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
    """The sets of ``others`` in which no link is broken and to which none can be added, the larger first."""
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
    """To whom of ``others`` the machine ``one`` has no link, and why."""
    return {other: broken[pair] for other in others if (pair := frozenset((one, other))) in broken}


def _independent(left: frozenset[str], ends: Mapping[str, Collection[str]]) -> Iterator[frozenset[str]]:
    """Sets without a broken link, all that are maximal among them: the machine with the most is out, or in."""
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
    step = decision.alone_step if decision.kind == "alone" else decision.step
    return step.seconds if step is not None else float("inf")
