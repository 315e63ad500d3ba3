"""One node's part in every MoE layer: the assignment of experts, one exchange, and equal results on all nodes.

Every contribution begins with a header: the number of the exchange, the layer, flags, and a hash of the routes. All
nodes see the same headers and so reach the same conclusion at the same exchange: the routers disagree (the layer is run
again with the head's routes), the head cancelled the pass, or a node cannot go on. In every case each node has taken
part in the same number of exchanges, so the next pass is in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cluster.assignment import Router, SharedRoutes
from engine.cluster.contributions import (
    FAILED,
    GAVE_UP,
    HEADER,
    MOST_BYTES,
    REASON_BYTES,
    NodeFailed,
    NumberedGather,
    Waits,
    reason_in,
)
from engine.cluster.transport.exchange import Buffer, Exchange, PeerLost, RingProtocolError
from engine.moe.expert_parallel import (
    FLOAT32,
    HEAD,
    Call,
    Floats,
    Gathered,
    HostRows,
    Indices,
    RankContext,
    Routes,
    Words,
)
from engine.moe.timing import Recorder
from engine.runtimes.protocol import Interrupted

MANY_DISAGREEMENTS = 3
"""Number of disagreements within FEW_LAYERS after which central mode is suggested."""
FEW_LAYERS = 256
"""Window in which disagreements are counted, in exchanged layers."""


class RingLayers:
    """Implements :class:`engine.moe.expert_parallel.LayerExchange`. Only :meth:`abort` is thread-safe.

    ``recorder`` receives times and notices. It may be set later, when the model is loaded.
    """

    needs_hidden = False

    def __init__(self, context: RankContext, exchange: Exchange, recorder: Recorder | None = None) -> None:
        if exchange.size != context.nodes or exchange.rank != context.rank:
            raise ValueError(f"rank {context.rank} of {context.nodes} cannot use the exchange of another place")
        self.context = context
        self.recorder = recorder
        self.disagreements = 0
        """Number of layers of the epoch in which the nodes' routers disagreed."""
        self._gather = NumberedGather(exchange)
        self._router = Router(context)
        self._layers = context.placement.layers
        self._next = 0
        self._over = False
        self._aborted = False
        self._layer = 0
        self._routes = Routes(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
        self._shared = SharedRoutes(self._routes.indices, ((),) * context.nodes, (), b"", False)
        self._mended = False
        self._mine: Words | None = None
        self._width, self._word = 0, FLOAT32
        self._header = b""
        self._recent: deque[int] = deque(maxlen=MANY_DISAGREEMENTS)

    @property
    def waits(self) -> Waits:
        """The current wait of this node's thread. Thread-safe."""
        return self._gather.waits

    # --- passes -----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a pass of the model. An earlier :meth:`abort` is discarded."""
        self._next = 0
        self._over = False
        self._aborted = False

    def abort(self) -> None:
        """End the pass at its next layer, on all nodes. Called on the head only. Thread-safe."""
        self._aborted = True

    def give_up(self, reason: str = "") -> bool:
        """Notify the others, which wait in the next layer, that the pass ended here between two layers.

        If this node is the head, they raise Interrupted; otherwise NodeFailed with ``reason``. Returns False if all
        layers of the pass were through, so that the others finish it. Returns True if they were notified, now or
        before. Raises PeerLost.
        """
        if self._over:
            return True
        self._gather.check()
        if self._next >= len(self._layers):
            return False
        self._leave(self._layers[self._next], GAVE_UP if self.context.is_head else FAILED, reason)
        return True

    # --- a layer ----------------------------------------------------------------------------------------------------

    def assign(
        self, layer: int, routes: Routes, hidden: HostRows | None = None, mended: bool = False
    ) -> Sequence[Call]:
        """See :class:`engine.moe.expert_parallel.LayerExchange`."""
        if not mended:
            self._enter(layer)
            if self._aborted and self.context.is_head:
                self._leave(layer, GAVE_UP)
                raise Interrupted
        self._layer, self._routes, self._mended = layer, routes, mended
        self._shared = self._router.share(layer, routes.indices, with_extra=not mended)
        return self._shared.calls()

    def send(self, mine: Words | None, width: int, word: np.dtype[Any]) -> None:
        """See :class:`engine.moe.expert_parallel.LayerExchange`."""
        exact, own = self.context.mode == "exact", self._shared.rows[self.context.rank]
        self._mine, self._width, self._word = mine, width, word
        self._header = self._gather.header(self._layer, routes=self._shared.hash)
        parts: list[Buffer] = [self._header]
        if mine is not None and len(own):
            parts.append(_bytes_of(mine.take(own, axis=0) if exact else mine))
        tokens = self._routes.indices.shape[0]
        rows = self._routes.indices.size if exact else tokens
        self._send(self._layer, parts, rows * width * word.itemsize, tokens)

    def receive(self) -> Gathered | Routes:
        """See :class:`engine.moe.expert_parallel.LayerExchange`. Raises NodeFailed if another node cannot go on."""
        layer = self._layer
        received = self._gather.receive(self.recorder)
        if not self._agreed(layer, self._header, received):
            if self._mended:
                raise self._refused(f"the routes of layer {layer} differ although they came from one node")
            return self._mended_routes(layer, self._routes.indices, self._routes.weights)
        self._next += 1
        return self._together(received)

    def leave(self, error: BaseException) -> None:
        """See :class:`engine.moe.expert_parallel.LayerExchange`."""
        self._leave(self._layer, GAVE_UP if self.context.is_head else FAILED, str(error) or type(error).__name__)

    def _enter(self, layer: int) -> None:
        self._gather.check()
        if layer == self._layers[0] and (self._over or self._next >= len(self._layers)):
            self._next = 0
            self._over = False
        if self._over or self._next >= len(self._layers) or layer != self._layers[self._next]:
            raise ValueError(f"layer {layer} is out of turn; layers {self._layers} run in this order")

    def _together(self, received: list[memoryview]) -> Gathered:
        """The nodes' results of the layer, whose routes are the same on all of them."""
        mine, routes, width, word = self._mine, self._routes, self._width, self._word
        owned = self._shared.rows
        self._mine = None
        if self.context.mode == "exact":
            outputs = _writable(mine, routes.indices.size, width, word)
            for rank, view in enumerate(received):
                if rank != self.context.rank and len(owned[rank]):
                    outputs[owned[rank]] = self._rows(rank, view, len(owned[rank]), width, word)
            return Gathered(routes.indices, routes.weights, outputs=outputs)
        tokens = routes.indices.shape[0]
        sums = tuple(
            self._rows(rank, view, tokens, width, word).copy() for rank, view in enumerate(received) if len(owned[rank])
        )
        return Gathered(routes.indices, routes.weights, sums=sums)

    def _mended_routes(self, layer: int, indices: Indices, weights: Floats) -> Routes:
        """Repeat the layer's exchange with the head's routes, which the head sends to all others. Returns the
        routes."""
        self._note_disagreement(layer)
        parts: list[Buffer] = [self._gather.header(layer)]
        if self.context.is_head and indices.size:
            parts += [_bytes_of(np.ascontiguousarray(indices, np.int32)), _bytes_of(np.asarray(weights, np.float32))]
        header = bytes(parts[0])
        self._send(layer, parts, indices.size * 8, len(indices))
        received = self._gather.receive(self.recorder)
        if not self._agreed(layer, header, received):
            raise self._refused(f"the nodes disagree on what layer {layer} is at")
        shape, count = indices.shape, indices.size
        told = received[HEAD]
        if len(told) != HEADER.size + count * 8:
            raise self._refused(f"the head sent {len(told)} bytes of routes instead of {HEADER.size + count * 8}")
        taken = np.frombuffer(told, np.int32, count, HEADER.size).reshape(shape).copy()
        if count and not (taken.min() >= 0 and taken.max() < self.context.placement.experts):
            raise self._refused(f"the head sent routes to experts that layer {layer} does not have")
        shares = np.frombuffer(told, np.float32, count, HEADER.size + count * 4).reshape(shape).copy()
        return Routes(taken, shares)

    def _note_disagreement(self, layer: int) -> None:
        self.disagreements += 1
        self._recent.append(self._gather.number)
        if self.recorder is None:
            return
        if self.disagreements == 1:
            self.recorder.notice(
                f"The nodes chose different experts in layer {layer}; the layer was run again with the head's choice."
            )
        elif len(self._recent) == MANY_DISAGREEMENTS and self._recent[0] + FEW_LAYERS > self._gather.number:
            self._recent.clear()
            self.recorder.notice(
                f"The nodes chose different experts in {self.disagreements} layers so far, each of which was run "
                "twice: their chips or versions compute differently; mode central avoids it."
            )

    # --- the exchange -----------------------------------------------------------------------------------------------

    def _send(self, layer: int, parts: Sequence[Buffer], payload: int, tokens: int) -> None:
        """Begin an exchange of at most ``payload`` bytes beside the header."""
        self._gather.send(parts, HEADER.size + max(payload, REASON_BYTES), layer, tokens, self.recorder)

    def _agreed(self, layer: int, header: bytes, received: list[memoryview]) -> bool:
        """Whether all nodes sent ``header``. Raises what the flags of another header mean."""
        same = True
        for rank, view in enumerate(received):
            if view[: HEADER.size] != header:
                same = False
                self._check(rank, view, layer, header)
        return same

    def _check(self, rank: int, view: memoryview, layer: int, header: bytes) -> None:
        """Raise what contribution ``view`` reports, unless only its routes differ."""
        if len(view) < HEADER.size:
            raise self._refused(f"node {rank} sent {len(view)} bytes, less than a header")
        number, at, flags, _ = HEADER.unpack_from(view)
        expected = HEADER.unpack(header)[0]
        if number != expected:
            raise self._refused(f"node {rank} is at exchange {number} of the epoch, this node at {expected}")
        if flags & FAILED:
            self._over = True
            raise NodeFailed(reason_in(view), [rank])
        if flags & GAVE_UP and rank == HEAD:
            self._over = True
            raise Interrupted
        if at != layer:
            raise self._refused(f"node {rank} is at layer {at}, this node at layer {layer}")
        if flags:
            raise self._refused(f"node {rank} sent flags {flags}, which it must not send")

    def _leave(self, layer: int, flag: int, reason: str = "") -> None:
        """Take part in an exchange only to end the pass."""
        parts: list[Buffer] = [self._gather.header(layer, flag)]
        if flag == FAILED:
            parts.append(reason.encode()[:REASON_BYTES])
        self._over = True
        self._gather.send(parts, MOST_BYTES, layer, 1)
        self._gather.receive()

    def _refused(self, text: str) -> RingProtocolError:
        """End the epoch because of ``text``. Returns the error to raise."""
        self._gather.lost = PeerLost(f"The ring ended: {text}.")
        return RingProtocolError(f"The ring ended: {text}; start it again.")

    def _rows(self, rank: int, view: memoryview, rows: int, width: int, word: np.dtype[Any]) -> Words:
        """The results in contribution ``view``, without a copy."""
        expected = HEADER.size + rows * width * word.itemsize
        if len(view) != expected:
            raise self._refused(f"node {rank} sent {len(view)} bytes where {expected} were expected")
        return np.frombuffer(view, word, rows * width, HEADER.size).reshape(rows, width)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of ``array``, which is not empty."""
    return np.ascontiguousarray(array).data.cast("B")


def _writable(array: Words | None, rows: int, width: int, word: np.dtype[Any]) -> Words:
    """``array`` [rows, width], or one like it that may be written to."""
    if array is None:
        return np.empty((rows, width), word)
    return array if array.flags.writeable else array.copy()
