"""Addresses of nodes as ``HOST:PORT``: parsing, this machine's own, and the link listener's beside the control port."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import psutil

from discovery.addresses import announced, shown_address, source_towards
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
    addresses = []
    for text in texts:
        try:
            host, port = parse_address(text)
            ip = ipaddress.ip_address(host)
        except (ModelError, ValueError):
            continue
        if port and not ip.is_multicast and not ip.is_unspecified:
            addresses.append(shown_address(str(ip), port))
    return addresses


def listener_address(address: str) -> str:
    """The address of the link listener of the node whose control port is ``address``."""
    host, port = parse_address(address)
    return shown_address(host, port + 1)


def control_address(listener: str) -> str:
    """The address of the control port of the node whose link listener is at ``listener``."""
    host, port = parse_address(listener)
    return shown_address(host, port - 1)


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

    Link-local IPv6 addresses have no scope, as each machine has its own; see :func:`as_dialled`.
    """
    if host not in ("", "0.0.0.0", "::"):
        return as_sent([shown_address(host, port)])
    return [shown_address(one.ip, port) for one in announced(addresses_here())][:MOST_LISTED]


def is_link_local(address: str) -> bool:
    """Whether ``address`` (``HOST:PORT``) is a link-local IPv6 one, which is valid on one cable only."""
    try:
        ip = ipaddress.ip_address(parse_address(address)[0])
    except (ModelError, ValueError):
        return False
    return ip.version == 6 and ip.is_link_local


def as_sent(addresses: Iterable[str]) -> list[str]:
    """``addresses`` (``HOST:PORT``) for another machine: without scopes, which are names of this machine's
    interfaces."""
    return list(dict.fromkeys(_without_scope(one) if is_link_local(one) else one for one in addresses))


def as_dialled(addresses: Iterable[str]) -> list[str]:
    """``addresses`` (``HOST:PORT``) of another machine as they are dialled from here.

    One that is link-local and has no scope may be on any cable: it gets the scope of each interface here that has a
    link-local address, unless one of ``addresses`` says which.
    """
    given = list(dict.fromkeys(addresses))
    open_ones = {address for address in given if is_link_local(address) and "%" not in address}
    if not open_ones:
        return given
    with_scope = {_without_scope(address) for address in given if "%" in address}
    own = [address for address in announced(addresses_here()) if is_link_local(shown_address(address.ip, 0))]
    scopes = list(dict.fromkeys(address.interface for address in own))
    dialled = []
    for address in given:
        if address not in open_ones:
            dialled.append(address)
        elif address not in with_scope:
            host, port = parse_address(address)
            dialled += [shown_address(f"{host}%{scope}", port) for scope in scopes]
    return dialled


def _without_scope(address: str) -> str:
    host, port = parse_address(address)
    return shown_address(host.partition("%")[0], port)


def own_ip_towards(address: str) -> str:
    """This machine's IP address for packets to ``address`` (``HOST:PORT``); empty if unknown. Sends nothing."""
    return plain_ip(source_towards(parse_address(address)[0]))


def interface_towards(address: str) -> str:
    """The interface that packets to ``address`` (``HOST:PORT``) leave by; empty if unknown."""
    own, _, scope = own_ip_towards(address).partition("%")
    if scope:
        return scope
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses if own):
            return str(name)
    return ""
