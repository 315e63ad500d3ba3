"""mDNS: announcing this machine and listening for others. What is heard is an untrusted hint where to try."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import zeroconf
from zeroconf import const
from zeroconf._dns import DNSPointer, DNSQuestion, DNSRecord, DNSService
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.asyncio import AsyncServiceInfo

from discovery.addresses import Address, OwnAddress, announced, own_addresses, towards

_log = logging.getLogger(__name__)

SERVICE = "_privatellm._tcp.local."
ANNOUNCED_VERSION = 1
MAX_SERVICES = 64
"""Maximum announcements followed at a time. More are not a household but a flood."""
_MOST_EACH = 4
"""Maximum announcements of one node id. Without room the same applies to one address, and one of its announcements
gives way."""
_MOST_STRANGERS = MAX_SERVICES // 2
"""Maximum names that are asked for in a round although nothing was heard of them."""
_MAX_ADDRESSES = 16
_SLEPT_SECONDS = 10.0
_TTL = 30
"""Lifetime of an announcement in seconds, whatever it claims itself. A machine that disappeared silently is dropped
after about this time."""
_FAMILIES_APART = sys.platform == "darwin"
"""Whether IPv4 groups must be joined by IPv4 sockets. Darwin's IPv6 sockets cannot, which the library ignores."""
_NODE_ID = re.compile(r"[0-9a-f]{64}")
_INSTANCE = re.compile(r"[0-9a-f]{16}")
_VERSION = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class FoundNode:
    """A machine that announces itself, copies of this one included. Nothing of it is proved."""

    node_id: str
    instance: str
    addresses: tuple[Address, ...]
    """Addresses of the control port, best first."""
    version: int

    @property
    def texts(self) -> tuple[str, ...]:
        """``IP:PORT`` each."""
        return tuple(address.text for address in self.addresses)


@dataclass(frozen=True)
class Hearing:
    """The evidence for :mod:`discovery.checks` on whether multicast works here."""

    seconds: float
    """Seconds since the sockets were last opened."""
    failure: str = ""
    """The system's reason why this machine cannot announce itself."""
    own: bool = False
    """Whether its own announcement came back."""
    others: int = 0
    """Number of machines that were ever heard."""


@dataclass(frozen=True)
class Intervals:
    """Intervals of looking at the network, in seconds."""

    wake: float = 0.5
    """Seconds between two checks of what was heard."""
    poll: float = 2.0
    """Seconds between two checks of this machine's addresses."""
    retry: float = 10.0
    """Seconds between two tries to open sockets that could not be opened."""
    refresh: float = 10.0
    """Seconds between two questions to every machine that was heard."""
    unseen: float = 8.0
    """Seconds beyond ``refresh`` after which a machine that does not answer is dropped."""
    grace: float = 1.5
    """Seconds within which a withdrawn announcement may return, after a change of addresses, as if it never left."""
    look: float = 60.0
    """Seconds between two searches. New machines announce themselves, if they know that they were away."""
    resolve: float = 3.0
    """Timeout of one question to a machine, in seconds."""


@dataclass
class _Seen:
    found: FoundNode
    verified_at: float
    withdrawn_at: float | None = None


