"""Machines that the head reaches but that do not all reach one another.

A ring is planned without a machine whose links cannot be opened. These links are tried again in the background, so that
no question waits for it.
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
class ConnectedPlan:
    """The plan for machines that reach one another.

    ``without_links`` are the missing links of each machine that is left out, by node id. ``lines`` has a sentence for
    each of them.
    """

    decision: RingDecision
    without_links: Mapping[str, frozenset[Pair]]
    lines: Sequence[str]


def plan_connected(
    headers: Headers,
    name: str,
    load: Load,
    order: Sequence[tuple[str, str]],
    survey: Survey,
    at_once: float = 1.0,
    waiting: bool = False,
) -> ConnectedPlan:
    """Plan as :func:`engine.cluster.head.survey.decide` does, with machines that can all open links to one another."""
    (me, _), *others = order
    names = {me: THIS_MACHINE, **dict(others)}
    broken = survey.tried.broken

    def plan(ids: Sequence[str]) -> RingDecision:
        nodes = [order[0], *(one for one in others if one[0] in ids)]
        return decide(headers, name, load, nodes, survey, at_once, waiting)

    reaching = plan_reaching(me, [node_id for node_id, _ in others], broken, plan)
    without_links: dict[str, frozenset[Pair]] = {}
    lines = []
    for node_id, called in others:
        if node_id in reaching.others:
            continue
        missing = why_apart(node_id, (me, *reaching.others), broken)
        without_links[node_id] = frozenset(frozenset((node_id, other)) for other in missing)
        other, why = next(iter(missing.items()))
        lines.append(apart_sentence(called, names[other], why))
    return ConnectedPlan(reaching.decision, without_links, lines)


# --- trying missing links again --------------------------------------------------------------------------------------


class LinkRetry:
    """Tries missing links again, in a thread of its own until :meth:`close`.

    ``without_links`` are the missing links by node id. ``restored`` is set as soon as all links of one machine work.
    ``present`` returns the machines that can be reached now.
    """

    def __init__(
        self, node: Node, without_links: Mapping[str, frozenset[Pair]], present: Callable[[], Sequence[Candidate]]
    ) -> None:
        self.restored = threading.Event()
        self._node = node
        self.without_links = dict(without_links)
        self._present = present
        self._closed = threading.Event()
        self._calls = CallGroup()
        if self.without_links:
            threading.Thread(target=self._watch, name="trying links again", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._calls.end()

    def _watch(self) -> None:
        while not self._closed.wait(self._node.parts.times.links_again_s) and not self.restored.is_set():
            # A machine that is gone or refuses is tried again the next time.
            with contextlib.suppress(NodeRefused, ModelError):
                if self._usable_again():
                    self.restored.set()

    def _usable_again(self) -> bool:
        machines = list(self._present())
        me = self._node.identity.node_id
        ids = {me, *(one.node_id for one in machines)}
        missing = {pair for pairs in self.without_links.values() for pair in pairs if pair <= ids}
        ways: list[Way] = [way for way in all_ways(me, machines) if frozenset(way) in missing]
        if not ways:
            return False
        trial = LinkTrial(self._node, machines, ways, secrets.token_hex(8), {})
        with ThreadPoolExecutor(len(machines) + 1, thread_name_prefix="trying links again") as pool:
            broken = trial.result(trial.begin(pool, self._calls)).broken
        return any(pairs <= missing and not pairs & broken.keys() for pairs in self.without_links.values())
