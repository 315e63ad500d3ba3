"""The search for faster ways between the machines of a ring than those in use: a cable that is back, or a new address.

The search runs in the background and only opens links. They are measured between two questions, and used if they are
clearly faster.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from engine.cluster.head.survey import Surveyor
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.links import (
    LinkTrial,
    Way,
    is_clearly_faster,
    shown_way,
    slower_link,
    was_measured,
    with_gone,
)
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused
from engine.cluster.transport.addresses import as_sent
from engine.cluster.transport.exchange import PeerLost
from engine.errors import Cancelled, ModelError
from engine.ipc.messages.ring import LinkFacts
from engine.ipc.progress import ProgressCallback

SELDOM, SELDOMEST = 15, 960
"""Rounds between two tries of addresses that were not announced anew: at first, and at most. The number doubles after
each measurement in vain, because measuring delays an answer."""
MOST_TRIED = 8
"""Maximum addresses of one link that are tried in a round."""


def worth_trying(
    link: LinkFacts, fastest: LinkFacts | None, addresses: Collection[str], everything: bool = True
) -> list[str]:
    """The addresses at which ``link`` may be faster than at its present one.

    They include the address of the ``fastest`` measurement if that is not in use any more. With ``everything``, they
    include addresses that were measured only while the machines were busier, and those of ``addresses`` that were never
    measured.
    """
    once = fastest is not None and fastest.address != link.address and is_clearly_faster(fastest, link)
    gone = [fastest.address] if fastest is not None and once and (everything or with_gone(link, fastest).gone) else []
    new = [address for address in addresses if not was_measured(link, address)] if everything else []
    return list(dict.fromkeys([*gone, *new]))[:MOST_TRIED]


def slower_lines(links: Mapping[Way, LinkFacts], me: str, name_of: Callable[[str], str]) -> list[str]:
    """A line for each link whose faster way is gone."""
    return [
        f"{_of_link(way, me, name_of)} goes over {shown_way(link)} until {link.gone} is back."
        for way, link in links.items()
        if link.gone
    ]


def moved_line(links: Mapping[Way, LinkFacts], me: str, name_of: Callable[[str], str]) -> str:
    return " ".join(f"{_of_link(way, me, name_of)} goes over {shown_way(link)} now." for way, link in links.items())


def _of_link(way: Way, me: str, name_of: Callable[[str], str]) -> str:
    first, second = way
    return f"The link to {name_of(second)}" if first == me else f"The link from {name_of(first)} to {name_of(second)}"


class FasterLinks:
    """Looks for faster links than ``in_use`` (by way), in a thread of its own until :meth:`close`.

    ``found`` is set as soon as a machine answers where the link to it may be faster; the search then rests until
    :meth:`take` was called. ``present`` returns the machines that can be reached now.
    """

    def __init__(
        self,
        node: Node,
        surveyor: Surveyor,
        in_use: Mapping[Way, LinkFacts],
        present: Callable[[], Sequence[Candidate]],
    ) -> None:
        self.found = threading.Event()
        self.in_use = dict(in_use)
        self._node = node
        self._surveyor = surveyor
        self._present = present
        self._reached: dict[Way, str] = {}
        self._seldom = SELDOM
        self._unfit: set[tuple[Way, str]] = set()
        """Addresses that accepted a link but could not be measured. They are skipped until everything is tried
        again."""
        self._known: set[str] = set()
        """Addresses of all machines in the last round."""
        self._closed = threading.Event()
        self._calls = CallGroup()
        if self.in_use:
            threading.Thread(target=self._watch, name="looking for faster links", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._calls.end()

    def take(self, progress: ProgressCallback) -> dict[Way, LinkFacts]:
        """The links that are clearly faster than those in use. From now on they count as in use. Raises Cancelled."""
        addresses_by_way = {way: [address, self.in_use[way].address] for way, address in self._reached.items()}
        faster: dict[Way, LinkFacts] = {}
        try:
            machines = self._present()
            ids = {self._node.identity.node_id, *(one.node_id for one in machines)}
            wanted = {way: addresses for way, addresses in addresses_by_way.items() if ids.issuperset(way)}
            measured = self._surveyor.measure_addresses(self._node, machines, wanted, progress)
        except Cancelled:
            raise
        except (NodeRefused, ModelError, PeerLost):
            measured = {}
        for way, (new, now) in measured.items():
            best, other = (new, now) if is_clearly_faster(new, now) else (now, new)
            others = [*self.in_use[way].others, slower_link(other.interface, other.address, other.latency_s)]
            link = msgspec.structs.replace(best, others=others)
            self.in_use[way] = with_gone(link, self._surveyor.fastest_link(way))
            if best is new:
                faster[way] = self.in_use[way]
            del self._reached[way]
        self._seldom = SELDOM if faster else min(2 * self._seldom, SELDOMEST)
        self._unfit.update(self._reached.items())
        self._reached = {}
        self.found.clear()
        return faster

    def _watch(self) -> None:
        rounds = 0
        while not self._closed.wait(self._node.parts.times.links_again_s):
            if self.found.is_set():
                continue
            rounds += 1
            # A machine that is gone or refuses is tried again the next time.
            with contextlib.suppress(NodeRefused, ModelError):
                self._look(rounds % self._seldom == 0)

    def _look(self, everything: bool) -> None:
        machines = {machine.node_id: machine for machine in self._present()}
        me = self._node.identity.node_id
        known = {address for machine in machines.values() for address in machine.listeners} | set(self._node.addresses)
        everything = everything or not known <= self._known
        self._known = known
        if everything:
            self._unfit.clear()
        wanted: dict[Way, list[str]] = {}
        for way, link in self.in_use.items():
            first, second = way
            if second in machines and (first == me or first in machines):
                fastest = self._surveyor.fastest_link(way)
                listeners = machines[second].listeners
                if first != me:
                    listeners = tuple(as_sent(listeners))
                addresses = worth_trying(link, fastest, listeners, everything)
                wanted[way] = [address for address in addresses if (way, address) not in self._unfit]
        for turn in range(max(map(len, wanted.values()), default=0)):
            if self._closed.is_set():
                return
            reached = self._try(
                {way: untried[turn] for way, untried in wanted.items() if len(untried) > turn}, machines
            )
            self._reached = {**reached, **self._reached}
        if self._reached:
            self.found.set()

    def _try(self, at: Mapping[Way, str], machines: Mapping[str, Candidate]) -> dict[Way, str]:
        """The addresses among ``at`` that accept a link, by way."""
        ends = {node_id for way in at for node_id in way}
        there = [replace(one, listeners=()) for node_id, one in machines.items() if node_id in ends]
        trial = LinkTrial(self._node, there, list(at), secrets.token_hex(8), at)
        with ThreadPoolExecutor(len(there) + 1, thread_name_prefix="trying faster links") as pool:
            return trial.result(trial.begin(pool, self._calls)).reached
