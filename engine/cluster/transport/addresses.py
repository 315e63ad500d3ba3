"""Addresses of nodes as ``HOST:PORT``: parsing, this machine's own, and the link listener's beside the control port."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from discovery.addresses import announced, shown_address
from discovery.addresses import own_addresses as addresses_here
from engine.errors import ModelError

MOST_LISTED = 16


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``. Raises ModelError (bad-input) for anything else."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65534:
        raise ModelError(f"“{text}” is no address; write HOST:PORT, such as 192.168.1.7:47820.", kind="bad-input")
    return host, int(port)


def literal_addresses(texts: Iterable[str]) -> list[str]:
    """The IP addresses with a port among ``texts`` of another machine, each in its canonical form.

    Whatever else a library might accept (names to look up, sockets of this machine) is left out.
    """
    found = []
    for text in texts:
        try:
            host, port = parse_address(text)
            ip = ipaddress.ip_address(host)
        except (ModelError, ValueError):
            continue
        if port and not ip.is_multicast and not ip.is_unspecified:
            found.append(shown_address(str(ip), port))
    return found


def listener_address(address: str) -> str:
    """The address of the link listener of the node whose control port is ``address``."""
    host, port = parse_address(address)
    return shown_address(host, port + 1)


def plain_ip(host: str) -> str:
    """``host``, with an IPv4 address mapped into IPv6 as plain IPv4."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return host


def own_addresses(host: str, port: int) -> list[str]:
    """Addresses at which this node can be reached, best first: ``host``, or all of this machine's if it listens on all.

    Link-local IPv6 addresses are left out: they mean nothing without the other machine's name of the interface.
    """
    if host not in ("", "0.0.0.0", "::"):
        return [shown_address(host, port)]
    own = [one for one in announced(addresses_here()) if not (one.parsed.version == 6 and one.parsed.is_link_local)]
    return [shown_address(one.ip, port) for one in own][:MOST_LISTED]


def own_ip_towards(address: str) -> str:
    """This machine's IP address for packets to ``address`` (``HOST:PORT``); empty if unknown. Sends nothing."""
    host, port = parse_address(address)
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return plain_ip(str(probe.getsockname()[0]))
    except OSError:
        return ""


def interface_towards(address: str) -> str:
    """The interface that packets to ``address`` (``HOST:PORT``) leave by; empty if unknown."""
    own = own_ip_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own.partition("%")[0] for one in addresses if own):
            return str(name)
    return ""
