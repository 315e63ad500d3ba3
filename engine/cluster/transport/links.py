"""One peer, one connection, frames of bytes: what commands and measurements travel on."""

from __future__ import annotations

import threading

from engine.cluster.transport.exchange import Buffer, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import Wire

CLOSE_WAIT_S = 0.25
"""How long closing waits for a thread that was woken to leave the wire before the connection is cut hard."""


class WireLink:
    """:class:`engine.cluster.transport.exchange.Link` over a :class:`Wire`. One thread sends and receives, any may
    close."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._in_use = threading.Lock()
        self._closed = False

    @property
    def peer(self) -> str:
        return self._wire.peer

    @property
    def encrypted(self) -> bool:
        return self._wire.encrypted

    def send(self, *parts: Buffer) -> None:
        """See :class:`Link`. Waits until the frame is in the kernel's hands."""
        with self._in_use:
            self._usable()
            try:
                self._wire.push(parts)
                self._wire.flush(wait=True)
            except (PeerLost, RingProtocolError):
                self._end()
                raise

    def receive(self, limit: int) -> memoryview:
        """See :class:`Link`."""
        with self._in_use:
            self._usable()
            try:
                frame = self._wire.pull(limit, wait=True)
            except (PeerLost, RingProtocolError):
                self._end()
                raise
        assert frame is not None
        return frame

    def close(self) -> None:
        """See :class:`Link`."""
        self._closed = True
        self._wire.interrupt()
        free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if not free:
            self._wire.cut()
            free = self._in_use.acquire(timeout=CLOSE_WAIT_S)
        if free:
            try:
                self._wire.close()
            finally:
                self._in_use.release()

    def _usable(self) -> None:
        if self._closed:
            raise PeerLost(f"The link to {self._wire.peer} was closed.")

    def _end(self) -> None:
        self._closed = True
        self._wire.close()
