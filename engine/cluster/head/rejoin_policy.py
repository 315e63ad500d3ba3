"""The rejoin policy: which machines a ring takes in when it is formed again while a person waits for an answer.

A machine that lacks its weights is not taken in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cluster.head.survey import Surveyor
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.control_messages import NodeFacts, WantedFacts, check_facts
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, stopped_by
from engine.cluster.weights.weight_fingerprint import known_weights
from engine.ipc.progress import ProgressCallback

LOOK_S = 3.0
"""Timeout in seconds for a machine's answer about what it has. The next question asks it again."""
WORTH = 0.5
"""Fraction of an even share of the experts that a machine must have to count as having its shard, as shards differ in
size."""


class RejoinPolicy:
    """Divides machines into members, which belong to the ring or have their shard of the model, and others."""

    def __init__(self, surveyor: Surveyor) -> None:
        self.members: set[str] = set()
        """Node ids of the machines that were present when the person formed the ring, or that later plans used."""
        self._surveyor = surveyor
        self._apart: set[tuple[str, str]] = set()
        """Node ids and processes of machines that are put off. A restarted one is checked again."""
        self._notified: set[str] = set()
        self._refused: dict[str, str] = {}

    def put_off(self, nodes: Iterable[tuple[str, str]]) -> None:
        """Put off these machines (node ids, processes) until they leave or restart: the person did not want to wait for
        them, or they contributed nothing."""
        self._apart.update(nodes)

    def split(
        self, machines: Sequence[Candidate], central: bool, progress: ProgressCallback
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The members among ``machines``, and the others. ``central``: only experts are sent. Raises Cancelled."""
        self._apart &= {_key(one) for one in machines}
        regular, others = list[Candidate](), list[Candidate]()
        for one in machines:
            if _key(one) in self._apart:
                others.append(one)
                continue
            if one.node_id in self.members:
                regular.append(one)
                continue
            try:
                has_shard = self._has_shard(one, len(machines) + 1, central, progress)
            except NodeRefused:
                others.append(one)
                continue
            if not has_shard:
                self._apart.add(_key(one))
            (regular if has_shard else others).append(one)
        return regular, others

    def may_refuse(self, node_id: str, process: str) -> bool:
        """A machine refused. Returns whether the next question may try it again.

        Once, as the reason may pass (it was busy with the former ring), and then no longer, as every try takes a
        forming.
        """
        first = self._refused.get(node_id) != process
        self._refused[node_id] = process
        return first

    def lines(self, others: Sequence[Candidate]) -> list[str]:
        """A line for each of ``others`` that was checked. Each is returned once."""
        fresh = [one for one in others if _key(one) in self._apart and one.node_id not in self._notified]
        self._notified.update(one.node_id for one in fresh)
        if self._surveyor.headers.profile is None:
            return []  # nothing of it could be shared
        return [
            f"{one.name} is there now; to share the model with it, form the ring anew (f8, then r)." for one in fresh
        ]

    def _has_shard(self, one: Candidate, nodes: int, central: bool, progress: ProgressCallback) -> bool:
        """Whether almost nothing would have to be sent to it. Raises NodeRefused, Cancelled."""
        profile = self._surveyor.headers.profile
        weights = known_weights(self._surveyor.folder)
        if profile is None or not weights:
            return False
        calls = CallGroup()
        wanted = WantedFacts(shape=None, weights=weights)

        def look() -> NodeFacts:
            found = one.client.call("Facts", wanted, NodeFacts, LOOK_S, calls)
            check_facts(found)
            return found

        with stopped_by(lambda: progress(f"asking {one.name} what it has", 0, 0, ""), calls.end):
            facts = ask(one, look)
        held = sum(len(set(experts)) for experts in facts.has.values())
        even = len(profile.layers) * profile.experts / nodes
        return (central or facts.has_trunk) and held >= WORTH * even


def _key(one: Candidate) -> tuple[str, str]:
    return one.node_id, one.process