class Neighbourhood:
    """Announces this machine and keeps the list of others, on all interfaces, until closed.

    ``on_change(found)`` is called in a separate thread whenever the list has changed. Changed addresses are announced
    within seconds. Network errors never raise; see :meth:`hearing`.
    """

    def __init__(
        self,
        node_id: str,
        instance: str,
        port: int,
        on_change: Callable[[list[FoundNode]], None],
        host: str = "",
        own: Callable[[], list[OwnAddress]] = own_addresses,
        paired: Callable[[], Collection[str]] = tuple,
        intervals: Intervals = Intervals(),
    ) -> None:
        """Announce the control port ``port``.

        ``host``: the only address it listens on (empty: all). ``own`` returns this machine's addresses, ``paired`` the
        node ids for which there is always room.
        """
        self._me = (node_id, instance)
        self._port = port
        self._host = host
        self._on_change = on_change
        self._own_addresses = own
        self._paired = paired
        self._intervals = intervals
        self._name = f"{node_id[:16]}-{instance}-{port}.{SERVICE}"
        self._mutex = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._ever: set[tuple[str, str]] = set()
        self._own_heard = False
        self._failure = ""
        self._own: list[OwnAddress] = []
        self._opened_at = time.monotonic()
        self._tried_at = float("-inf")
        self._generation = 0
        self._opened: list[zeroconf.Zeroconf] = []
        self._browsers: list[zeroconf.ServiceBrowser] = []
        self._resolving: dict[tuple[zeroconf.Zeroconf, str], concurrent.futures.Future[None]] = {}
        self._looked_at = float("-inf")
        self._last: list[FoundNode] = []
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbourhood", daemon=True)
        self._thread.start()

    def found(self) -> list[FoundNode]:
        """Every machine heard now, except this one. A copy of this machine's identity is included."""
        merged: dict[tuple[str, str], FoundNode] = {}
        with self._mutex:
            heard = [self._seen[name].found for name in sorted(self._seen)]
        for one in heard:
            who = (one.node_id, one.instance)
            if who != self._me:
                before = merged[who].addresses if who in merged else ()
                merged[who] = replace(one, addresses=tuple(dict.fromkeys(before + one.addresses)))
        return [merged[who] for who in sorted(merged)]

    def hearing(self) -> Hearing:
        with self._mutex:
            return Hearing(
                seconds=time.monotonic() - self._opened_at,
                failure=self._failure,
                own=self._own_heard,
                others=len(self._ever - {self._me}),
            )

    def close(self) -> None:
        """Say goodbye to the network and close every socket. May be called twice."""
        self._closed.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        polled = refreshed = float("-inf")
        asleep = _asleep()
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                if now - polled >= self._intervals.poll:
                    polled = now
                    slept = abs(_asleep() - asleep) > _SLEPT_SECONDS
                    asleep = _asleep()
                    self._follow_addresses(now, anew=slept)
                if now - refreshed >= self._intervals.refresh:
                    refreshed = now
                    self._refresh()
                self._drop(now)
                self._tell()
                self._wake.wait(self._intervals.wake)
                self._wake.clear()
        finally:
            self._stop()

    def _follow_addresses(self, now: float, anew: bool) -> None:
        """Open sockets on the current addresses if they have changed.

        ``anew``: in any case, because a machine that slept has lost its place in the multicast groups, and its
        neighbours have forgotten it.
        """
        try:
            own = [one for one in self._own_addresses() if self._host in ("", "0.0.0.0", "::", one.ip)]
        except OSError:
            return  # interfaces come and go while they are listed; the next round is soon
        if own == self._own and not anew and (self._opened or now - self._tried_at < self._intervals.retry):
            return
        self._tried_at = now
        self._stop()
        with self._mutex:
            self._own, self._own_heard, self._opened_at = own, False, now
            for seen in self._seen.values():  # to be heard again by way of the new sockets
                seen.verified_at = now
        failure = self._start(own)
        with self._mutex:
            self._failure = failure

    def _start(self, own: list[OwnAddress]) -> str:
        """Open the sockets, announce, and look for others. Returns the system's reason if that failed."""
        told = announced(own)
        if not told:
            return "no network interface is up"
        try:
            self._opened = _open(told)
            for opened in self._opened:
                self._browsers.append(zeroconf.ServiceBrowser(opened, SERVICE, handlers=[self._heard]))
                opened.register_service(self._service(told), cooperating_responders=True)
        except (OSError, RuntimeError, zeroconf.Error) as error:
            self._stop()
            return str(getattr(error, "strerror", None) or error) or type(error).__name__
        return ""

    def _service(self, told: list[OwnAddress]) -> zeroconf.ServiceInfo:
        self._generation += 1
        node_id, instance = self._me
        return zeroconf.ServiceInfo(
            SERVICE,
            self._name,
            port=self._port,
            properties={"v": str(ANNOUNCED_VERSION), "id": node_id, "i": instance},
            # A new name for every set of addresses: nobody mixes the old ones with these. It is no host's name.
            server=f"{instance}-{self._generation}-{int(time.time()) & 0xFFFFFF:x}.local.",
            parsed_addresses=[one.ip for one in told[:_MAX_ADDRESSES]],
            host_ttl=_TTL,
            other_ttl=_TTL,
        )

    def _stop(self) -> None:
        all_opened, self._opened = self._opened, []
        browsers, self._browsers = self._browsers, []
        with self._mutex:
            resolving = list(self._resolving.values())
        for future in resolving:
            future.cancel()
        for one in (*(browser.cancel for browser in browsers), *(opened.close for opened in all_opened)):
            with contextlib.suppress(OSError, RuntimeError, zeroconf.Error, asyncio.TimeoutError):
                one()

    def _refresh(self) -> None:
        """Ask again for all machines, and for names of which nothing more is known. Whoever does not answer is dropped
        by :meth:`_drop`."""
        now = time.monotonic()
        look = now - self._looked_at >= self._intervals.look
        if look:
            self._looked_at = now
        with self._mutex:
            names = list(self._seen)
        for opened in self._opened:
            pointers = [one for one in opened.cache.entries_with_name(SERVICE) if isinstance(one, DNSPointer)]
            strangers = list({one.alias for one in pointers} - set(names))
            random.shuffle(strangers)  # whoever floods must not be first each time
            strangers.sort(key=lambda name: not self._is_known(name))
            for name in [*names, *strangers[:_MOST_STRANGERS]]:
                self._resolve(opened, name, anew=True)
            if look:
                _look(opened, pointers)

    def _is_known(self, name: str) -> bool:
        """Whether the name begins as that of a paired machine does."""
        return name[:16] in {node_id[:16] for node_id in self._paired()}

    def _drop(self, now: float) -> None:
        with self._mutex:
            gone = [
                name
                for name, seen in self._seen.items()
                if (seen.withdrawn_at is not None and now - seen.withdrawn_at > self._intervals.grace)
                or now - seen.verified_at > self._intervals.refresh + self._intervals.unseen
            ]
            for name in gone:
                del self._seen[name]

    def _tell(self) -> None:
        found = self.found()
        if found != self._last and not self._closed.is_set():
            self._last = found
            try:
                self._on_change(found)
            except Exception:  # whoever listens may fail; the neighbourhood goes on
                _log.exception("a listener failed")

    # --- what the network says, in the library's threads ----------------------------------------------------------

    def _heard(
        self,
        zeroconf: zeroconf.Zeroconf,
        service_type: str,
        name: str,
        state_change: zeroconf.ServiceStateChange,
    ) -> None:
        """The library passes the arguments by these names."""
        if state_change.name == "Removed":
            with self._mutex:
                if name in self._seen:
                    self._seen[name].withdrawn_at = time.monotonic()
            self._wake.set()
            return
        self._resolve(zeroconf, name)

    def _resolve(self, opened: zeroconf.Zeroconf, name: str, anew: bool = False) -> None:
        """Ask for a name, unless that was done already or too many are asked for. ``anew``: see :meth:`_ask`."""
        loop = opened.loop
        if loop is None or not loop.is_running():
            return
        with self._mutex:
            alike = sum(other[:16] == name[:16] for _, other in self._resolving)
            room = len(self._resolving) < 2 * MAX_SERVICES or (alike < _MOST_EACH and self._is_known(name))
            if (opened, name) in self._resolving or not room:
                return
            future = asyncio.run_coroutine_threadsafe(self._ask(opened, name, anew), loop)
            self._resolving[opened, name] = future
        future.add_done_callback(lambda done: self._resolved((opened, name), done))

    def _resolved(self, asked: tuple[zeroconf.Zeroconf, str], future: concurrent.futures.Future[None]) -> None:
        with self._mutex:
            if self._resolving.get(asked) is future:
                del self._resolving[asked]
        if not future.cancelled():
            future.exception()  # a damaged answer is no more than a machine not found

    async def _ask(self, opened: zeroconf.Zeroconf, name: str, anew: bool) -> None:
        """Ask for a name. ``anew``: forget records with a longer lifetime than any of ours first."""
        if anew:
            _forget_records(opened, name, longer_than=_TTL)
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(opened, 1000 * self._intervals.resolve):
            with self._mutex:
                unknown = name not in self._seen
            if unknown:  # it is new when it is heard of again
                _forget_records(opened, name, longer_than=0)
                pointers = opened.cache.async_entries_with_name(SERVICE)
                gone = [one for one in pointers if isinstance(one, DNSPointer) and one.alias == name]
                opened.cache.async_remove_records(gone)
            return
        node = _parsed(info.properties, info.port, info.parsed_scoped_addresses(), self._own)
        if node is None:
            return
        who = (node.node_id, node.instance)
        paired = frozenset(self._paired())
        with self._mutex:
            self._own_heard = self._own_heard or who == self._me
            if len(self._ever) < 16 * MAX_SERVICES:
                self._ever.add(who)
            others = {other: seen.found for other, seen in self._seen.items() if other != name}
            gives_way = _who_gives_way(node, others, paired | {self._me[0]})
            if gives_way is not None:
                self._seen.pop(gives_way, None)
                self._seen[name] = _Seen(node, time.monotonic())
        self._wake.set()


