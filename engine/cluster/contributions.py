"""What nodes contribute to an exchange of a layer: the header with which each begins, and one such exchange, timed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from discovery.names import plain_text
from engine.cluster.transport.exchange import Buffer, Exchange, PeerLost
from engine.cluster.waiting import Waits, patience
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
    """This node's exchange, one contribution after the other.

    ``waits`` is what its thread waits for meanwhile; whoever watches over it may close the exchange.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.waits = Waits()
        self.exchange = exchange
        self._begun: set[int] = set()
        """The layers that were exchanged before."""

    def trade(
        self,
        parts: Sequence[Buffer],
        capacity: int,
        layer: int,
        tokens: int,
        recorder: Recorder | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[memoryview], BaseException | None]:
        """One exchange of ``layer``, in which ``tokens`` are run and ``meanwhile`` is, once this node's ``parts`` are
        on their way: all contributions, and what ``meanwhile`` raised, which is kept so that this node stays in step.

        ``recorder`` is told what the exchange took, ``meanwhile`` not counted, and what of it was waiting. Raises
        PeerLost, RingProtocolError.
        """
        exchange, waits = self.exchange, self.waits
        if recorder is not None and not recorder.enabled:
            recorder = None
        problem: BaseException | None = None
        allowed = patience(tokens, layer not in self._begun)
        begun = recorder.clock() if recorder is not None else 0.0
        with waits.on(exchange.missing, allowed):
            exchange.send(parts, capacity)
        sent = recorder.clock() if recorder is not None else 0.0
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException as error:
                problem = error
        asked = recorder.clock() if recorder is not None else 0.0
        idle = exchange.idle_s
        with waits.on(exchange.missing, allowed):
            received = exchange.receive()
        self._begun.add(layer)
        if recorder is not None:
            waited = exchange.idle_s - idle
            recorder.add(layer, "wait", waited)
            recorder.add(layer, "exchange", sent - begun + recorder.clock() - asked - waited)
        return received, problem
