"""Machines that are network namespaces: own addresses, multicast, and cables that can be cut, blocked and pulled.

Every two machines have a cable of their own in every network (a veth pair), and in each machine a bridge joins its
cables, which are isolated from one another: so everybody hears everybody, and one pair can be cut without the others.
What is cut or blocked is lost without a word, as in a real network. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, count, permutations
from typing import Literal, TypeVar

import pytest

from tests.support.network_space import enter

Result = TypeVar("Result")
Direction = Literal["both", "there", "back"]

_NOWHERE = "7"
"""The routing table whose packets go nowhere."""
_MULTICAST = ("224.0.0.0/4", "dev", "lan0")
"""Where multicast of a program goes that names no interface."""
_NOTICED_S = 120.0
"""The system takes up to a second or two to notice a cable."""
_numbers = count()


def ip(*arguments: str) -> str:
    """Run `ip`. Raises RuntimeError with what it says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Space:
    """One machine; in network ``n`` its interface is ``lan{n}``, at first with the address ``10.77.n.{number}``."""

    name: str
    number: int

    def address(self, lan: int = 0) -> str:
        return f"10.77.{lan}.{self.number}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` there, in a thread of this process. Sockets that it opens and threads that it starts stay
        there. What it raises is raised here."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                enter(self.name)
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"in {self.name}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


