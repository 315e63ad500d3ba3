"""A formed ring on its head, and the watch over its nodes."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.cluster.epoch_links import EpochLinks
from engine.cluster.formation import PassControl
from engine.cluster.membership.client import PeerClient, Unreachable
from engine.cluster.membership.control_messages import EmptyBody, EndEpoch
from engine.cluster.membership.peer_table import PeerTable
from engine.cluster.transport.exchange import Link, PeerLost
from engine.cluster.waiting import Waits
from engine.errors import LinkLost, ModelError
from engine.ipc.messages.ring import RingFacts
from engine.moe.rank_context import HEAD, RankContext
from engine.runtimes.protocol import LoadedModel

WATCH_S = 0.1
END_S = 1.0
LEFT = "left the ring"


class FormedRing:
    """See :class:`engine.cluster.formation.Formation`.

    ``nodes``: node ids by rank; ``links`` None: one machine alone."""

    def __init__(
        self,
        table: PeerTable,
        context: RankContext,
        facts: RingFacts,
        model: LoadedModel,
        layers: PassControl,
        links: EpochLinks | None,
        nodes: Mapping[int, str],
        names: Mapping[int, str],
        notices: list[str],
    ) -> None:
        self.context = context
        self.facts = facts
        self.model = model
        self.layers = layers
        self.names = dict(names)
        self.notices = notices
        self.newcomers: frozenset[str] = frozenset()
        self.apart: frozenset[str] = frozenset()
        self.nodes = dict(nodes)
        self._table = table
        self._links = links
        self._lost: PeerLost | None = None
        self.silent: list[str] = []
        """Node ids of machines that were there and contributed nothing."""
        self._seen: set[int] = set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._watching = threading.Thread(target=self._watch, name="ring-watch", daemon=True)
        table.set_ring(self.nodes.values())
        if self.followers:
            self._watching.start()

    @property
    def command_links(self) -> Mapping[int, Link]:
        return self._links.commands if self._links is not None else {}

    @property
    def followers(self) -> dict[int, str]:
        """The followers' node ids by rank."""
        return {rank: node_id for rank, node_id in self.nodes.items() if rank != HEAD}

    def lost(self) -> PeerLost | None:
        return self._lost

    def why_lost(self, lost: PeerLost) -> PeerLost:
        """See Formation."""
        known = self._lost
        if known is None and self.followers:
            self._lose(what_broke(self._table, self.nodes, self.names, lost))
        return self._lost or lost

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """See :class:`engine.cluster.formation.Formation`."""
        self.silent += [self.nodes[rank] for rank in ranks]
        who = ", ".join(self.names[rank] for rank in ranks)
        self._lose(PeerLost(f"{who} {why}".strip(), ranks))

    def forgotten(self, node_id: str) -> None:
        """End the ring now if the machine, which is no longer paired, is in it."""
        for rank, other in self.followers.items():
            if other == node_id:
                self._lose(PeerLost(f"{self.names[rank]} is not paired any more", [rank]))

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        if self._lost is None:
            # Told first, they do not take the closing of the links for a loss.
            end_epoch(self._table, self.followers.values(), self.context.epoch)
        if self._links is not None:
            self._links.close()
        if self._watching.is_alive() and self._watching is not threading.current_thread():
            self._watching.join(END_S)
        if self._lost is not None:
            end_epoch(self._table, self.followers.values(), self.context.epoch)
        gone = [self.nodes[rank] for rank in self._lost.ranks if rank in self.nodes] if self._lost is not None else []
        self._table.set_ring([], gone)
        self.model.close()
        # What refers to itself would keep the files mapped, and their memory, until it happens to be collected.
        gc.collect()

    def tell_over(self) -> None:
        """Notify the others that the epoch is over, as this machine's network closes. They then do not take it for a
        loss."""
        if not self._closed.is_set() and self._lost is None:
            end_epoch(self._table, self.followers.values(), self.context.epoch)

    def _watch(self) -> None:
        """Watch for lost nodes and close the exchange then, so that nobody waits for them."""
        while not self._closed.wait(WATCH_S):
            for rank, node_id in self.followers.items():
                why = self._gone(rank, node_id)
                if why:
                    lost = PeerLost(f"{self.names[rank]} {why}", [rank])
                    if why == LEFT:
                        lost = what_broke(self._table, self.nodes, self.names, PeerLost(str(lost)))
                        lost = lost if isinstance(lost, LinkLost) or lost.ranks else PeerLost(str(lost), [rank])
                    self._lose(lost)
                    return

    def _gone(self, rank: int, node_id: str) -> str:
        view = self._table.view(node_id)
        if view is None:
            return "is not paired any more"
        if not view.alive:
            return "does not answer any more"
        if not view.reachable:
            return "cannot be reached any more"
        epoch = view.load.epoch if view.load is not None else ""
        if epoch == self.context.epoch:
            self._seen.add(rank)
        elif rank in self._seen:
            return LEFT
        return ""

    def _lose(self, lost: PeerLost) -> None:
        with self._lock:
            self._lost = self._lost or lost
            gone = [self.nodes[rank] for rank in self._lost.ranks if rank in self.nodes]
        self._table.set_ring([node_id for node_id in self.nodes.values() if node_id not in gone], gone)
        if self._links is not None:
            self._links.close()


