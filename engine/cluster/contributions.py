"""What nodes contribute to an exchange of a layer: the header with which each begins, and one such exchange, timed."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from discovery.names import plain_text
from engine.cluster.transport.exchange import Buffer, Exchange, PeerLost
from engine.cluster.waiting import Waits, exchange_timeout
from engine.moe.timing import Recorder

HEADER = struct.Struct("<IHBx8s")
"""Number of the exchange (modulo 2**32), decoder layer, flags, hash of the routes."""
GAVE_UP = 1
"""The head ends the pass here."""
FAILED = 2
"""This node cannot go on; the rest of the contribution says why, in UTF-8."""
REASON_BYTES = 512
"""A reason is cut there."""
MOST_BYTES = 2**30
"""What another node may contribute to an exchange in which this node only says that it leaves the pass."""


class NodeFailed(PeerLost):
    """A node of the epoch said that it cannot go on, and why; all nodes are still in step."""


def reason_in(view: memoryview) -> str:
    """Why a node cannot go on, as its contribution says: foreign text, made fit for a sentence."""
    return plain_text(bytes(view[HEADER.size : HEADER.size + REASON_BYTES]).decode("utf-8", "replace"), REASON_BYTES)


class Trading:
    """This node's exchange, one contribution after the other: :meth:`send`, then :meth:`receive`.

    ``waits`` is what its thread waits for meanwhile; whoever watches over it may close the exchange.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.waits = Waits()
        self.exchange = exchange
        self._begun: set[int] = set()
        """The layers that were exchanged before."""
        self._layer = 0
        self._allowed = 0.0
        self._sending_s = 0.0

    def send(
        self,
        parts: Sequence[Buffer],
        capacity: int,
        layer: int,
        tokens: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Begin an exchange of ``layer``, in which ``tokens`` are run: this node's ``parts`` are on their way.

        Nobody contributes more than ``capacity`` bytes. Raises PeerLost, RingProtocolError.
        """
        self._layer, self._allowed = layer, exchange_timeout(tokens, layer not in self._begun)
        begun = recorder.clock() if recorder is not None else 0.0
        with self.waits.on(self.exchange.missing, self._allowed):
            self.exchange.send(parts, capacity)
        self._sending_s = recorder.clock() - begun if recorder is not None else 0.0

    def receive(self, recorder: Recorder | None = None) -> list[memoryview]:
        """All contributions to the exchange that was begun, by rank.

        ``recorder`` gets what the exchange took, without what was done between the two calls, and what of it was
        waiting. Raises PeerLost, RingProtocolError.
        """
        exchange = self.exchange
        begun, idle = recorder.clock() if recorder is not None else 0.0, exchange.idle_s
        with self.waits.on(exchange.missing, self._allowed):
            received = exchange.receive()
        self._begun.add(self._layer)
        if recorder is not None and recorder.enabled:
            waited = exchange.idle_s - idle
            recorder.add(self._layer, "wait", waited)
            recorder.add(self._layer, "exchange", self._sending_s + recorder.clock() - begun - waited)
        return received
