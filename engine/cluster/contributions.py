"""The contributions of nodes to a layer's all-gather: their header, and the numbered and timed exchange of them."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from discovery.names import plain_text
from engine.cluster.transport.exchange import Buffer, Exchange, PeerLost
from engine.moe.timing import Recorder

HEADER = struct.Struct("<IHBx8s")
"""Header of a contribution: number of the exchange (modulo 2**32), decoder layer, flags, hash of the routes."""
GAVE_UP = 1
"""Flag: the head ends the pass here."""
FAILED = 2
"""Flag: this node cannot go on. The rest of the contribution is the reason, in UTF-8."""
REASON_BYTES = 512
"""Maximum bytes of a reason."""
MOST_BYTES = 2**30
"""Maximum bytes of another node's contribution to an exchange in which this node only leaves the pass."""


class NodeFailed(PeerLost):
    """A node of the epoch reported that it cannot go on, and why. All nodes are still in step."""


def reason_in(view: memoryview) -> str:
    """The reason in a contribution, made safe for a sentence."""
    return plain_text(bytes(view[HEADER.size : HEADER.size + REASON_BYTES]).decode("utf-8", "replace"), REASON_BYTES)


class NumberedGather:
    """This node's all-gathers of an epoch, one after the other: :meth:`send`, then :meth:`receive`.

    ``waits``: the current wait of its thread; another thread may close the exchange to end it. ``number``: number of
    exchanges that have ended. ``lost``: the loss that ended the epoch, if any.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.waits = Waits()
        self.exchange = exchange
        self.number = 0
        self.lost: PeerLost | None = None
        self._begun: set[int] = set()
        """Layers that were exchanged before."""
        self._layer = 0
        self._allowed = 0.0
        self._sending_s = 0.0

    def check(self) -> None:
        """Raises PeerLost if the epoch has ended."""
        if self.lost is not None:
            raise self.lost

    def header(self, layer: int, flags: int = 0, routes: bytes = bytes(8)) -> bytes:
        """The header of this node's contribution to the next exchange."""
        return HEADER.pack(self.number & 0xFFFFFFFF, layer, flags, routes)

    def send(
        self,
        parts: Sequence[Buffer],
        capacity: int,
        layer: int,
        tokens: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Begin an exchange of ``layer``, in which ``tokens`` are run, with this node's ``parts``.

        Each other node contributes at most ``capacity`` bytes. Raises PeerLost, RingProtocolError.
        """
        self._layer, self._allowed = layer, exchange_timeout(tokens, layer not in self._begun)
        begun = recorder.clock() if recorder is not None else 0.0
        with self._ending(), self.waits.on(self.exchange.missing, self._allowed):
            self.exchange.send(parts, capacity)
        self._sending_s = recorder.clock() - begun if recorder is not None else 0.0

    def receive(self, recorder: Recorder | None = None) -> list[memoryview]:
        """End the exchange. Returns all contributions by rank.

        ``recorder`` gets the time of both calls, and the part of it that was waiting. Raises PeerLost,
        RingProtocolError.
        """
        exchange = self.exchange
        begun, idle = recorder.clock() if recorder is not None else 0.0, exchange.idle_s
        with self._ending(), self.waits.on(exchange.missing, self._allowed):
            received = exchange.receive()
        self.number += 1
        self._begun.add(self._layer)
        if recorder is not None and recorder.enabled:
            waited = exchange.idle_s - idle
            recorder.add(self._layer, "wait", waited)
            recorder.add(self._layer, "exchange", self._sending_s + recorder.clock() - begun - waited)
        return received

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Count an exchange that failed inside. A lost peer stays lost."""
        try:
            yield
        except BaseException as error:
            self.number += 1
            if isinstance(error, PeerLost):
                self.lost = error
            raise


# --- what a pass waits for -------------------------------------------------------------------------------------------


LIMIT_S = 30.0
"""Maximum seconds for the contributions of one layer of a decoding step. A machine that swaps may take seconds."""
TOKEN_S = 0.1
"""Additional seconds for each further token. A layer of a prompt's chunk works for hundreds of them."""
FIRST = 10
"""Factor for a layer's first exchange of an epoch: the weights may come from a cold disk."""


def exchange_timeout(tokens: int, first: bool) -> float:
    """Maximum seconds for one exchange of ``tokens`` tokens while all machines are alive."""
    return (LIMIT_S + TOKEN_S * max(0, tokens - 1)) * (FIRST if first else 1)


@dataclass(frozen=True)
class Wait:
    """A running wait. ``since`` is a time of :func:`time.monotonic`. ``missing`` returns the ranks that are waited for,
    as far as they are known."""

    since: float
    allowed_s: float
    missing: Callable[[], Sequence[int]]


class Waits:
    """The current wait of one thread, visible to other threads."""

    def __init__(self) -> None:
        self.now: Wait | None = None

    def on(self, missing: Callable[[], Sequence[int]], allowed_s: float) -> Waits:
        """Mark the wait: ``with waits.on(...)`` encloses it."""
        self.now = Wait(time.monotonic(), allowed_s, missing)
        return self

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now = None
