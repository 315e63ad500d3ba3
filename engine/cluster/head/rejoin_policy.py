"""The choice of machines for a ring that is formed again while a person waits for an answer.

Machines that lack their weights are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.cluster.head.survey import Surveyor
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.control_messages import WantedFacts, check_facts
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, stopped_by
from engine.cluster.weights.weight_fingerprint import known_weights
from engine.ipc.progress import ProgressCallback
from engine.planning.ring_nodes import NodeFacts

LOOK_S = 3.0
"""Timeout in seconds for a machine's answer about what it has. The next question asks it again."""
AGAIN_S = 30.0
"""Seconds between the second refusal of a machine and the next try. They double after each further refusal, because
every try takes a forming."""
MOST_AGAIN_S = 1800.0
WORTH = 0.5
"""Fraction of an even share of the experts that a machine must hold to count as having its shard. Shards differ in
size."""


@dataclass
class Refusals:
    """The refusals of one process: their number in a row, and the time from which it is tried again."""

    process: str
    count: int = 0
    again: float = math.inf


class RejoinPolicy:
    """Divides machines into members, which belong to the ring or have their shard of the model, and others."""

    def __init__(self, surveyor: Surveyor, clock: Callable[[], float] = time.monotonic) -> None:
        self.members: set[str] = set()
        """Node ids of the machines that were present when the person formed the ring, or that later plans used."""
        self._surveyor = surveyor
        self._apart: set[tuple[str, str]] = set()
        """Node ids and processes of machines that are left out for now. A restarted machine is checked again."""
        self._notified: set[str] = set()
        self._clock = clock
        self._refused: dict[str, Refusals] = {}

    def put_off(self, nodes: Iterable[tuple[str, str]]) -> None:
        """Leave out these machines (node ids, processes) until they leave or restart: the person did not want to wait
        for them, or they contributed nothing."""
        self._apart.update(nodes)

    def split(
        self, machines: Sequence[Candidate], central: bool, progress: ProgressCallback
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The members among ``machines``, and the others. ``central``: only experts are sent. Raises Cancelled."""
        self._apart &= {_key(machine) for machine in machines}
        regular, others = list[Candidate](), list[Candidate]()
        for machine in machines:
            if _key(machine) in self._apart:
                others.append(machine)
                continue
            if machine.node_id in self.members:
                regular.append(machine)
                continue
            try:
                has_shard = self._has_shard(machine, len(machines) + 1, central, progress)
            except NodeRefused:
                others.append(machine)
                continue
            if not has_shard:
                self._apart.add(_key(machine))
            (regular if has_shard else others).append(machine)
        return regular, others

    def refused(self, node_id: str, process: str) -> None:
        """Record a refusal.

        The next question tries the machine again, because the reason may pass (it was busy with the former ring, or its
        link broke). After further refusals in a row, it is tried only :data:`AGAIN_S` seconds later or more.
        """
        refusals = self._refused.get(node_id)
        if refusals is None or refusals.process != process:
            refusals = self._refused[node_id] = Refusals(process)
        refusals.count += 1
        pause = 0.0 if refusals.count == 1 else min(MOST_AGAIN_S, AGAIN_S * 2 ** (refusals.count - 2))
        refusals.again = self._clock() + pause

    def accepted(self, node_ids: Iterable[str]) -> None:
        """Forget the refusals of these machines, which are now in the ring."""
        for node_id in node_ids:
            self._refused.pop(node_id, None)

    def take_due(self, node_id: str) -> bool:
        """Whether it is time to try a machine again that refused. True only once for each refusal."""
        known = self._refused.get(node_id)
        if known is None or self._clock() < known.again:
            return False
        known.again = math.inf
        return True

    def lines(self, others: Sequence[Candidate]) -> list[str]:
        """A line for each newly checked machine of ``others``. Each line is returned only once."""
        fresh = [
            machine for machine in others if _key(machine) in self._apart and machine.node_id not in self._notified
        ]
        self._notified.update(machine.node_id for machine in fresh)
        if self._surveyor.headers.profile is None:
            return []  # nothing of it could be shared
        return [
            f"{machine.name} is there now; to share the model with it, form the ring anew (f8, then r)."
            for machine in fresh
        ]

    def _has_shard(self, machine: Candidate, nodes: int, central: bool, progress: ProgressCallback) -> bool:
        """Whether the machine needs hardly any weights sent. Raises NodeRefused, Cancelled."""
        profile = self._surveyor.headers.profile
        weights = known_weights(self._surveyor.folder)
        if profile is None or not weights:
            return False
        calls = CallGroup()
        wanted = WantedFacts(shape=None, weights=weights)

        def look() -> NodeFacts:
            found = machine.client.call("Facts", wanted, NodeFacts, LOOK_S, calls)
            check_facts(found)
            return found

        with stopped_by(lambda: progress(f"asking {machine.name} what it has", 0, 0, ""), calls.end):
            facts = ask(machine, look)
        held = sum(len(set(experts)) for experts in facts.has.values())
        even = len(profile.layers) * profile.experts / nodes
        return (central or facts.has_trunk) and held >= WORTH * even


def _key(one: Candidate) -> tuple[str, str]:
    return one.node_id, one.process