class Network:
    """``machines`` namespaces, each of them in ``lans`` networks, without IPv6."""

    def __init__(self, machines: int, lans: int = 1) -> None:
        """Raises RuntimeError if this machine does not let namespaces, cables or bridges be made."""
        run = f"pv{os.getpid()}-{next(_numbers)}"
        self._lans = range(lans)
        self.spaces: list[Space] = []
        self._addresses: dict[tuple[Space, int], str] = {}
        try:
            for number in range(1, machines + 1):
                space = Space(f"{run}-{number}", number)
                ip("netns", "add", space.name)
                self.spaces.append(space)
                self._furnish(space)
            for one, other in combinations(self.spaces, 2):
                self._join(one, other)
            for space in self.spaces:
                for lan in self._lans:
                    ip("-n", space.name, "link", "set", f"lan{lan}", "up")
                ip("-n", space.name, "route", "add", *_MULTICAST)
            for space in self.spaces if machines > 1 else ():
                for lan in self._lans:
                    # Until then a program does not count it among its machine's addresses.
                    self._await(space, lan, "up")
        except BaseException:
            self.close()
            raise

    def cut(self, one: int, other: int, direction: Direction = "both", lan: int | None = None) -> None:
        """Nothing passes between the machines ``one`` and ``other`` (or only from ``one`` ``there``, or ``back``)."""
        for here, there in self._ways(one, other, direction):
            for number in self._lans if lan is None else (lan,):
                port = _port(there, number)
                self._set_port(here, port, "off")
                ip("-n", here.name, "link", "set", port, "type", "bridge_slave", "fdb_flush")

    def mend(self, one: int, other: int, direction: Direction = "both", lan: int | None = None) -> None:
        """The cable that was cut is whole again."""
        for here, there in self._ways(one, other, direction):
            for number in self._lans if lan is None else (lan,):
                self._set_port(here, _port(there, number), "on")

    def block(self, port: int, one: int, other: int) -> None:
        """TCP of ``port``, whoever of both listens there, does not pass between them; everything else does. Open
        connections are blocked, too."""
        for rule in self._rules(port, one, other):
            ip(*rule[:3], "add", *rule[3:])

    def unblock(self, port: int, one: int, other: int) -> None:
        for rule in self._rules(port, one, other):
            ip(*rule[:3], "del", *rule[3:])

    def pull(self, machine: int, lan: int = 0) -> None:
        """The cable of one machine is pulled: it notices, the others do not."""
        self._plugged(machine, lan, "down")

    def plug(self, machine: int, lan: int = 0) -> None:
        self._plugged(machine, lan, "up")

    def move(self, machine: int, number: int, lan: int = 0) -> str:
        """The machine gets the address ``10.77.lan.number`` instead of the one it had there; returns it."""
        space = self.spaces[machine]
        before, now = self._addresses[space, lan], f"10.77.{lan}.{number}"
        # A second address of one network goes with the first one.
        ip("-n", space.name, "addr", "del", f"{before}/24", "dev", f"lan{lan}")
        ip("-n", space.name, "addr", "add", f"{now}/24", "dev", f"lan{lan}")
        if lan == 0:
            ip("-n", space.name, "route", "replace", *_MULTICAST)
        self._addresses[space, lan] = now
        return now

    def assign_local(self, machine: int, lan: int = 0) -> None:
        """The machine gives itself link-local addresses there, as on a cable without a router."""
        space = self.spaces[machine]
        settings = f"/proc/sys/net/ipv6/conf/lan{lan}"
        enabled = f"echo 1 >{settings}/addr_gen_mode && echo 0 >{settings}/disable_ipv6"
        subprocess.run([*space.prefix, "sh", "-c", enabled], check=True, capture_output=True)
        ip("-n", space.name, "addr", "add", f"169.254.{lan}.{space.number}/16", "dev", f"lan{lan}")
        address = f"fe80::{lan}:{space.number}/64"
        ip("-n", space.name, "addr", "add", address, "dev", f"lan{lan}", "nodad")

    def close(self) -> None:
        for space in self.spaces:
            with contextlib.suppress(RuntimeError):
                ip("netns", "del", space.name)

    def _furnish(self, space: Space) -> None:
        subprocess.run(
            [*space.prefix, "sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6"],
            check=False,
            capture_output=True,
        )
        ip("-n", space.name, "link", "set", "lo", "up")
        for lan in self._lans:
            ip("-n", space.name, "link", "add", f"lan{lan}", "type", "bridge", "forward_delay", "0")
            ip("-n", space.name, "addr", "add", f"{space.address(lan)}/24", "dev", f"lan{lan}")
            self._addresses[space, lan] = space.address(lan)
        # A way that loses what is sent there: a cable whose other end nobody looks at.
        ip("-n", space.name, "link", "add", "nowhere", "type", "veth", "peer", "name", "nobody")
        for end in ("nowhere", "nobody"):
            ip("-n", space.name, "link", "set", end, "arp", "off", "up")
        ip("-n", space.name, "route", "add", "default", "dev", "nowhere", "table", _NOWHERE)

    def _join(self, one: Space, other: Space) -> None:
        for lan in self._lans:
            ends = _port(other, lan), _port(one, lan)
            ip("-n", one.name, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", other.name)
            for space, end in zip((one, other), ends, strict=True):
                ip("-n", space.name, "link", "set", end, "master", f"lan{lan}", "up")
                ip("-n", space.name, "link", "set", end, "type", "bridge_slave", "isolated", "on")

    def _ways(self, one: int, other: int, direction: Direction) -> list[tuple[Space, Space]]:
        ways = list(permutations((self.spaces[one], self.spaces[other])))
        return {"both": ways, "there": ways[:1], "back": ways[1:]}[direction]  # type: ignore[return-value]

    def _set_port(self, space: Space, port: str, state: str) -> None:
        """``off``: the bridge never sends there, because it neither knows nor learns who is behind it."""
        flags = [word for flag in ("flood", "mcast_flood", "bcast_flood", "learning") for word in (flag, state)]
        ip("-n", space.name, "link", "set", port, "type", "bridge_slave", *flags)

    def _rules(self, port: int, one: int, other: int) -> Iterator[tuple[str, ...]]:
        for here, there in self._ways(one, other, "both"):
            for lan in self._lans:
                for end in ("dport", "sport"):
                    where = ("to", self._addresses[there, lan], "ipproto", "tcp", end, str(port), "lookup", _NOWHERE)
                    yield ("-n", here.name, "rule", *where)

    def _plugged(self, machine: int, lan: int, state: str) -> None:
        space = self.spaces[machine]
        for other in self.spaces:
            if other is not space:
                ip("-n", space.name, "link", "set", _port(other, lan), state)
        self._await(space, lan, state)

    def _await(self, space: Space, lan: int, state: str) -> None:
        end = time.monotonic() + _NOTICED_S
        while f"state {state.upper()}" not in ip("-n", space.name, "link", "show", f"lan{lan}"):
            if time.monotonic() > end:
                raise RuntimeError(f"lan{lan} of {space.name} did not notice that its cable is {state}")
            time.sleep(0.02)


def _port(other: Space, lan: int) -> str:
    """The end of the cable to ``other``."""
    return f"to{other.number}-{lan}"


def why_not() -> str:
    """Why this machine cannot have such networks; empty: it can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need Linux, root and iproute2"
    try:
        Network(2).close()
    except (RuntimeError, OSError) as error:
        return f"network namespaces are not possible here ({error})"
    return ""


@contextlib.contextmanager
def network(machines: int, lans: int = 1) -> Iterator[Network]:
    """A network for one test, which is skipped with the reason where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Network(machines, lans)
    try:
        yield made
    finally:
        made.close()
