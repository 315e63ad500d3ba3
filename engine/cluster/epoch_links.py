"""All links of one epoch on one node: the exchanges that were tried and measured, and the command links."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

from engine.cluster.membership.control_messages import EpochSpec
from engine.cluster.rehearsal import LARGEST_WIDTH, Rehearsal
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.addresses import as_dialled
from engine.cluster.transport.connecting import connect_commands
from engine.cluster.transport.epochs import CONNECT_S, Epoch, Member
from engine.cluster.transport.exchange import DECODE_BYTES, Exchange, Link, PeerLost, measure_exchange
from engine.cluster.transport.mesh import Mesh
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.moe.expert_parallel import RankContext


class EpochLinks:
    """The links of an epoch, made by :func:`connect_epoch`. :meth:`close` wakes waiting threads; it may be called from
    any thread, and twice."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.medians: dict[ExchangeName, float] = {}
        self.layer_s: dict[ExchangeName, float] = {}
        """Rehearsed seconds of a layer of a decoding step beside trunk and experts."""
        self.problems: dict[ExchangeName, str] = {}
        self.commands: dict[int, Link] = {}
        self._moving: Exchange | None = None
        """An exchange that is about to take the place of another one."""
        self._exchanges: dict[ExchangeName, Exchange] = {}
        self._lock = threading.Lock()
        self._closed = False

    def add(self, name: ExchangeName, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges[name] = exchange
            closed = self._closed
        if closed:
            exchange.close()
            raise PeerLost("The epoch was ended while its links were made.")

    def add_commands(self, links: Mapping[int, Link]) -> None:
        with self._lock:
            self.commands.update(links)
            closed = self._closed
        if closed:
            for link in links.values():
                link.close()
            raise PeerLost("The epoch was ended while its links were made.")

    def drop(self, name: ExchangeName) -> None:
        with self._lock:
            exchange = self._exchanges.pop(name, None)
        if exchange is not None:
            exchange.close()

    def keep(self, name: ExchangeName) -> Exchange:
        """The exchange ``name``. All others are closed. Raises ModelError if it was not connected."""
        with self._lock:
            exchange = self._exchanges.get(name)
            others = [other for other in self._exchanges if other != name]
        if exchange is None:
            raise ModelError(f"The exchange “{name}” was not connected; form the ring again.", kind="network")
        for other in others:
            self.drop(other)
        return exchange

    def move(self, links: Links, addresses: Mapping[int, str]) -> float:
        """Make all links of a running epoch anew, those to the ranks of ``addresses`` at these first. All nodes do so
        at once, between two passes. What uses the exchange goes on with it; :attr:`commands` are others.

        For an epoch of one mesh with commands. Returns the median seconds of an exchange. Raises ModelError, PeerLost;
        the epoch must be closed then.
        """
        ((name, exchange),) = self._exchanges.items()
        assert isinstance(exchange, Mesh)
        self.epoch = self.epoch.dialling(addresses)
        before, self.commands = dict(self.commands), {}
        try:
            self.add_commands(connect_commands(links, self.epoch))
            moving = open_exchange(name, links, self.epoch)
            try:
                self._begin_moving(moving)
                seconds = measure_exchange(moving, DECODE_BYTES, links.parts.effort.exchange_rounds)
                assert isinstance(moving, Mesh)
                exchange.go_on_over(moving)
            finally:
                # By now it has the former links.
                moving.close()
                self._moving = None
        finally:
            for link in before.values():
                link.close()
        return seconds

    def _begin_moving(self, exchange: Exchange) -> None:
        with self._lock:
            self._moving = exchange
            if self._closed:
                raise PeerLost("The epoch was ended while its links were made.")

    def close(self) -> None:
        self.epoch.given_up.set()
        with self._lock:
            self._closed = True
            exchanges = list(self._exchanges.values()) + ([] if self._moving is None else [self._moving])
            commands = list(self.commands.values())
        for exchange in exchanges:
            with contextlib.suppress(PeerLost, OSError):
                exchange.close()
        for link in commands:
            with contextlib.suppress(PeerLost, OSError):
                link.close()


def connect_epoch(
    links: Links,
    connected: EpochLinks,
    names: Sequence[ExchangeName],
    commands: bool,
    rehearsal: Rehearsal | None = None,
    seconds: float = CONNECT_S,
) -> None:
    """Make the command links, then connect, measure and rehearse the exchanges ``names`` one by one. All nodes do so at
    once.

    The command links are waited for ``seconds``. An exchange that cannot be made is noted and left out. Raises
    ModelError (network) if none can be made, or no command link.
    """
    if commands:
        connected.add_commands(connect_commands(links, connected.epoch, seconds))
    for name in names:
        try:
            exchange = open_exchange(name, links, connected.epoch)
            connected.add(name, exchange)
            median = measure_exchange(exchange, DECODE_BYTES, links.parts.effort.exchange_rounds)
            if rehearsal is not None:
                connected.layer_s[name] = rehearsal.run(exchange)
            connected.medians[name] = median
        except (ModelError, PeerLost, OSError) as error:
            connected.problems[name] = str(error)
            connected.drop(name)
        if connected.epoch.given_up.is_set():
            # It may have been this exchange that failed for it; the others that were made are of no use either.
            raise PeerLost("The epoch was ended while its links were made.")
    if names and not connected.medians:
        raise ModelError(next(iter(connected.problems.values())), kind="network")


def rehearsal_of(spec: EpochSpec, threads: int | None, machines: tuple[tuple[int, ...], ...] = ()) -> Rehearsal | None:
    """The rehearsal of the epoch's nodes, on ``threads`` threads here; None if its head does not ask for one.
    ``machines``: see :class:`Rehearsal`."""
    if not 0 < spec.width <= LARGEST_WIDTH or not 0 < spec.experts_per_token <= spec.placement.experts:
        return None
    return Rehearsal(rank_context_of(spec), spec.width, spec.experts_per_token, threads, spec.one_by_one, machines)


def epoch_of(spec: EpochSpec, names: Mapping[int, str]) -> Epoch:
    """The epoch as the links need it. ``names`` by rank, as far as this node knows them."""
    members = tuple(
        Member(one.rank, one.node_id, one.certificate, tuple(as_dialled(one.addresses)), names.get(one.rank, ""))
        for one in spec.members
    )
    return Epoch(spec.epoch, spec.rank, members, spec.key, tuple(spec.trusted))


def rank_context_of(spec: EpochSpec) -> RankContext:
    """The rank context that the head gave to this node."""
    return RankContext(spec.epoch, spec.rank, spec.placement, spec.mode, spec.loading, tuple(spec.weights))
