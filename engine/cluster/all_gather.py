"""One node's part in every MoE layer: who runs what, one exchange, and the same results on all nodes.

Every contribution begins with a header: the number of the exchange, the layer, flags, and a hash of the routes. All
nodes see the same headers, so all of them come to the same conclusion at the same exchange: that their routers disagree
(the layer is run again with the head's routes), that the head gave the pass up, or that a node cannot go on. Whatever
happens, each node has then taken part in the same number of exchanges, and the next pass is in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
    Trading,
    reason_in,
)
from engine.cluster.transport.exchange import Buffer, Exchange, PeerLost, RingProtocolError
from engine.cluster.waiting import Waits
from engine.moe.expert_parallel import Gathered, Indices, Local, Words
from engine.moe.rank_context import HEAD, RankContext
from engine.moe.timing import Recorder
from engine.runtimes.protocol import Interrupted

MANY_DISAGREEMENTS = 3
FEW_LAYERS = 256
"""So many disagreements within so many exchanged layers, and central mode is suggested."""


class RingLayers:
    """See :class:`engine.moe.expert_parallel.LayerExchange`. One thread at a time, but for :meth:`abort`.

    A pass of the model calls :meth:`run` for every MoE layer, in order, on every node, with no tokens where none is
    wanted. ``recorder`` gets times and notices; it may be set later, when the model is loaded.
    """

    def __init__(self, context: RankContext, exchange: Exchange, recorder: Recorder | None = None) -> None:
        if exchange.size != context.nodes or exchange.rank != context.rank:
            raise ValueError(f"rank {context.rank} of {context.nodes} cannot use the exchange of another place")
        self.context = context
        self.recorder = recorder
        self.disagreements = 0
        """Layers in which the routers of nodes disagreed, since the epoch began."""
        self._trading = Trading(exchange)
        self._router = Router(context)
        self._layers = context.placement.layers
        self._next = 0
        self._number = 0
        self._over = False
        self._aborted = False
        self._lost: PeerLost | None = None
        self._problem: BaseException | None = None
        self._recent: deque[int] = deque(maxlen=MANY_DISAGREEMENTS)

    @property
    def waits(self) -> Waits:
        """What this node's thread waits for of others; from any thread."""
        return self._trading.waits

    # --- passes -----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A pass of the model begins. An :meth:`abort` that came before it is forgotten."""
        self._next = 0
        self._over = False
        self._aborted = False

    def abort(self) -> None:
        """On the head, from any thread: end the pass at its next layer, on all nodes."""
        self._aborted = True

    def give_up(self, reason: str = "") -> bool:
        """The pass ended here, outside a layer: tell the others, who wait in the next one or will come to it.

        On the head they raise Interrupted then; elsewhere they raise NodeFailed with ``reason``. Returns False if there
        was nobody to tell: all layers of the pass were through, so that the others have finished or will finish it.
        True also if they know already. Raises PeerLost.
        """
        if self._over:
            return True
        if self._lost is not None:
            raise self._lost
        if self._next >= len(self._layers):
            return False
        self._leave(self._layers[self._next], GAVE_UP if self.context.is_head else FAILED, reason)
        return True

    # --- a layer ----------------------------------------------------------------------------------------------------

    def run(
        self,
        layer: int,
        indices: Indices,
        weights: NDArray[np.float32],
        local: Local,
        width: int,
        word: np.dtype[Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """See :class:`engine.moe.expert_parallel.LayerExchange`. Raises NodeFailed if another node cannot go on."""
        self._enter(layer)
        if self._aborted and self.context.is_head:
            self._leave(layer, GAVE_UP)
            raise Interrupted
        self._problem = None
        routes = self._router.share(layer, indices, with_extra=True)
        found = self._together(layer, routes, indices, weights, local, width, word, meanwhile)
        if found is None:
            indices, weights = self._mended_routes(layer, indices, weights)
            routes = self._router.share(layer, indices, with_extra=False)
            found = self._together(layer, routes, indices, weights, local, width, word, None)
            if found is None:
                raise self._refused(f"the routes of layer {layer} differ although they came from one node")
        if self._problem is not None:
            raise self._problem
        return found

    def _enter(self, layer: int) -> None:
        if self._lost is not None:
            raise self._lost
        if layer == self._layers[0] and (self._over or self._next >= len(self._layers)):
            self._next = 0
            self._over = False
        if self._over or self._next >= len(self._layers) or layer != self._layers[self._next]:
            raise ValueError(f"layer {layer} is out of turn; layers {self._layers} run in this order")

    def _together(
        self,
        layer: int,
        routes: SharedRoutes,
        indices: Indices,
        weights: NDArray[np.float32],
        local: Local,
        width: int,
        word: np.dtype[Any],
        meanwhile: Callable[[], None] | None,
    ) -> Gathered | None:
        """One exchange of a layer's results; None if the routes are not the same on all nodes."""
        exact = self.context.mode == "exact"
        try:
            mine = local(routes.mine, weights, routes.extra) if routes.runs_any else None
        except BaseException as error:
            self._leave(layer, GAVE_UP if self.context.is_head else FAILED, _reason(error))
            raise
        own = routes.rows[self.context.rank]
        header = self._header(layer, 0, routes.hash)
        parts: list[Buffer] = [header]
        if mine is not None and len(own):
            parts.append(_bytes_of(mine.take(own, axis=0) if exact else mine))
        tokens = indices.shape[0]
        rows = indices.size if exact else tokens
        received = self._trade(layer, parts, rows * width * word.itemsize, tokens, meanwhile)
        if not self._agreed(layer, header, received):
            return None
        self._next += 1
        if exact:
            outputs = _writable(mine, rows, width, word)
            for rank, view in enumerate(received):
                if rank != self.context.rank and len(routes.rows[rank]):
                    outputs[routes.rows[rank]] = self._rows(rank, view, len(routes.rows[rank]), width, word)
            return Gathered(indices, weights, outputs=outputs)
        sums = tuple(
            self._rows(rank, view, tokens, width, word).copy()
            for rank, view in enumerate(received)
            if len(routes.rows[rank])
        )
        return Gathered(indices, weights, sums=sums)

    def _mended_routes(
        self, layer: int, indices: Indices, weights: NDArray[np.float32]
    ) -> tuple[Indices, NDArray[np.float32]]:
        """The head's routes, which it sends to all others."""
        self._note_disagreement(layer)
        parts: list[Buffer] = [self._header(layer, 0, bytes(8))]
        if self.context.is_head and indices.size:
            parts += [_bytes_of(np.ascontiguousarray(indices, np.int32)), _bytes_of(np.asarray(weights, np.float32))]
        header = bytes(parts[0])
        received = self._trade(layer, parts, indices.size * 8, len(indices), None)
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
        return taken, shares

    def _note_disagreement(self, layer: int) -> None:
        self.disagreements += 1
        self._recent.append(self._number)
        if self.recorder is None:
            return
        if self.disagreements == 1:
            self.recorder.notice(
                f"The nodes chose different experts in layer {layer}; the layer was run again with the head's choice."
            )
        elif len(self._recent) == MANY_DISAGREEMENTS and self._recent[0] + FEW_LAYERS > self._number:
            self._recent.clear()
            self.recorder.notice(
                f"The nodes chose different experts in {self.disagreements} layers so far, each of which was run "
                "twice: their chips or versions compute differently; mode central avoids it."
            )

    # --- the exchange -----------------------------------------------------------------------------------------------

    def _header(self, layer: int, flags: int, routes: bytes) -> bytes:
        return HEADER.pack(self._number & 0xFFFFFFFF, layer, flags, routes)

    def _trade(
        self, layer: int, parts: Sequence[Buffer], payload: int, tokens: int, meanwhile: Callable[[], None] | None
    ) -> list[memoryview]:
        """One exchange of at most ``payload`` bytes beside the header. What ``meanwhile`` raises is kept until the
        layer is over, so that this node stays in step."""
        capacity = HEADER.size + max(payload, REASON_BYTES)
        try:
            received, problem = self._trading.trade(parts, capacity, layer, tokens, self.recorder, meanwhile)
        except PeerLost as lost:
            self._lost = lost
            raise
        finally:
            self._number += 1
        if problem is not None:
            self._problem = problem
        return received

    def _agreed(self, layer: int, header: bytes, received: list[memoryview]) -> bool:
        """Whether all nodes sent ``header``. Raises what those who sent another one have to say."""
        same = True
        for rank, view in enumerate(received):
            if view[: HEADER.size] != header:
                same = False
                self._check(rank, view, layer, header)
        return same

    def _check(self, rank: int, view: memoryview, layer: int, header: bytes) -> None:
        """Raises for what contribution ``view`` says, unless only its routes are others."""
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
        """Take part in an exchange only to say that the pass ends here."""
        parts: list[Buffer] = [self._header(layer, flag, bytes(8))]
        if flag == FAILED:
            parts.append(reason.encode()[:REASON_BYTES])
        self._over = True
        try:
            self._trading.trade(parts, MOST_BYTES, layer, 1)
        except PeerLost as lost:
            self._lost = lost
            raise
        finally:
            self._number += 1

    def _refused(self, text: str) -> RingProtocolError:
        """The error to raise; the epoch cannot be used any more."""
        self._lost = PeerLost(f"The ring ended: {text}.")
        return RingProtocolError(f"The ring ended: {text}; start it again.")

    def _rows(self, rank: int, view: memoryview, rows: int, width: int, word: np.dtype[Any]) -> Words:
        """The results in contribution ``view``: a view of it."""
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


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
