"""A network of two interfaces, one of them in a network namespace, that loses and delays packets.

With ``netem`` where the kernel has it; and with two TUN devices between which this process carries the packets, all but
some. TCP notices, and sends again, as it does on a bad wireless network.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque

_SET_TUN = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
_PACKET = 65536


class LossyWire(ABC):
    """``here`` and ``there``: the addresses. Raises OSError or CalledProcessError where that is not allowed."""

    def __init__(self, number: int) -> None:
        self.space = f"privatellm-lossy-{os.getpid()}"
        self.near, self.far = f"pvx{os.getpid() % 10000}a", f"pvx{os.getpid() % 10000}b"
        self.here, self.there = f"10.212.{number % 250}.1", f"10.212.{number % 250}.2"

    def make(self) -> None:
        run(f"ip netns add {self.space}")
        self.make_interfaces()
        for command in (
            f"ip link set {self.far} netns {self.space}",
            f"ip addr add {self.here}/30 dev {self.near}",
            f"ip link set {self.near} up",
            f"ip -n {self.space} addr add {self.there}/30 dev {self.far}",
            f"ip -n {self.space} link set {self.far} up",
            f"ip -n {self.space} link set lo up",
        ):
            run(command)

    @abstractmethod
    def make_interfaces(self) -> None: ...

    @abstractmethod
    def lose(self, share: float, delay: float) -> None:
        """From now on this share of the packets is lost in each direction, and the others take ``delay`` seconds."""
        ...

    @abstractmethod
    def lost(self) -> int:
        """Packets, on their way from ``there`` at least."""
        ...

    def remove(self) -> None:
        for command in (f"ip link del {self.near}", f"ip netns del {self.space}"):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                run(command)


class NetemWire(LossyWire):
    def make_interfaces(self) -> None:
        run(f"ip link add {self.near} type veth peer name {self.far}")

    def lose(self, share: float, delay: float) -> None:
        how = f"root netem delay {delay * 1e3:g}ms loss {share * 100:g}%"
        run(f"tc qdisc replace dev {self.near} {how}")
        run(f"tc -n {self.space} qdisc replace dev {self.far} {how}")

    def lost(self) -> int:
        shown = run(f"tc -s -n {self.space} qdisc show dev {self.far}")
        return int(shown.split("dropped ")[1].split(",")[0])


class TunWire(LossyWire):
    """The packets that are dropped are the same ones every time, by their number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._ends: list[int] = []
        self._share = self._delay = 0.0
        self._lost = 0
        self._closed = threading.Event()
        self._carrying = threading.Thread(target=self._carry, name="lossy wire", daemon=True)

    def make_interfaces(self) -> None:
        for name in (self.near, self.far):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._ends.append(end)
            fcntl.ioctl(end, _SET_TUN, struct.pack("16sH", name.encode(), _TUN | _NO_HEADER))
        self._carrying.start()

    def lose(self, share: float, delay: float) -> None:
        self._share, self._delay = share, delay

    def lost(self) -> int:
        return self._lost

    def remove(self) -> None:
        self._closed.set()
        if self._carrying.is_alive():
            self._carrying.join(5.0)
        for end in self._ends:
            os.close(end)
        super().remove()

    def _carry(self) -> None:
        first, second = self._ends
        chance = random.Random(7)
        waiting: deque[tuple[float, int, bytes]] = deque()
        while not self._closed.is_set():
            until = waiting[0][0] - time.monotonic() if waiting else 0.05
            ready, _, _ = select.select([first, second], [], [], max(0.0, min(0.05, until)))
            for end in ready:
                with contextlib.suppress(OSError):
                    packet = os.read(end, _PACKET)
                    if chance.random() < self._share:
                        self._lost += 1
                        continue
                    waiting.append((time.monotonic() + self._delay, second if end == first else first, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, end, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # the interface is not up yet
                    os.write(end, packet)


def run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
