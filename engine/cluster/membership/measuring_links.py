"""Which way to another node is the fastest: every address of it is measured, one after the other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.cluster.transport.accepting import Links
from engine.cluster.transport.addresses import interface_towards, parse_address
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.link_speed import LinkSpeed, measure_link
from engine.errors import ModelError
from engine.ipc.messages.ring import LinkFacts

MOST_MEASURED = 8
PROBE_S = 1.0
"""For all addresses at once: a machine tells of networks that this one is not in."""
ANSWER_S = 3.0
"""For one address: one that does not answer by then is not used."""


def measure_best(
    links: Links, epoch: str, node_id: str, certificate: bytes, addresses: Sequence[str], name: str = ""
) -> LinkFacts:
    """The fastest of the ``addresses`` (of its door) of the node ``node_id``; the others in words.

    Raises ModelError (network) if none can be reached.
    """
    member = Member(1, node_id, certificate, tuple(addresses), name)
    here = Member(0, links.identity.node_id, links.identity.certificate_pem)
    measured: list[LinkSpeed] = []
    failure: ModelError | None = None
    for address in reachable(addresses[:MOST_MEASURED]):
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
        others=[
            f"{_interface(other.address)} {other.address}: {other.latency_s * 1e6:.0f} µs".strip()
            for other in measured[1:]
        ],
    )


def reachable(addresses: Sequence[str]) -> list[str]:
    """Those at which somebody listens, in their order; all of them if none does, so that it is said why."""
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
    return [address for address, there in zip(addresses, found, strict=True) if there] or list(addresses)


def _interface(address: str) -> str:
    return interface_towards(address)
