"""The facts about an epoch that a node needs to make its links, and the request for a link."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from discovery.certificates import CertificateError, der_of, fingerprint
from discovery.peers import Peer
from engine.cluster.transport.exchange import RingProtocolError
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName

Purpose = Literal["exchange", "command", "measure", "envoy"]
Transport = Literal["tls", "socket"]
LINK_KIND = "link"
"""Kind of these connections at the link listener."""
CONNECT_S = 10.0
HANDSHAKE_S = 5.0
WELCOME = b"privatellm: welcome"
"""First frame of the acceptor: the link is accepted."""


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of the preamble: the dialler's request. It is trusted only after the other end proved its identity."""

    purpose: Purpose
    transport: Transport
    epoch: str
    from_rank: int
    to_rank: int
    node_id: str
    """Node id of the dialler."""
    certificate: bytes = b""
    """Certificate of the dialler (DER). Only for links that are measured, which nobody expects."""


@dataclass(frozen=True)
class Member:
    """A node of an epoch. ``certificate`` is PEM. ``addresses``: ``HOST:PORT`` of its link listener, the best first."""

    rank: int
    node_id: str
    certificate: bytes
    addresses: tuple[str, ...] = ()
    name: str = ""

    @property
    def called(self) -> str:
        return self.name or f"node {self.rank + 1} ({self.node_id[:8]})"


@dataclass(frozen=True)
class Epoch:
    """The facts that a node needs to connect: the members by rank, this node included, and the key of plain links."""

    epoch: str
    rank: int
    members: tuple[Member, ...]
    key: bytes = field(repr=False)
    """Key [32 bytes] of plain links."""
    trusted: tuple[str, ...] = ()
    """Networks on which the person allows plain text."""
    given_up: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Set when the links are not wanted any more. Whoever makes them then ends soon."""

    def dialling(self, addresses: Mapping[int, str]) -> Epoch:
        """The same epoch, but this node first dials the members of these ranks at these addresses."""
        members = tuple(
            replace(one, addresses=tuple(dict.fromkeys([addresses[one.rank], *one.addresses])))
            if one.rank in addresses
            else one
            for one in self.members
        )
        return replace(self, members=members)


def in_networks(address: str, networks: Sequence[str]) -> bool:
    """Whether the IP ``address`` is in one of ``networks``. Text that is not an address or network never matches."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    for network in networks:
        with contextlib.suppress(ValueError):
            if ip in ipaddress.ip_network(network, strict=False):
                return True
    return False


def check_trusted(exchange: ExchangeName, addresses: Iterable[str], trusted: Sequence[str]) -> None:
    """Raises ModelError (network) if one of the IP ``addresses`` is on no ``trusted`` network, for an ``exchange`` in
    plain text."""
    for address in addresses:
        if not in_networks(address, trusted):
            raise ModelError(
                f"The exchange “{exchange}” is plain text, and {address} is on no network that was called trusted: "
                "choose tls, or name the network in the ring's settings.",
                kind="network",
            )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` (an IPv6 host in brackets or not). Raises RingProtocolError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise RingProtocolError(f"“{address[:80]}” is no HOST:PORT.", kind="network")
    return host.strip("[]"), int(port)


def check_certificate(node_id: str, certificate: bytes) -> None:
    """Raises RingProtocolError if ``certificate`` (PEM) is not that of ``node_id``. TLS libraries get no other."""
    try:
        shown = fingerprint(der_of(certificate))
    except CertificateError as error:
        raise RingProtocolError(f"The certificate of {node_id[:8]} cannot be used: {error}", kind="network") from None
    if shown != node_id:
        raise RingProtocolError(f"The certificate of {node_id[:8]} is that of {shown[:8]}.", kind="network")


def as_peer(member: Member) -> Peer:
    """The peer whose certificate :mod:`discovery.tls` pins."""
    return Peer(
        node_id=member.node_id, certificate_pem=member.certificate.decode("ascii"), name=member.called, paired_at=0.0
    )
