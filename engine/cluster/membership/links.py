"""The links that a ring needs: which of them can be made, and which address of a node is the fastest.

Every node tries and measures its own links. The head asks all of them at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from discovery.names import plain_text
from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.control_messages import Linked, LinksTried, TryLinks
from engine.cluster.membership.node import Node
from engine.cluster.membership.rpc_fanout import Candidate, ask
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.addresses import as_dialled, as_sent, interface_towards, parse_address
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.link_probe import LinkSpeed, measure_link, try_link
from engine.errors import ModelError
from engine.ipc.messages.ring import LinkFacts
from engine.planning.reaching import Pair

MOST_MEASURED = 8
MOST_LOOKED_AT = 32
"""Addresses of one node at which a first connection is tried."""
PROBE_S = 1.0
"""Timeout in seconds for a first connection to all addresses: a machine may name networks that this one is not in."""
ANSWER_S = 3.0
"""Timeout in seconds for measuring one address. An address that takes longer is not used."""


def measure_best(
    links: Links, epoch: str, node_id: str, certificate: bytes, addresses: Sequence[str], name: str = ""
) -> LinkFacts:
    """The fastest of the ``addresses`` of the link listener of the node ``node_id``, and a line for each other one.

    Raises ModelError (network) if none can be reached.
    """
    member = Member(1, node_id, certificate, tuple(addresses), name)
    here = Member(0, links.identity.node_id, links.identity.certificate_pem)
    measured: list[LinkSpeed] = []
    failure: ModelError | None = None
    for address in one_of_each_first(reachable(addresses[:MOST_LOOKED_AT]), _interface)[:MOST_MEASURED]:
        try:
            measured.append(measure_link(links, Epoch(epoch, 0, (here, member), b""), member, address, ANSWER_S))
        except ModelError as error:
            failure = error
    if not measured:
        raise failure or ModelError(f"{member.called} has no address; give it with --peer HOST:PORT.", kind="network")
    measured.sort(key=lambda speed: speed.latency_s)
    best = measured[0]
    return LinkFacts(
        interface=_interface(best.address),
        address=best.address,
        latency_s=best.latency_s,
        bytes_per_s=best.bytes_per_s,
        others=[slower_link(_interface(other.address), other.address, other.latency_s) for other in measured[1:]],
    )


FASTER = 0.5
"""Factor on the latency below which a link is clearly faster: no measurement on a busy machine is wrong by that much
again and again."""


def is_clearly_faster(link: LinkFacts, other: LinkFacts) -> bool:
    return link.latency_s <= FASTER * other.latency_s


def slower_link(interface: str, address: str, latency_s: float) -> str:
    """A link that is not the fastest; see :class:`LinkFacts`."""
    return f"{interface} {address}: {latency_s * 1e6:.0f} µs".strip()


def _measured(link: LinkFacts) -> list[tuple[str, str]]:
    """Interface and address of ``link`` and of the slower ones."""
    others = (other.partition(": ")[0].rpartition(" ") for other in link.others)
    return [(link.interface, link.address), *((interface, address) for interface, _, address in others)]


def was_measured(link: LinkFacts, address: str) -> bool:
    """Whether ``address``, with or without its scope, was among those of which ``link`` is the fastest."""
    return any(address in (one, *as_sent([one])) for _, one in _measured(link))


def shown_way(link: LinkFacts) -> str:
    """``eth0 (80 µs)``"""
    return f"{link.interface or link.address} ({link.latency_s * 1e6:,.0f} µs)"


def has_new_address(interface: str, address: str, before: LinkFacts) -> bool:
    """Whether ``address``, to which packets leave by ``interface``, is the new one of the cable of ``before``.

    An address that was measured beside ``before`` belongs to another way through the same interface.
    """
    return interface == before.interface != "" and not was_measured(before, address)


def with_gone(link: LinkFacts, fastest: LinkFacts | None) -> LinkFacts:
    """``link``, which says whether the ``fastest`` one that was ever measured between its ends is gone."""
    gone = ""
    if fastest is not None and not was_measured(link, fastest.address) and is_clearly_faster(fastest, link):
        is_back = any(has_new_address(interface, address, fastest) for interface, address in _measured(link))
        gone = "" if is_back else shown_way(fastest)
    return msgspec.structs.replace(link, gone=gone)


def reachable(addresses: Sequence[str]) -> list[str]:
    """The addresses at which somebody listens, in their order.

    All of them if nobody listens at any: measuring them gives the reason.
    """
    if len(addresses) < 2:
        return list(addresses)

    def listens(address: str) -> bool:
        try:
            with socket.create_connection(parse_address(address), PROBE_S):
                return True
        except (OSError, ModelError):
            return False

    with ThreadPoolExecutor(len(addresses), thread_name_prefix="looking for addresses") as pool:
        found = list(pool.map(listens, addresses))
    return [address for address, listening in zip(addresses, found, strict=True) if listening] or list(addresses)


def one_of_each_first(addresses: Sequence[str], interface: Callable[[str], str]) -> list[str]:
    """``addresses`` with the first one of each of this machine's interfaces before all others.

    A cut of the list then leaves no interface out while another has two: a cable's only address is often the last.
    """
    first: dict[str, str] = {}
    for address in addresses:
        first.setdefault(interface(address), address)
    return [*first.values(), *(address for address in addresses if address not in first.values())]


def _interface(address: str) -> str:
    return interface_towards(address)


# --- which links can be made -----------------------------------------------------------------------------------------

TRIED_S = 10.0
"""Timeout in seconds for one node to try all its links."""
MOST_AT_ONCE = 16
LONGEST_REASON = 300

Way = tuple[str, str]
"""Node ids of the dialling and the dialled machine."""


@dataclass(frozen=True)
class Tried:
    """The links that can be made.

    ``broken``: the reason by pair of node ids. ``reached``: the address of the link listener by way.
    """

    broken: dict[Pair, str] = field(default_factory=dict)
    reached: dict[Way, str] = field(default_factory=dict)


def all_ways(me: str, machines: Sequence[Candidate]) -> list[Way]:
    """All links of a ring of these machines, in their dialling direction: the lower rank dials."""
    ids = [me, *(one.node_id for one in machines)]
    return [(first, second) for index, first in enumerate(ids) for second in ids[index + 1 :]]


def try_own(links: Links, wanted: Sequence[Linked], stop: threading.Event, names: Mapping[str, str]) -> LinksTried:
    """Try the links from here to all of ``wanted`` that have addresses. ``names`` by node id, where known."""
    asked = [link for link in wanted if link.addresses]

    def attempt(link: Linked) -> tuple[str, str]:
        addresses = as_dialled(link.addresses)
        member = Member(1, link.node_id, link.certificate, tuple(addresses), names.get(link.node_id, ""))
        try:
            return try_link(links, link.epoch, member, addresses, stop), ""
        except ModelError as error:
            return "", str(error)[:LONGEST_REASON] or "unknown"

    with ThreadPoolExecutor(min(MOST_AT_ONCE, max(1, len(asked))), thread_name_prefix="trying links") as pool:
        found = dict(zip((link.node_id for link in asked), pool.map(attempt, asked), strict=True))
    return LinksTried(
        reached={node_id: address for node_id, (address, why) in found.items() if not why},
        failed={node_id: why for node_id, (_, why) in found.items() if why},
    )


class LinkTrial:
    """A trial of the links ``ways`` among this machine and ``machines``. ``best``: the address to try first, by way.

    Raises ModelError for a machine that is no longer paired.
    """

    def __init__(
        self, node: Node, machines: Sequence[Candidate], ways: Collection[Way], epoch: str, best: Mapping[Way, str]
    ) -> None:
        self._node = node
        self._me = node.identity.node_id
        self._by_id = {one.node_id: one for one in machines}
        self._ways = set(ways)
        self._pairs = {frozenset(way) for way in ways}
        self._wanted: dict[str, list[Linked]] = {}
        for first, second in ways:
            listeners = self._by_id[second].listeners
            if first != self._me:
                listeners = tuple(as_sent(listeners))
            addresses = list(dict.fromkeys([*([best[first, second]] if (first, second) in best else []), *listeners]))
            self._wanted.setdefault(first, []).append(self._linked(epoch, second, addresses))
            if first != self._me:
                # The dialled node must know who will come. It knows this machine already.
                self._wanted.setdefault(second, []).append(self._linked(epoch, first, []))
            self._wanted.setdefault(second, [])

    def begin(self, pool: ThreadPoolExecutor, calls: CallGroup) -> list[Future[tuple[str, LinksTried]]]:
        """Have all links tried in ``pool``. Each future is for the links of one node.

        A future raises NodeRefused if its node does not answer or refuses to be in a ring with another one.
        """
        return [pool.submit(self._of_node, node_id, wanted, calls) for node_id, wanted in self._wanted.items()]

    def result(self, tried: Sequence[Future[tuple[str, LinksTried]]]) -> Tried:
        """The nodes' results. All futures that :meth:`begin` returned must be done."""
        tried_links = Tried()
        for future in tried:
            node_id, links = future.result()
            for second, address in links.reached.items():
                if (node_id, second) in self._ways:
                    tried_links.reached[node_id, second] = address
            for second, why in links.failed.items():
                pair = frozenset((node_id, second))
                if pair in self._pairs:
                    tried_links.broken[pair] = plain_text(why, LONGEST_REASON)
        return tried_links

    def _of_node(self, node_id: str, wanted: list[Linked], calls: CallGroup) -> tuple[str, LinksTried]:
        if node_id == self._me:
            names = {one.node_id: one.name for one in self._by_id.values()}
            return node_id, try_own(self._node.links, wanted, calls.ended, names)
        one = self._by_id[node_id]
        call = partial(one.client.call, "TryLinks", TryLinks(links=wanted), LinksTried, TRIED_S, calls)
        return node_id, ask(one, call)

    def _linked(self, epoch: str, node_id: str, addresses: list[str]) -> Linked:
        certificate = self._node.table.peer(node_id).certificate_pem.encode() if node_id != self._me else b""
        return Linked(epoch=epoch, node_id=node_id, certificate=certificate, addresses=addresses)
