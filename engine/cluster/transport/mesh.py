"""The exchange over one wire to every other node: all send to all, and the kernel waits."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping, Sequence

from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import Wire
from engine.cluster.transport.links import CLOSE_WAIT_S


class Mesh:
    """:class:`engine.cluster.transport.exchange.Exchange` over wires. ``wires`` are those to every other rank, by rank.

    A ring of one needs no wire. Contributions of many megabytes are sent and received in turns, so that nodes that all
    send at once neither wait for each other for ever nor use only one direction of their links.
    """

    def __init__(self, rank: int, size: int, wires: Mapping[int, Wire]) -> None:
        if sorted(wires) != [other for other in range(size) if other != rank]:
            raise ValueError(f"rank {rank} of {size} needs a wire to every other rank, not to {sorted(wires)}")
        self._rank = rank
        self._size = size
        self._wires = [wires[other] for other in sorted(wires)]
        self._by_descriptor = {wire.fileno(): wire for wire in self._wires}
        self._name = "tls" if all(wire.encrypted for wire in self._wires) else "socket"
        self._in_use = threading.Lock()
        self._closed = False
        self._capacity = 0
        self._own = memoryview(b"")
        self._frames: dict[int, memoryview] = {}
        """The contributions that are here, by rank."""
        self.idle_s = 0.0

    @property
    def name(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        """See :class:`Exchange`. Never waits: what a link does not take at once goes out in :meth:`receive`."""
        with self._in_use:
            self._usable()
            self._capacity = capacity
            try:
                for wire in self._wires:
                    wire.push(parts)
            except (PeerLost, RingProtocolError):
                self._end()
                raise
            # A copy: the parts may be used for something else while the contributions are still looked at.
            self._own = memoryview(b"".join(parts))

    def receive(self) -> list[memoryview]:
        """See :class:`Exchange`."""
        with self._in_use:
            self._usable()
            try:
                frames = self._gather()
            except (PeerLost, RingProtocolError):
                self._end()
                raise
        frames.insert(self._rank, self._own)
        return frames

    def _gather(self) -> list[memoryview]:
        wires = self._wires
        self._frames = {}
        if len(wires) == 1 and not wires[0].unsent:
            began = time.perf_counter()
            frame = wires[0].pull(self._capacity, wait=True)
            self.idle_s += time.perf_counter() - began
            assert frame is not None
            return [frame]
        return self._gather_from_several()

    def _gather_from_several(self) -> list[memoryview]:
        frames = self._frames
        poller = select.poll()
        outstanding = 0
        for wire in self._wires:
            frame = wire.pull(self._capacity) if wire.buffered else None
            if frame is not None:
                frames[wire.rank] = frame
            if frame is None or wire.unsent:
                poller.register(wire.fileno(), _interest(frame is None, wire.unsent))
                outstanding += 1
        while outstanding:
            began = time.perf_counter()
            ready = poller.poll()
            self.idle_s += time.perf_counter() - began
            for descriptor, events in ready:
                wire = self._by_descriptor[descriptor]
                had, unsent = wire.rank in frames, wire.unsent
                if unsent and events & ~select.POLLIN:
                    wire.flush()
                if not had and events & ~select.POLLOUT:
                    frame = wire.pull(self._capacity)
                    if frame is not None:
                        frames[wire.rank] = frame
                has, still = wire.rank in frames, wire.unsent
                if has and not still:
                    poller.unregister(descriptor)
                    outstanding -= 1
                elif has != had or still != unsent:
                    poller.modify(descriptor, _interest(not has, still))
        return [frames[wire.rank] for wire in self._wires]

    def missing(self) -> list[int]:
        """See :class:`Exchange`."""
        return [wire.rank for wire in self._wires if wire.rank not in self._frames]

    def close(self) -> None:
        """See :class:`Exchange`."""
        self._closed = True
        for wire in self._wires:
            wire.interrupt()
        free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if not free:
            for wire in self._wires:
                wire.cut()
            free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if free:
            try:
                self._end()
            finally:
                self._in_use.release()

    def _usable(self) -> None:
        if self._closed:
            raise PeerLost("The ring's links were closed.")

    def _end(self) -> None:
        self._closed = True
        for wire in self._wires:
            wire.close()


def _interest(reading: bool, writing: bool) -> int:
    return (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0)
