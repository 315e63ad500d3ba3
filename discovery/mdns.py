"""Announcing this machine and hearing of others by mDNS. What is heard is a hint where to try, never trusted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import zeroconf
from zeroconf.asyncio import AsyncServiceInfo

from discovery.addresses import Address, OwnAddress, announced, own_addresses, towards

_log = logging.getLogger(__name__)

SERVICE = "_privatellm._tcp.local."
ANNOUNCED_VERSION = 1
MAX_SERVICES = 64
"""Announcements that are followed at a time; more than that is no household but a flood."""
_MAX_ADDRESSES = 16
_POLL_SECONDS = 2.0
_RETRY_SECONDS = 10.0
_REFRESH_SECONDS = 10.0
_GRACE_SECONDS = 1.5
"""An announcement that is withdrawn and comes again within this (addresses changed) never left."""
_UNSEEN_SECONDS = 8.0
_SLEPT_SECONDS = 10.0
_TTL = 30
"""Seconds. A machine that went without a word is dropped after about this."""
_RESOLVE_MS = 3000
_NODE_ID = re.compile(r"[0-9a-f]{64}")
_INSTANCE = re.compile(r"[0-9a-f]{16}")
_VERSION = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class Found:
    """A machine that announces itself, this one's copies included. Nothing of it is proved."""

    node_id: str
    instance: str
    addresses: tuple[Address, ...]
    """Of the control port, best first."""
    version: int

    @property
    def texts(self) -> tuple[str, ...]:
        """``IP:PORT`` each."""
        return tuple(address.text for address in self.addresses)


@dataclass(frozen=True)
class Hearing:
    """What :mod:`discovery.checks` judges: whether multicast works here."""

    seconds: float
    """Since the sockets were opened, last."""
    failure: str = ""
    """Why this machine cannot announce itself, as the system says it."""
    own: bool = False
    """Its own announcement came back."""
    others: int = 0
    """Machines that were heard of, ever."""


@dataclass
class _Seen:
    found: Found
    verified_at: float
    withdrawn_at: float | None = None


