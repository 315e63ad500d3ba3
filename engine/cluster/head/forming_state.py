"""Forming a ring as a plan: what comes next, given what was done and what failed. Everything here is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal

MOST_LOSSES = 3
"""Maximum losses of links or of unknown machines during one forming, and maximum waits for silent machines."""

Kind = Literal["refused", "alone", "elsewhere", "ring"]
"""Kind of a :class:`engine.planning.ring_plan.RingDecision`."""
FailureKind = Literal["lost", "unconnected", "changed", "gone", "refused"]
"""A loss whose cause is not known; no link could be opened; a machine stopped answering or answers again while the
others were worked with; it did not answer a call; it refused."""


class Stage(Enum):
    """A step of forming."""

    PLAN = auto()
    """Survey the machines and plan."""
    REFUSE = auto()
    """Say what is missing."""
    SEND = auto()
    """Send the weights."""
    CONNECT = auto()
    """Connect, measure together, and decide again."""
    LOAD = auto()
    """Have all nodes load their shards."""
    LOAD_REMOTE = auto()
    """Have the other machine load the model."""
    LOAD_ALONE = auto()
    """Load the model here."""
    FINISH = auto()
    """Use what was formed."""


LADDERS: Mapping[Kind | None, tuple[Stage, ...]] = {
    None: (Stage.PLAN,),
    "refused": (Stage.REFUSE,),
    "alone": (Stage.LOAD_ALONE, Stage.FINISH),
    "elsewhere": (Stage.SEND, Stage.CONNECT, Stage.LOAD_REMOTE, Stage.FINISH),
    "ring": (Stage.SEND, Stage.CONNECT, Stage.LOAD, Stage.FINISH),
}
"""Steps by the kind of the decision; None before there is one."""


@dataclass(frozen=True)
class Failure:
    """A failure of a step. ``node_id`` is the machine it is attributed to; empty if none in particular."""

    kind: FailureKind
    node_id: str = ""


@dataclass(frozen=True)
class TryAgain:
    """Begin again with the machines of the state."""


@dataclass(frozen=True)
class WaitFor:
    """Wait for the silent machine, for a limited time."""

    node_id: str


@dataclass(frozen=True)
class LeaveOut:
    """Go on without the machine."""

    node_id: str


@dataclass(frozen=True)
class GiveUp:
    """End the forming with the failure."""


Task = Stage | TryAgain | WaitFor | LeaveOut | GiveUp


@dataclass(frozen=True)
class FormingState:
    """The state of one forming. ``first``: no ring of the model was formed before, so that no answer waits.

    ``machines`` are the node ids of the machines that the ring is formed of.
    """

    first: bool
    machines: frozenset[str]
    kind: Kind | None = None
    done: frozenset[Stage] = frozenset()
    failure: Failure | None = None
    waited: bool = False
    """Whether the machine that failed was waited for in vain."""
    losses: int = 0
    waits: int = 0
    silent: frozenset[str] = frozenset()
    """Node ids of the machines that are left out because they did not answer."""

    @property
    def awaited(self) -> frozenset[str]:
        """Node ids of the silent machines whose answer ends the present try. Later an answer waits, and they do not."""
        return self.silent if self.first and self.waits < MOST_LOSSES else frozenset()

    def did(self, step: Stage, kind: Kind | None = None) -> FormingState:
        """The state after a step. ``kind`` is that of a new decision."""
        return replace(self, done=self.done | {step}, kind=kind or self.kind)

    def failed(self, failure: Failure) -> FormingState:
        """The state after a failure."""
        return replace(self, failure=failure, waited=False, losses=self.losses + (not failure.node_id))

    def tried_again(self) -> FormingState:
        """The state at the beginning of another try."""
        return replace(self, kind=None, done=frozenset(), failure=None, waited=False)

    def waited_for(self, node_id: str, is_back: bool) -> FormingState:
        """The state after waiting for a machine."""
        state = replace(self, waits=self.waits + 1, waited=True)
        if not is_back:
            return state
        return replace(state, machines=self.machines | {node_id}, silent=self.silent - {node_id}).tried_again()

    def left_out(self, node_id: str) -> FormingState:
        """The state without a machine."""
        is_silent = self.failure is not None and self.failure.kind != "refused"
        silent = self.silent | {node_id} if is_silent else self.silent
        return replace(self, machines=self.machines - {node_id}, silent=silent).tried_again()


def next_task(state: FormingState) -> Task:
    """What comes next."""
    failure = state.failure
    if failure is None:
        return next(step for step in LADDERS[state.kind] if step not in state.done)
    if not failure.node_id:
        # At first, the wanted exchange is not available, which is said. Later it was, an answer waits, and all machines
        # may have been too busy for a moment.
        is_final = state.losses > MOST_LOSSES or (failure.kind == "unconnected" and state.first)
        return GiveUp() if is_final else TryAgain()
    # At first, the silence of a machine of the ring was borne for longer than it would be waited for now.
    was_borne = failure.kind == "changed" and state.first and failure.node_id not in state.silent
    if failure.kind != "refused" and not was_borne and not state.waited and state.waits < MOST_LOSSES:
        return WaitFor(failure.node_id)
    return TryAgain() if failure.node_id in state.silent else LeaveOut(failure.node_id)
