"""What comes next while a ring is formed: tables of cases, and the same decisions as a loop that keeps no state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.head.forming_state import (
    MOST_LOSSES,
    Failure,
    FormingState,
    GiveUp,
    Kind,
    LeaveOut,
    Stage,
    Task,
    TryAgain,
    WaitFor,
    next_task,
)

MACHINES = frozenset({"attic", "cellar", "studio"})


def state(first: bool = True, **values: object) -> FormingState:
    return FormingState(first, MACHINES, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        (["refused"], [Stage.PLAN, Stage.REFUSE]),
        (["alone"], [Stage.PLAN, Stage.LOAD_ALONE, Stage.FINISH]),
        (
            ["elsewhere", None],
            [Stage.PLAN, Stage.SEND, Stage.CONNECT, Stage.LOAD_REMOTE, Stage.FINISH],
        ),
        (
            ["ring", None],
            [Stage.PLAN, Stage.SEND, Stage.CONNECT, Stage.LOAD, Stage.FINISH],
        ),
        (
            ["ring", "alone"],
            [Stage.PLAN, Stage.SEND, Stage.CONNECT, Stage.LOAD_ALONE, Stage.FINISH],
        ),
    ],
)
def test_the_steps_follow_the_decision(kinds: list[Kind | None], steps: list[Stage]) -> None:
    """The first kind is that of the plan, the second one that of the measurements together."""
    now, decided = state(), dict(zip((Stage.PLAN, Stage.CONNECT), kinds, strict=False))
    for step in steps[:-1]:
        assert next_task(now) is step
        now = now.did(step, decided.get(step))
    assert next_task(now) is steps[-1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("kind", "losses", "at_first", "later"),
    [
        ("lost", 0, TryAgain(), TryAgain()),
        ("lost", MOST_LOSSES - 1, TryAgain(), TryAgain()),
        ("lost", MOST_LOSSES, GiveUp(), GiveUp()),
        ("unconnected", 0, GiveUp(), TryAgain()),
        ("unconnected", MOST_LOSSES, GiveUp(), GiveUp()),
    ],
)
def test_a_loss_that_is_nobodys_ends_the_forming_at_last(
    first: bool, kind: str, losses: int, at_first: Task, later: Task
) -> None:
    failed = state(first, losses=losses).failed(Failure(kind))  # type: ignore[arg-type]
    assert next_task(failed) == (at_first if first else later)


@pytest.mark.parametrize(
    ("kind", "values", "task"),
    [
        ("refused", {}, LeaveOut("attic")),
        ("gone", {}, WaitFor("attic")),
        ("gone", {"first": False}, WaitFor("attic")),
        ("gone", {"waits": MOST_LOSSES}, LeaveOut("attic")),
        ("changed", {}, LeaveOut("attic")),
        ("changed", {"first": False}, WaitFor("attic")),
        ("changed", {"silent": frozenset({"attic"})}, WaitFor("attic")),
        ("changed", {"silent": frozenset({"attic"}), "waits": MOST_LOSSES}, TryAgain()),
    ],
)
def test_a_machine_that_fails_is_waited_for_or_left_out(kind: str, values: dict[str, object], task: Task) -> None:
    assert next_task(state(**values).failed(Failure(kind, "attic"))) == task  # type: ignore[arg-type]


def test_a_machine_that_answers_again_is_taken_in_and_one_that_does_not_is_left_out() -> None:
    failed = state().did(Stage.PLAN, "ring").failed(Failure("gone", "attic"))
    back = failed.waited_for("attic", is_back=True)
    assert (back.machines, back.waits, next_task(back)) == (MACHINES, 1, Stage.PLAN)
    away = failed.waited_for("attic", is_back=False)
    assert next_task(away) == LeaveOut("attic")
    without = away.left_out("attic")
    assert (without.machines, without.silent, without.awaited) == (MACHINES - {"attic"}, {"attic"}, {"attic"})
    assert next_task(without) is Stage.PLAN
    again = without.failed(Failure("changed", "attic")).waited_for("attic", is_back=True)
    assert (again.machines, again.silent, again.awaited) == (MACHINES, frozenset(), frozenset())
    # One that refuses is not waited for, and where an answer waits, nobody is.
    assert state().failed(Failure("refused", "attic")).left_out("attic").silent == frozenset()
    assert state(first=False).failed(Failure("gone", "attic")).left_out("attic").awaited == frozenset()


# --- every course of things -----------------------------------------------------------------------------------------

Course = Sequence[tuple[Failure, bool]]
"""The failures of the tries one after the other, and whether the machine answers when it is waited for."""
FAILURES = st.one_of(
    st.builds(Failure, st.sampled_from(["lost", "unconnected"])),
    st.builds(Failure, st.sampled_from(["changed", "gone", "refused"]), st.sampled_from(sorted(MACHINES))),
)
COURSES = st.lists(st.tuples(FAILURES, st.booleans()), max_size=25)


def planned(first: bool, course: Course) -> Iterator[str]:
    """What happens by the plan."""
    now, left = state(first), iter(course)
    failure, answers = Failure("lost"), False
    while True:
        match next_task(now):
            case WaitFor(node_id):
                yield f"wait for {node_id}"
                now = now.waited_for(node_id, answers)
            case LeaveOut(node_id):
                yield f"without {node_id}"
                now = now.left_out(node_id)
            case TryAgain():
                now = now.tried_again()
            case GiveUp():
                yield "give up"
                return
            case _:
                yield f"try {sorted(now.machines)}, awaiting {sorted(now.awaited)}"
                try:
                    failure, answers = next(left)
                except StopIteration:
                    return
                now = now.did(Stage.PLAN, "ring").failed(failure)


def looped(first: bool, course: Course) -> Iterator[str]:
    """What happens by a loop that says the same in one place, in the order in which it is thought of."""
    machines, silent, losses, waits = set(MACHINES), set[str](), 0, 0
    for failure, answers in course:
        yield f"try {sorted(machines)}, awaiting {sorted(silent) if first and waits < MOST_LOSSES else []}"
        node_id = failure.node_id
        if not node_id:
            losses += 1
            if losses > MOST_LOSSES or (failure.kind == "unconnected" and first):
                yield "give up"
                return
            continue
        silence_was_borne = failure.kind == "changed" and first and node_id not in silent
        if failure.kind != "refused" and not silence_was_borne and waits < MOST_LOSSES:
            waits += 1
            yield f"wait for {node_id}"
            if answers:
                silent.discard(node_id)
                machines.add(node_id)
                continue
        if node_id in silent:
            continue
        yield f"without {node_id}"
        machines.discard(node_id)
        if failure.kind != "refused":
            silent.add(node_id)
    yield f"try {sorted(machines)}, awaiting {sorted(silent) if first and waits < MOST_LOSSES else []}"


@given(st.booleans(), COURSES)
def test_the_plan_decides_as_a_loop_does(first: bool, course: Course) -> None:
    happened = list(planned(first, course))
    assert happened == list(looped(first, course))
    assert sum(event.startswith("wait") for event in happened) <= MOST_LOSSES


@given(st.booleans(), st.lists(FAILURES, min_size=30, max_size=30))
def test_no_course_goes_on_for_ever(first: bool, failures: list[Failure]) -> None:
    """Machines that are not there fail no more, and none that is left out is awaited without an end."""
    now, tries = state(first), 0
    for failure in failures:
        while not isinstance(task := next_task(now), Stage | GiveUp):
            match task:
                case WaitFor(node_id):
                    now = now.waited_for(node_id, is_back=True)
                case LeaveOut(node_id):
                    now = now.left_out(node_id)
                case _:
                    now = now.tried_again()
        if isinstance(task, GiveUp):
            break
        if failure.node_id and failure.node_id not in now.machines | now.awaited:
            continue
        tries += 1
        now = now.failed(failure)
    # A loss each, a wait each, and each machine once again without a wait.
    assert tries <= 1 + MOST_LOSSES + MOST_LOSSES + len(MACHINES) * (1 + MOST_LOSSES)