def _who_gives_way(newcomer: FoundNode, others: Mapping[str, FoundNode], paired: Collection[str]) -> str | None:
    """The name whose place ``newcomer`` takes, in addition to or instead of ``others``, by name.

    Empty if there is room, None if ``newcomer`` gets no place. A paired machine has priority. An address that announces
    more than a few machines gives way. Pure.
    """
    if sum(node.node_id == newcomer.node_id for node in others.values()) >= _MOST_EACH:
        return None
    if len(others) < MAX_SERVICES:
        return ""
    strangers = {name: node for name, node in others.items() if node.node_id not in paired}
    crowds = Counter(node.addresses[0].ip for node in strangers.values())
    name = max(strangers, key=lambda each: crowds[strangers[each].addresses[0].ip], default=None)
    if name is None or (newcomer.node_id not in paired and crowds[strangers[name].addresses[0].ip] <= _MOST_EACH):
        return None
    return name


def _forget_records(opened: zeroconf.Zeroconf, name: str, longer_than: float) -> None:
    """The library's records of a name with a lifetime of more seconds than that. In the library's loop only."""
    cache = opened.cache
    records = cache.async_entries_with_name(name)
    for service in [one for one in records if isinstance(one, DNSService)]:
        records += cache.async_entries_with_name(service.server)
    cache.async_remove_records({one for one in records if one.ttl > longer_than})


