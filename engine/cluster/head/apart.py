"""Machines that reach the head but not one another: which of them the ring is planned with, and when the others return.

A ring goes without a machine whose links cannot be made. Its links are tried again now and then, so that a question
need not wait to find out.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.cluster.head.survey import Survey, decide
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.links import LinkTrial, Way, all_ways
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.planning.reaching import Pair, plan_reaching, why_apart
from engine.planning.ring_plan import RingDecision
from engine.planning.ring_words import THIS_MACHINE, apart_sentence
from engine.runtimes.model_headers import Headers


@dataclass(frozen=True)
class Together:
    """The plan for machines that reach one another.

    ``apart``: the missing links of each other machine, by node id. ``lines``: a sentence for each of them.
    """

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


# --- machines that are left out --------------------------------------------------------------------------------------

AGAIN_S = 2.0
"""Seconds between two tries."""


class LeftOut:
    """Tries the links of machines that are ``apart`` again, in a thread of its own until :meth:`close`.

    ``apart``: the missing links by node id. ``wanted`` is set as soon as a machine has all of its links. ``there``
    returns the machines that are there now.
    """

    def __init__(
        self, node: Node, apart: Mapping[str, frozenset[Pair]], there: Callable[[], Sequence[Candidate]]
    ) -> None:
        self.wanted = threading.Event()
        self._node = node
        self.apart = dict(apart)
        self._there = there
        self._closed = threading.Event()
        self._calls = CallGroup()
        if self.apart:
            threading.Thread(target=self._watch, name="trying links again", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._calls.end()

    def _watch(self) -> None:
        while not self._closed.wait(AGAIN_S) and not self.wanted.is_set():
            # Whoever is gone, or refuses: then there is nothing to be tried this time.
            with contextlib.suppress(NodeRefused, ModelError):
                if self._works_again():
                    self.wanted.set()

    def _works_again(self) -> bool:
        there = list(self._there())
        me = self._node.identity.node_id
        ids = {me, *(one.node_id for one in there)}
        wanted = {pair for pairs in self.apart.values() for pair in pairs if pair <= ids}
        ways: list[Way] = [way for way in all_ways(me, there) if frozenset(way) in wanted]
        if not ways:
            return False
        trial = LinkTrial(self._node, there, ways, secrets.token_hex(8), {})
        with ThreadPoolExecutor(len(there) + 1, thread_name_prefix="trying links again") as pool:
            broken = trial.result(trial.begin(pool, self._calls)).broken
        return any(pairs <= wanted and not pairs & broken.keys() for pairs in self.apart.values())
