"""The exchange: every node hands its contribution to all others, once per MoE layer, in the same order everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.errors import ModelError, PeerLost

__all__ = ["Buffer", "Exchange", "Link", "PeerLost", "RingProtocolError"]

Buffer = bytes | bytearray | memoryview


class RingProtocolError(ModelError):
    """A peer sent what no node of this version sends: too large, out of order, or with a wrong key."""


class Exchange(Protocol):
    """All-gather among the ranks of an epoch. One thread at a time; no call spins.

    An exchange is one :meth:`send` and one :meth:`receive` on every node; between them a node may compute.
    """

    @property
    def name(self) -> str:
        """``tls``, ``socket``, ``envoy``, ``gloo`` or ``mlx``."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for the others since the exchange began: the slowest node, and the socket."""
        ...

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        """Begin: ``parts``, one after the other, are this node's contribution (it may be empty). They may be reused
        when :meth:`receive` has returned. ``capacity`` is the largest contribution that any other node may make in this
        exchange, in bytes. Raises PeerLost."""
        ...

    def receive(self) -> list[memoryview]:
        """End: all contributions in rank order, this node's own too. They are valid until the next :meth:`send`.

        Waits as long as the others live. Raises PeerLost if one is gone, RingProtocolError if one sent more than
        ``capacity`` or anything that is not the expected exchange."""
        ...

    def missing(self) -> Sequence[int]:
        """From any thread: the ranks whose contribution :meth:`receive` waits for, as far as this exchange knows."""
        ...

    def close(self) -> None:
        """Close every link. A :meth:`receive` that waits in another thread raises PeerLost. May be called twice."""
        ...


class Link(Protocol):
    """A connection to one peer that carries frames of bytes, authenticated and (but for ``socket``) encrypted."""

    def send(self, *parts: Buffer) -> None:
        """One frame. Raises PeerLost."""
        ...

    def receive(self, limit: int) -> memoryview:
        """The next frame, of at most ``limit`` bytes; valid until the next call. Waits. Raises PeerLost if the peer
        is gone or the link was closed here, RingProtocolError."""
        ...

    def close(self) -> None:
        """May be called from any thread, and twice."""
        ...