class Neighbourhood:
    """Announces this machine and keeps the list of others, on all interfaces, until closed.

    ``on_change(found)`` is called in a thread of its own whenever the list is another one. Addresses that change are
    announced anew within seconds. Never raises for what the network does: see :meth:`hearing`.
    """

    def __init__(
        self,
        node_id: str,
        instance: str,
        port: int,
        on_change: Callable[[list[Found]], None],
        host: str = "",
        own: Callable[[], list[OwnAddress]] = own_addresses,
    ) -> None:
        """``port`` is the control port; ``host``: the one address it listens on (empty: all). ``own`` tells this
        machine's addresses."""
        self._me = (node_id, instance)
        self._port = port
        self._host = host
        self._on_change = on_change
        self._own_addresses = own
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
        self._zeroconf: zeroconf.Zeroconf | None = None
        self._browser: zeroconf.ServiceBrowser | None = None
        self._resolving: set[concurrent.futures.Future[None]] = set()
        self._last: list[Found] = []
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbourhood", daemon=True)
        self._thread.start()

    def found(self) -> list[Found]:
        """Everybody heard of now, this machine not; a copy of this machine's identity is."""
        merged: dict[tuple[str, str], Found] = {}
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
                if now - polled >= _POLL_SECONDS:
                    polled = now
                    slept = abs(_asleep() - asleep) > _SLEPT_SECONDS
                    asleep = _asleep()
                    self._follow_addresses(now, anew=slept)
                if now - refreshed >= _REFRESH_SECONDS:
                    refreshed = now
                    self._refresh()
                self._drop(now)
                self._tell()
                self._wake.wait(0.5)
                self._wake.clear()
        finally:
            self._stop()

    def _follow_addresses(self, now: float, anew: bool) -> None:
        """Open sockets on the addresses of this moment, if they are not those of before. ``anew``: in any case, because
        a machine that slept has lost its place in the multicast groups, and its neighbours have forgotten it."""
        try:
            own = [one for one in self._own_addresses() if self._host in ("", "0.0.0.0", "::", one.ip)]
        except OSError:
            return  # interfaces come and go while they are listed; the next round is soon
        if own == self._own and not anew and (self._zeroconf is not None or now - self._tried_at < _RETRY_SECONDS):
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
        """Open the sockets, announce, look for others; returns why it failed, as the system says it."""
        told = announced(own)
        if not told:
            return "no network interface is up"
        try:
            self._zeroconf = opened = _open(told)
            self._browser = zeroconf.ServiceBrowser(opened, SERVICE, handlers=[self._heard])
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
        opened, self._zeroconf = self._zeroconf, None
        browser, self._browser = self._browser, None
        if opened is None:
            return
        with self._mutex:
            resolving = list(self._resolving)
        for future in resolving:
            future.cancel()
        with contextlib.suppress(OSError, RuntimeError, zeroconf.Error, asyncio.TimeoutError):
            if browser is not None:
                browser.cancel()
            opened.close()

    def _refresh(self) -> None:
        """Ask again for those whose records have run out: who does not answer is dropped by :meth:`_drop`."""
        opened = self._zeroconf
        if opened is None:
            return
        with self._mutex:
            names = list(self._seen)
        for name in names:
            self._resolve(opened, name)

    def _drop(self, now: float) -> None:
        with self._mutex:
            gone = [
                name
                for name, seen in self._seen.items()
                if (seen.withdrawn_at is not None and now - seen.withdrawn_at > _GRACE_SECONDS)
                or now - seen.verified_at > _REFRESH_SECONDS + _UNSEEN_SECONDS
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
        with self._mutex:
            full = name not in self._seen and len(self._seen) + len(self._resolving) >= MAX_SERVICES
        if not full:
            self._resolve(zeroconf, name)

    def _resolve(self, opened: zeroconf.Zeroconf, name: str) -> None:
        loop = opened.loop
        if loop is None or not loop.is_running():
            return
        future = asyncio.run_coroutine_threadsafe(self._ask(opened, name), loop)
        with self._mutex:
            self._resolving.add(future)
        future.add_done_callback(self._resolved)

    def _resolved(self, future: concurrent.futures.Future[None]) -> None:
        with self._mutex:
            self._resolving.discard(future)
        if not future.cancelled():
            future.exception()  # a damaged answer is no more than a machine not found

    async def _ask(self, opened: zeroconf.Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(opened, _RESOLVE_MS):
            return
        found = _parsed(info.properties, info.port, info.parsed_scoped_addresses(), self._own)
        if found is None:
            return
        who = (found.node_id, found.instance)
        with self._mutex:
            self._own_heard = self._own_heard or who == self._me
            if len(self._ever) < 16 * MAX_SERVICES:
                self._ever.add(who)
            self._seen[name] = _Seen(found, time.monotonic())
        self._wake.set()


def _parsed(
    properties: Mapping[bytes, bytes | None], port: int | None, addresses: Sequence[str], own: Sequence[OwnAddress]
) -> Found | None:
    """An announcement as a hint, or None if it is none of ours."""
    node_id, instance, version = (_text(properties.get(key)) for key in (b"id", b"i", b"v"))
    sound = _NODE_ID.fullmatch(node_id) and _INSTANCE.fullmatch(instance) and _VERSION.fullmatch(version)
    if not sound or port is None or not 0 < port < 65535:
        return None
    where = towards([(ip, port) for ip in addresses[:_MAX_ADDRESSES]], own)
    return Found(node_id, instance, where, int(version)) if where else None


def _asleep() -> float:
    """Seconds by which the clock on the wall is ahead of the one that stands still while the machine sleeps."""
    return time.time() - time.monotonic()


def _text(value: bytes | None) -> str:
    return value.decode("ascii", "replace") if value is not None and len(value) <= 64 else ""


def _open(told: list[OwnAddress]) -> zeroconf.Zeroconf:
    """Sockets on these addresses' interfaces. IPv6 by interface number, once each: that is how it joins groups."""
    v4: list[str | int] = [one.ip for one in told if one.parsed.version == 4]
    v6: list[str | int] = []
    for interface in dict.fromkeys(one.interface for one in told if one.parsed.version == 6):
        with contextlib.suppress(OSError):
            v6.append(socket.if_nametoindex(interface))
    try:
        return zeroconf.Zeroconf(interfaces=[*v4, *v6])
    except (OSError, RuntimeError):
        if not v4 or not v6:
            raise
        return zeroconf.Zeroconf(interfaces=v4)  # IPv6 may be there and switched off for multicast
