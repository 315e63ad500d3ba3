"""Machines that reach the head and not one another: which of them the ring is planned with, and what is said of the
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.cluster.head.survey import Survey, decide
from engine.ipc.messages import Load
from engine.planning.reaching import Pair, plan_reaching, why_apart
from engine.planning.ring_plan import RingDecision
from engine.planning.ring_words import THIS_MACHINE, apart_sentence
from engine.runtimes.model_headers import Headers


@dataclass(frozen=True)
class Together:
    """``decision``, for those who reach one another. ``apart``: by node id of each other machine, to whom it has no
    link; ``lines``: a sentence for each of them."""

    decision: RingDecision
    apart: Mapping[str, frozenset[Pair]]
    lines: Sequence[str]


def decide_together(
    headers: Headers, name: str, load: Load, order: Sequence[tuple[str, str]], survey: Survey, at_once: float = 1.0
) -> Together:
    """See :func:`engine.cluster.head.survey.decide`; links that cannot be made are in no ring."""
    (me, _), *others = order
    names = {me: THIS_MACHINE, **dict(others)}
    broken = survey.tried.broken

    def plan(ids: Sequence[str]) -> RingDecision:
        return decide(headers, name, load, [order[0], *(one for one in others if one[0] in ids)], survey, at_once)

    found = plan_reaching(me, [node_id for node_id, _ in others], broken, plan)
    apart: dict[str, frozenset[Pair]] = {}
    lines = []
    for node_id, called in others:
        if node_id in found.others:
            continue
        missing = why_apart(node_id, (me, *found.others), broken)
        apart[node_id] = frozenset(frozenset((node_id, other)) for other in missing)
        other, why = next(iter(missing.items()))
        lines.append(apart_sentence(called, names[other], why))
    return Together(found.decision, apart, lines)
