"""Machines that a ring goes without because a link of theirs cannot be made: whether it can be again is tried now and
then, so that a question need not wait to find out."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.links import LinkTrial, Way, all_ways
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.errors import ModelError
from engine.planning.reaching import Pair

AGAIN_S = 2.0
"""Between two tries."""


class LeftOut:
    """``apart``: by node id, the links that a machine lacks; it is ``wanted`` again as soon as one has all of them.
    ``there``: the machines that are there now. A thread of its own, until :meth:`close`."""

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
