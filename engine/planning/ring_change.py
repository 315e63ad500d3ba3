"""The decision whether to form a working ring anew between two questions. Pure.

Forming it anew loses the keys and values of the conversation, so it must save more time than running them again takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.ipc.messages.ring import RingChoice
from engine.planning.prediction import PREFILL_TOKENS
from engine.planning.ring_plan import ASSUMED_BYTES_PER_S, RingDecision, bytes_sent

AHEAD_TOKENS = 1024
"""Tokens of coming answers over which a change must pay for itself: about eight answers."""
FORMING_S = 2.0
"""Seconds of forming a ring without sending weights."""


@dataclass(frozen=True)
class Rerun:
    """The work that the next question must repeat if the ring is formed anew: ``read`` tokens of prompts, and
    ``passes`` decoding passes.

    ``read_s``: measured seconds per token of a prompt. ``pass_s``: measured seconds per decoding pass. None: not
    measured.
    """

    read: int = 0
    passes: int = 0
    read_s: float | None = None
    pass_s: float | None = None

    def seconds(self, read_s: float | None, pass_s: float | None) -> float | None:
        """Seconds of all this work; None: unknown. ``read_s`` and ``pass_s`` are predictions for what was not
        measured."""
        total = 0.0
        for count, measured, predicted in ((self.read, self.read_s, read_s), (self.passes, self.pass_s, pass_s)):
            each = predicted if measured is None else measured
            if count and each is None:
                return None
            total += count * (each or 0.0)
        return total


@dataclass(frozen=True)
class RingChange:
    """A ring that could replace the present one.

    ``now_s``, ``then_s``: predicted seconds of a token now and afterwards. ``read_s``: predicted seconds of a token of
    a prompt. None: not predicted. ``send_s``: seconds of sending ``nbytes`` of weights. ``asked``: the person asked for
    these machines, however slow they are.
    """

    now_s: float | None
    then_s: float | None
    read_s: float | None
    send_s: float
    nbytes: int
    asked: bool

    def cost_s(self, again: Rerun) -> float | None:
        """Seconds that the change adds before the next answer. None: unknown."""
        running = again.seconds(self.read_s, self.now_s)
        return None if running is None else running + self.send_s + FORMING_S

    def pays(self, again: Rerun) -> bool:
        """Whether the coming answers are expected to save more time than the change takes.

        Without a prediction, a change pays if nothing has to be run again or sent for it.
        """
        if self.asked:
            return True
        cost = self.cost_s(again)
        if self.now_s is None or self.then_s is None or cost is None:
            return not again.read and not again.passes and not self.nbytes
        return AHEAD_TOKENS * (self.now_s - self.then_s) > cost


def step_seconds(decision: RingDecision) -> float | None:
    """Predicted seconds of a token for the choice of ``decision``."""
    return None if decision.chosen_step is None else decision.chosen_step.seconds


def change_to(
    decision: RingDecision,
    now_s: float | None,
    rates: Mapping[str, float],
    choice: RingChoice,
    exchange_s: float | None = None,
) -> RingChange:
    """The change to ``decision`` from a ring whose tokens take ``now_s`` seconds.

    ``rates``: bytes per second from the head to each machine, by node id. ``exchange_s``: seconds of an exchange when
    the machines last measured together, which is more than their links promise.
    """
    nbytes = bytes_sent(decision)
    then_s = step_seconds(decision)
    if decision.kind == "ring" and decision.terms is not None and exchange_s is not None:
        then_s = decision.terms.with_exchange(exchange_s).step().seconds
    slowest = min((rates.get(one, ASSUMED_BYTES_PER_S) for one in decision.ranks[1:]), default=ASSUMED_BYTES_PER_S)
    prefill = decision.prefill
    return RingChange(
        now_s=now_s,
        then_s=then_s,
        read_s=None if prefill is None else prefill.seconds / PREFILL_TOKENS,
        send_s=nbytes / slowest,
        nbytes=nbytes,
        asked=choice.even_if_slower or bool(choice.nodes),
    )
