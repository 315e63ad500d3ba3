"""The exchange over one framed socket to every other node: all send to all, and the kernel waits.

The transports ``tls`` and ``socket`` differ only in the kind of their sockets.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping, Sequence

from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import CLOSE_WAIT_S, FramedSocket


class Mesh:
    """An :class:`engine.cluster.transport.exchange.Exchange` over ``sockets``, one to every other rank, by rank.

    A ring of one needs no socket. Contributions of many megabytes are sent and received in turns. So nodes that all
    send at once neither wait for each other for ever nor use only one direction of their links.
    """

    def __init__(self, rank: int, size: int, sockets: Mapping[int, FramedSocket]) -> None:
        if sorted(sockets) != [other for other in range(size) if other != rank]:
            raise ValueError(
                f"rank {rank} of {size} needs a framed socket to every other rank, not to {sorted(sockets)}"
            )
        self._rank = rank
        self._size = size
        self._sockets = [sockets[other] for other in sorted(sockets)]
        self._by_descriptor = {framed.fileno(): framed for framed in self._sockets}
        self._name = "tls" if all(framed.encrypted for framed in self._sockets) else "socket"
        self._in_use = threading.Lock()
        self._closed = False
        self._capacity = 0
        self._own = memoryview(b"")
        self._frames: dict[int, memoryview] = {}
        """Contributions that have arrived, by rank."""
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
        """See :class:`Exchange`. Never waits: what a link does not take at once is sent in :meth:`receive`."""
        with self._in_use:
            self._usable()
            self._capacity = capacity
            try:
                for framed in self._sockets:
                    framed.push(parts)
            except PeerLost:
                self._closed = True
                raise
            except RingProtocolError:
                self._end()
                raise
            # A copy, because the caller may reuse the parts while the contributions are still in use.
            self._own = memoryview(b"".join(parts))

    def receive(self) -> list[memoryview]:
        """See :class:`Exchange`."""
        with self._in_use:
            self._usable()
            try:
                frames = self._gather()
            except PeerLost:
                self._closed = True
                raise
            except RingProtocolError:
                self._end()
                raise
        frames.insert(self._rank, self._own)
        return frames

    def _gather(self) -> list[memoryview]:
        sockets = self._sockets
        self._frames = {}
        if len(sockets) == 1 and not sockets[0].unsent:
            began = time.perf_counter()
            frame = sockets[0].pull(self._capacity, wait=True)
            self.idle_s += time.perf_counter() - began
            assert frame is not None
            return [frame]
        return self._gather_from_several()

    def _gather_from_several(self) -> list[memoryview]:
        frames = self._frames
        poller = select.poll()
        outstanding = 0
        for framed in self._sockets:
            frame = framed.pull(self._capacity) if framed.buffered else None
            if frame is not None:
                frames[framed.rank] = frame
            if frame is None or framed.unsent:
                poller.register(framed.fileno(), _interest(frame is None, framed.unsent))
                outstanding += 1
        while outstanding:
            began = time.perf_counter()
            ready = poller.poll()
            self.idle_s += time.perf_counter() - began
            for descriptor, events in ready:
                framed = self._by_descriptor[descriptor]
                had, unsent = framed.rank in frames, framed.unsent
                if unsent and events & ~select.POLLIN:
                    framed.flush()
                if not had and events & ~select.POLLOUT:
                    frame = framed.pull(self._capacity)
                    if frame is not None:
                        frames[framed.rank] = frame
                has, still = framed.rank in frames, framed.unsent
                if has and not still:
                    poller.unregister(descriptor)
                    outstanding -= 1
                elif has != had or still != unsent:
                    poller.modify(descriptor, _interest(not has, still))
        return [frames[framed.rank] for framed in self._sockets]

    def missing(self) -> list[int]:
        """See :class:`Exchange`."""
        return [framed.rank for framed in self._sockets if framed.rank not in self._frames]

    def go_on_over(self, other: Mesh) -> None:
        """Use the sockets of ``other``, a mesh of the same nodes, from the next exchange on; ``other`` gets the former
        ones. Both are between two exchanges. Raises PeerLost if one of them was closed."""
        with self._in_use, other._in_use:
            self._usable()
            other._usable()
            self._sockets, other._sockets = other._sockets, self._sockets
            self._by_descriptor, other._by_descriptor = other._by_descriptor, self._by_descriptor

    def close(self) -> None:
        """See :class:`Exchange`."""
        self._closed = True
        for framed in self._sockets:
            framed.interrupt()
        free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if not free:
            for framed in self._sockets:
                framed.cut()
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
        for framed in self._sockets:
            framed.close()


def _interest(reading: bool, writing: bool) -> int:
    return (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0)