def _look(opened: zeroconf.Zeroconf, pointers: Sequence[DNSRecord]) -> None:
    """Ask for machines. The ``pointers`` ones need not answer."""
    question = DNSOutgoing(const._FLAGS_QR_QUERY)
    question.add_question(DNSQuestion(SERVICE, const._TYPE_PTR, const._CLASS_IN))
    now = zeroconf.current_time_millis()
    for pointer in pointers[:MAX_SERVICES]:
        question.add_answer_at_time(pointer, now)
    opened.send(question)


def _parsed(
    properties: Mapping[bytes, bytes | None], port: int | None, addresses: Sequence[str], own: Sequence[OwnAddress]
) -> FoundNode | None:
    """An announcement as a hint, or None if it is not of this program."""
    node_id, instance, version = (_text(properties.get(key)) for key in (b"id", b"i", b"v"))
    sound = _NODE_ID.fullmatch(node_id) and _INSTANCE.fullmatch(instance) and _VERSION.fullmatch(version)
    if not sound or port is None or not 0 < port < 65535:
        return None
    where = towards([(ip, port) for ip in addresses[:_MAX_ADDRESSES]], own)
    return FoundNode(node_id, instance, where, int(version)) if where else None


def _asleep() -> float:
    """Seconds by which the wall clock is ahead of the clock that stands still while the machine sleeps."""
    return time.time() - time.monotonic()


def _text(value: bytes | None) -> str:
    return value.decode("ascii", "replace") if value is not None and len(value) <= 64 else ""


def _open(told: list[OwnAddress]) -> list[zeroconf.Zeroconf]:
    """Sockets on the interfaces of these addresses.

    IPv6 uses each interface number once, as groups are joined by it. IPv6 may be there and switched off for multicast;
    then only IPv4 is used. Raises OSError, RuntimeError if there can be none.
    """
    v4: list[str | int] = [one.ip for one in told if one.parsed.version == 4]
    v6: list[str | int] = []
    for interface in dict.fromkeys(one.interface for one in told if one.parsed.version == 6):
        with contextlib.suppress(OSError):
            v6.append(socket.if_nametoindex(interface))
    if not v4 or not v6:
        return [zeroconf.Zeroconf(interfaces=[*v4, *v6])]
    if not _FAMILIES_APART:
        try:
            return [zeroconf.Zeroconf(interfaces=[*v4, *v6])]
        except (OSError, RuntimeError):
            return [zeroconf.Zeroconf(interfaces=v4)]
    opened = [zeroconf.Zeroconf(interfaces=v4, ip_version=zeroconf.IPVersion.V4Only)]
    with contextlib.suppress(OSError, RuntimeError):
        opened.append(zeroconf.Zeroconf(interfaces=v6, ip_version=zeroconf.IPVersion.V6Only))
    return opened
