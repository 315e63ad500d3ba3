"""This machine's addresses, and the order in which the addresses of another machine are tried."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import psutil

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

# Bridges to containers and virtual machines on the same host, and Apple's links between its own gadgets: nobody else
# is reached through them, and every host that runs containers has the same addresses there. macOS' bridge0 is the
# Thunderbolt bridge, often the fastest link of all; its bridge100 and up belong to virtual machines.
_INSIDE = re.compile(
    r"docker\d|br-[0-9a-f]{6,}$|virbr|veth[0-9a-f]{6,}|lxcbr|lxdbr|incusbr|cni\d|cni-|flannel|cali[0-9a-f]|podman|vmnet"
    r"|vboxnet|bridge1\d\d$|awdl|llw|anpi|ap\d"
)
_SYSTEM_TUNNEL = re.compile(r"utun\d")
"""Prefix of tunnels that macOS makes for itself, whose addresses lead nowhere. A person's own VPN is reached by its
address."""
_TUNNEL = re.compile(r"utun|tun\d|tap\d|wg\d|tailscale|ppp|ipsec|gif|stf|zt")


@dataclass(frozen=True, order=True)
class OwnAddress:
    """An address of an interface that is up."""

    interface: str
    ip: str
    """The address without its interface, without which link-local IPv6 addresses mean nothing."""
    prefix: int
    """Length of the network's prefix in bits."""
    is_default: bool = field(default=False, compare=False)
    """Whether its interface is a default route's."""

    @property
    def parsed(self) -> IP:
        return ipaddress.ip_address(self.ip)

    @property
    def is_loopback(self) -> bool:
        return self.parsed.is_loopback


@dataclass(frozen=True)
class Address:
    """An address at which another machine says it can be reached."""

    ip: str
    """A link-local IPv6 address has this machine's interface behind it: ``fe80::1%en0``."""
    port: int
    interface: str = ""
    """This machine's interface in the same network; empty if it goes through a router or is unknown."""

    @property
    def text(self) -> str:
        """``IP:PORT``, or ``[IP]:PORT``."""
        return shown_address(self.ip, self.port)


def shown_address(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_addresses() -> list[OwnAddress]:
    """Every address of every interface that is up, loopback too, in a fixed order."""
    status = psutil.net_if_stats()
    addresses = set()
    for interface, entries in psutil.net_if_addrs().items():
        if interface in status and not status[interface].isup:
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = entry.address.partition("%")[0]
            try:
                width = ipaddress.ip_address(ip).max_prefixlen
            except ValueError:
                continue
            addresses.add(OwnAddress(interface, ip, _prefix(entry.netmask, width)))
    routed = _default_ips()
    defaults = {one.interface for one in addresses if one.ip in routed}
    return sorted(replace(one, is_default=one.interface in defaults) for one in addresses)


def is_inside(interface: str) -> bool:
    """Whether the interface reaches only containers and virtual machines of this host."""
    return _INSIDE.match(interface) is not None


def announced(own: Iterable[OwnAddress]) -> list[OwnAddress]:
    """The addresses that are announced, best first, a default route's before others of its kind. Left out are loopback,
    inner bridges and the system's own tunnels, unless there is nothing else."""
    candidates = sorted(own, key=_rank)
    inside = [one for one in candidates if not one.is_loopback]
    outside = [one for one in inside if not is_inside(one.interface) and not _SYSTEM_TUNNEL.match(one.interface)]
    return outside or inside or candidates


def source_towards(host: str) -> str:
    """This machine's address for packets to ``host``, a link-local IPv6 one with its interface; empty if unknown. Sends
    nothing."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def towards(
    others: Iterable[tuple[str, int]], own: Iterable[OwnAddress], source: Callable[[str], str] = source_towards
) -> tuple[Address, ...]:
    """Another machine's (ip, port) pairs without duplicates, best first.

    Pairs in a network of this machine come first, then those behind a router. Those on an inner bridge of this machine
    come last, as other hosts have the same addresses there. ``source`` returns this machine's address for packets to
    another one.
    """
    mine = list(own)
    addresses: dict[str, tuple[tuple[int, ...], Address]] = {}
    for ip, port in others:
        try:
            parsed = ipaddress.ip_address(ip.partition("%")[0])
        except ValueError:
            continue
        if parsed.is_unspecified or parsed.is_multicast:
            continue
        scope = ip.partition("%")[2]
        interface = interface_of(scope) if scope else _interface_into(parsed, mine, source)
        shown = f"{parsed}%{interface}" if parsed.version == 6 and parsed.is_link_local and interface else str(parsed)
        rank = (
            int(is_inside(interface)),
            int(not interface),
            int(parsed.is_loopback),
            int(_TUNNEL.match(interface) is not None),
            int(parsed.version == 6),
            int(parsed.is_link_local),
        )
        addresses.setdefault(shown, (rank, Address(shown, port, interface)))
    return tuple(address for _, address in sorted(addresses.values(), key=lambda entry: (entry[0], entry[1].ip)))


def _rank(own: OwnAddress) -> tuple[object, ...]:
    ip = own.parsed
    return (
        is_inside(own.interface),
        ip.is_loopback,
        _TUNNEL.match(own.interface) is not None,
        ip.version == 6,
        ip.is_link_local,
        not own.is_default,
        own.interface,
        own.ip,
    )


def _default_ips() -> set[str]:
    """This machine's addresses for packets to networks that nobody has, which go where the default route leads. Sends
    nothing."""
    return {source_towards(somewhere).partition("%")[0] for somewhere in ("203.0.113.1", "2001:db8::1")}


def _interface_into(ip: IP, own: list[OwnAddress], source: Callable[[str], str]) -> str:
    """The interface whose network has ``ip``, the narrowest network first.

    Two cables with self-assigned addresses are both in 169.254.0.0/16. Packets to any address there leave by the
    interface that the system's routes say. A machine on the other cable is reached by its link-local IPv6 address.
    """
    matching = [
        address
        for address in own
        if address.parsed.version == ip.version
        and ip in ipaddress.ip_network(f"{address.ip}/{address.prefix}", strict=False)
    ]
    narrowest = max((address.prefix for address in matching), default=0)
    candidates = [address for address in matching if address.prefix == narrowest]
    if len({address.interface for address in candidates}) > 1:
        routed = source(str(ip)).partition("%")[0]
        leaving = {address.interface for address in own if address.ip == routed}
        candidates = [address for address in candidates if address.interface in leaving] or candidates
    return candidates[0].interface if candidates else ""


def interface_of(scope: str) -> str:
    """The name of the interface of a scope, which may be its number; empty if there is no such interface."""
    if not scope.isdecimal():
        return scope
    try:
        return socket.if_indextoname(int(scope))
    except (OSError, OverflowError):
        return ""


def _prefix(netmask: str | None, width: int) -> int:
    """Number of bits in a netmask from psutil. An interface without one is a network of one address."""
    if not netmask:
        return width
    try:
        return int(ipaddress.ip_address(netmask.partition("%")[0])).bit_count()
    except ValueError:
        bits = netmask.rpartition("/")[2]
        return min(int(bits), width) if bits.isdecimal() else width