class AloneLayers:
    """The layers of a ring of one, which exchanges nothing. A pass is stopped by the model's own means."""

    waits = Waits()

    def begin_pass(self) -> None:
        return

    def abort(self) -> None:
        return

    def give_up(self, reason: str = "") -> bool:
        return False


def end_epoch(table: PeerTable, nodes: Iterable[str], epoch: str) -> None:
    """Notify ``nodes`` (node ids) at the same time that ``epoch`` is over. Whoever does not answer notices by
    itself."""
    clients: list[PeerClient] = []
    for node_id in nodes:
        view = table.view(node_id)
        if view is not None and view.client is not None:
            clients.append(view.client)
    if not clients:
        return

    def end(client: PeerClient) -> None:
        with contextlib.suppress(ModelError, PeerLost, Unreachable):
            client.call("End", EndEpoch(epoch=epoch), EmptyBody, END_S)

    with ThreadPoolExecutor(len(clients), thread_name_prefix="ending") as pool:
        list(pool.map(end, clients))


# --- the cause of a loss ---------------------------------------------------------------------------------------------

ASK_S = 1.0
"""Seconds within which a machine that is there reports its state."""


def what_broke(table: PeerTable, nodes: Mapping[int, str], names: Mapping[int, str], lost: PeerLost) -> PeerLost:
    """``lost``, or more exactly which machine is gone or which link broke. ``nodes``: node ids by rank.

    Asks the followers for their state. A node whose link broke leaves the ring, and others that only hear of its
    leaving follow it.
    """
    moment = time.monotonic()
    table.send_heartbeats(ASK_S)
    ranks = {node_id: rank for rank, node_id in nodes.items()}
    gone = []
    broken = {frozenset((HEAD, rank)) for rank in lost.ranks if rank != HEAD}
    for rank, node_id in nodes.items():
        view, watch = table.view(node_id), table.watch(node_id)
        if rank == HEAD:
            continue
        if view is None or watch is None or view.client is None or not watch.notified_since(moment):
            gone.append(rank)
        elif view.load is not None:
            broken |= {frozenset((rank, ranks[other])) for other in view.load.broken if other in ranks}
    if gone:
        if set(lost.ranks) & set(gone):
            return lost
        who = " and ".join(names[rank] for rank in gone)
        return PeerLost(f"{who} {'does' if len(gone) == 1 else 'do'} not answer any more", gone)
    links = [sorted(pair) for pair in sorted(map(sorted, broken)) if len(pair) == 2]
    if not links:
        return lost
    called = [
        f"the link to {names[second]}" if first == HEAD else f"the link between {names[first]} and {names[second]}"
        for first, second in links
    ]
    text = " and ".join(called)
    return LinkLost(f"{text[0].upper()}{text[1:]} broke")
