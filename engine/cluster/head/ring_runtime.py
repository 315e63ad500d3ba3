"""The choice of a ring's runtime: native, or torch where the machines' GPUs make it faster or large enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.cluster.head.missing_links import ConnectedPlan
from engine.cluster.head.survey import Survey
from engine.ipc.messages import Load
from engine.planning.ring_change import step_seconds
from engine.planning.ring_plan import RingDecision
from engine.planning.runtime_choice import RingForecast, RuntimeChoice, ring_choice
from engine.runtimes.choosing import as_ring_node


@dataclass(frozen=True)
class RuntimePlan:
    """The plan for the chosen runtime. ``load``: the head's own load request for it."""

    choice: RuntimeChoice
    load: Load
    survey: Survey
    together: ConnectedPlan


def plan_by_runtime(
    plain: RuntimePlan,
    plan: Callable[[Survey, Load], ConnectedPlan],
    survey_again: Callable[[Load], Survey],
    me: str,
) -> RuntimePlan:
    """``plain``, which was chosen without looking at GPUs, or the plan for torch if that is better.

    ``me``: the head's node id. ``survey_again`` asks the machines for measurements with another runtime. It and
    ``plan`` are called only if there is a GPU. Raises NodeRefused, Cancelled.
    """
    choice, survey = plain.choice, plain.survey
    if choice.name != "native" or not _has_gpu(survey) or "torch" not in survey.facts[me].runtimes:
        return plain
    by_torch = msgspec.structs.replace(as_ring_node(plain.load, "torch"), runtime="torch")
    again = survey_again(by_torch)
    together = plan(again, by_torch)
    names, guessed = _gpus(together.decision, again)
    chosen = ring_choice(choice, _forecast(plain.together.decision), _forecast(together.decision), names, guessed)
    if chosen.name == "torch":
        return RuntimePlan(chosen, by_torch, again, together)
    return RuntimePlan(chosen, plain.load, survey, plain.together)


def _has_gpu(survey: Survey) -> bool:
    return any(facts.gpu is not None and "torch" in facts.runtimes for facts in survey.facts.values())


def _forecast(decision: RingDecision) -> RingForecast:
    return RingForecast(decision.kind != "refused", step_seconds(decision))


def _gpus(decision: RingDecision, survey: Survey) -> tuple[list[str], list[str]]:
    """The GPUs that ``decision`` uses, in words, and those of them that were not measured."""
    shares = decision.facts.nodes if decision.facts is not None else []
    shares = shares[:1] if decision.kind == "alone" else shares[1:] if decision.kind == "elsewhere" else shares
    names, guessed = [], []
    for share in shares:
        gpu = survey.facts[share.node_id].gpu
        if share.gpu and gpu is not None:
            names.append(f"{share.gpu} of {share.name}")
            guessed += [names[-1]] if gpu.calibration is None else []
    return names, guessed
