"""A formed ring on its head, and the watch over its nodes."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.cluster import commands
from engine.cluster.contributions import Waits
from engine.cluster.epoch_links import EpochLinks
from engine.cluster.formation import PassControl
from engine.cluster.membership.client import PeerClient, Unreachable
from engine.cluster.membership.control_messages import EmptyBody, EndEpoch
from engine.cluster.membership.links import Way
from engine.cluster.membership.peer_table import PeerTable
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.exchange import Link, PeerLost
from engine.errors import LinkLost, ModelError
from engine.ipc.messages.ring import LinkFacts, RingFacts
from engine.moe.expert_parallel import HEAD, RankContext
from engine.runtimes.protocol import LoadedModel

WATCH_S = 0.1
"""Seconds between two checks of the nodes' states."""
END_S = 1.0
"""Timeout in seconds for notifying a machine that the epoch is over."""


class FormedRing:
    """See :class:`engine.cluster.formation.Formation`.

    ``nodes`` are node ids by rank. ``links`` is None if one machine computes alone.
    """

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
        self.patience = table.times.patience
        self.notices = notices
        self.newcomers: frozenset[str] = frozenset()
        self.without_links: frozenset[str] = frozenset()
        self.nodes = dict(nodes)
        self._table = table
        self._links = links
        self._lost: PeerLost | None = None
        self.silent: list[str] = []
        """Node ids of machines that were alive and contributed nothing."""
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
        self._lose(PeerLost(f"{who} {why}".strip(), ranks, reason=why))

    def forgotten(self, node_id: str) -> None:
        """End the ring now if the machine, which is no longer paired, is in it."""
        for rank, other in self.followers.items():
            if other == node_id:
                self._lose(self._lost_node(rank, "is not paired any more"))

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        if self._lost is None:
            # The followers are notified first: they would take closing links for a loss.
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
        # Reference cycles would keep the files mapped until the next collection.
        gc.collect()

    @property
    def moves(self) -> bool:
        """Whether the links can be made anew in the running epoch."""
        return bool(self.command_links) and not self.facts.elsewhere and self.facts.exchange == "tls"

    def move(self, links: Links, faster: Mapping[Way, LinkFacts]) -> float:
        """Go on over the ``faster`` links, between two passes: what the nodes keep of conversations stays.

        Returns the median seconds of an exchange. Raises ModelError, PeerLost; the epoch must be ended then.
        """
        assert self._links is not None
        ranks = {node_id: rank for rank, node_id in self.nodes.items()}
        addresses: dict[int, dict[int, str]] = {rank: {} for rank in self.nodes}
        for (first, second), link in faster.items():
            addresses[ranks[first]][ranks[second]] = link.address
        for rank, link_to in self.command_links.items():
            known = faster.get((self.nodes[HEAD], self.nodes[rank]))
            link_to.send(commands.encode(commands.MoveLinks(addresses[rank], known)))
        return self._links.move(links, addresses[HEAD])

    def announce_end(self) -> None:
        """Notify the followers that the epoch is over because this machine's network closes. Otherwise they would see a
        loss."""
        if not self._closed.is_set() and self._lost is None:
            end_epoch(self._table, self.followers.values(), self.context.epoch)

    def _watch(self) -> None:
        """Close the exchange as soon as a node is lost, so that nobody waits for it."""
        while not self._closed.wait(WATCH_S):
            for rank, node_id in self.followers.items():
                lost = self._check(rank, node_id)
                if lost is not None:
                    self._lose(lost)
                    return

    def _check(self, rank: int, node_id: str) -> PeerLost | None:
        """The loss of a follower, or None while it is in the epoch."""
        view = self._table.view(node_id)
        if view is None:
            return self._lost_node(rank, "is not paired any more")
        if not view.alive:
            return self._lost_node(rank, "does not answer any more")
        if not view.reachable:
            return self._lost_node(rank, "cannot be reached any more")
        epoch = view.load.epoch if view.load is not None else ""
        if epoch == self.context.epoch:
            self._seen.add(rank)
        elif rank in self._seen:
            left = self._lost_node(rank, "left the ring")
            unknown = PeerLost(str(left), reason=left.reason, noticed_at=left.ranks)
            cause = what_broke(self._table, self.nodes, self.names, unknown)
            return cause if isinstance(cause, LinkLost) or cause.ranks else left
        return None

    def _lost_node(self, rank: int, reason: str) -> PeerLost:
        return PeerLost(f"{self.names[rank]} {reason}", [rank], reason=reason)

    def _lose(self, lost: PeerLost) -> None:
        with self._lock:
            self._lost = self._lost or lost
            gone = [self.nodes[rank] for rank in self._lost.ranks if rank in self.nodes]
        self._table.set_ring([node_id for node_id in self.nodes.values() if node_id not in gone], gone)
        if self._links is not None:
            self._links.close()


class AloneLayers:
    """The layers of a ring of one machine, which exchanges nothing. The model itself stops a pass."""

    waits = Waits()

    def begin_pass(self) -> None:
        return

    def abort(self) -> None:
        return

    def give_up(self, reason: str = "") -> bool:
        return False


def end_epoch(table: PeerTable, nodes: Iterable[str], epoch: str) -> None:
    """Notify ``nodes`` (node ids) in parallel that ``epoch`` is over. A node that does not answer notices by itself."""
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
"""Timeout in seconds for a heartbeat that asks a live machine for its state."""


def what_broke(table: PeerTable, nodes: Mapping[int, str], names: Mapping[int, str], lost: PeerLost) -> PeerLost:
    """The cause of ``lost``: which machine is gone or which link broke, or ``lost`` itself if that cannot be found out.

    ``nodes`` are node ids by rank. The followers are asked for their state: a node whose link broke leaves the ring,
    and the others follow it although their own links work.
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
        reason = f"{'does' if len(gone) == 1 else 'do'} not answer any more"
        return PeerLost(f"{who} {reason}", gone, reason=reason)
    links = [sorted(pair) for pair in sorted(map(sorted, broken)) if len(pair) == 2]
    if not links:
        return lost
    called = [
        f"the link to {names[second]}" if first == HEAD else f"the link between {names[first]} and {names[second]}"
        for first, second in links
    ]
    text = " and ".join(called)
    return LinkLost(f"{text[0].upper()}{text[1:]} broke")
