"""The exchange: every node sends its contribution to all others, once per MoE layer, in the same order everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.errors import ModelError, PeerLost

__all__ = ["Buffer", "Exchange", "Link", "PeerLost", "RingProtocolError"]

Buffer = bytes | bytearray | memoryview


class RingProtocolError(ModelError):
    """A peer sent what no node of this version sends: too large, out of order, or under a wrong key."""


class Exchange(Protocol):
    """All-gather among the ranks of an epoch. One thread at a time.

    An exchange is one :meth:`send` and one :meth:`receive` on every node. A node may compute in between.
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
        """Seconds spent waiting for the others since the exchange was opened: for the slowest node, and for the
        transfer."""
        ...

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        """Begin an exchange. ``parts``, one after the other, are this node's contribution, which may be empty.

        They may be reused when :meth:`receive` has returned. ``capacity``: bytes of the largest contribution that any
        other node may make in this exchange. Raises PeerLost.
        """
        ...

    def receive(self) -> list[memoryview]:
        """End the exchange: all contributions in rank order, this node's own included, valid until the next
        :meth:`send`.

        Waits as long as the others live. Raises PeerLost if one is gone. Raises RingProtocolError if one sent more than
        ``capacity`` or anything that is not the expected exchange. The exchange is over then. After
        PeerLost the others hear of it when :meth:`close` is called: by then this node must be able to say whom it lost.
        """
        ...

    def missing(self) -> Sequence[int]:
        """The ranks whose contributions :meth:`receive` waits for, as far as this exchange knows. From any thread."""
        ...

    def close(self) -> None:
        """Close every link. A :meth:`receive` that waits in another thread raises PeerLost. May be called twice."""
        ...


class Link(Protocol):
    """A connection to one peer that carries frames, authenticated and (except ``socket``) encrypted."""

    def send(self, *parts: Buffer) -> None:
        """Send one frame. Raises PeerLost."""
        ...

    def receive(self, limit: int) -> memoryview:
        """The next frame of at most ``limit`` bytes, valid until the next call. Waits.

        Raises PeerLost if the peer is gone or the link was closed here, RingProtocolError.
        """
        ...

    def close(self) -> None:
        """Close the link. From any thread. May be called twice."""
        ...
