"""Central mode: the head routes and asks each node for its experts' results; two messages per MoE layer.

This mode is for nodes whose results would differ in their last bits: only the head runs a trunk. It sends and receives
float32 rows, whatever the nodes compute in (figures 2 and 3 of the paper of private LLMs on Apple Silicon). The others
keep no state between two layers, so a pass may end anywhere without notifying them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.cluster.assignment import Router, SharedRoutes
from engine.cluster.contributions import (
    FAILED,
    GAVE_UP,
    HEADER,
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
    run_calls,
)
from engine.moe.timing import Recorder
from engine.runtimes.protocol import Interrupted

SHAPE = struct.Struct("<IIIBB2x")
"""Shape of a request: tokens, experts per token, hidden size, whether the weights scale the input, and whether the
tokens are read."""
MOST_TOKENS = 1 << 20
"""Maximum tokens of a layer, unless a node has a lower limit."""
_NOTHING = bytes(8)


class ExpertRunner(Protocol):
    """A node's experts without a trunk."""

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        ...

    def run_experts(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        extra: Sequence[int],
        scale: bool,
        reads: bool,
    ) -> Floats:
        """Unweighted results [tokens * k, width] in the order of the routes. Rows of routes -1 may hold anything.

        ``hidden`` is [tokens, width]; ``indices`` [tokens, k] are -1 for routes of other nodes. ``scale``: the inputs
        are multiplied by ``weights`` [tokens, k] (llama4). ``extra`` experts are run on any token and their results
        dropped. ``reads``: see :class:`engine.moe.expert_parallel.HostRows`.
        """
        ...


class CentralHead:
    """The head's :class:`engine.moe.expert_parallel.LayerExchange` in central mode. Only :meth:`abort` is thread-safe.

    ``one_by_one``: experts are called one after the other, the paper's naive version.
    """

    needs_hidden = True

    def __init__(
        self, context: RankContext, exchange: Exchange, recorder: Recorder | None = None, one_by_one: bool = False
    ) -> None:
        if not context.is_head:
            raise ValueError(f"rank {context.rank} is not the head")
        self.context = context
        self.recorder = recorder
        self._gather = NumberedGather(exchange)
        self._router = Router(context)
        self._one_by_one = one_by_one
        self._aborted = False
        self._layer = 0
        self._routes = Routes(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
        self._shared: SharedRoutes | None = None
        """The assignment of the layer's routes; None if nothing is run."""
        self._mine: Words | None = None
        self._width = self._asked_width = 0

    @property
    def waits(self) -> Waits:
        """The current wait of the head's thread. Thread-safe."""
        return self._gather.waits

    def begin_pass(self) -> None:
        """Begin a pass. An earlier :meth:`abort` is discarded."""
        self._aborted = False

    def abort(self) -> None:
        """End the pass at its next layer. Thread-safe."""
        self._aborted = True

    def give_up(self, reason: str = "") -> bool:
        """Return True: no other node is in the pass. Raises PeerLost."""
        self._gather.check()
        return True

    def assign(
        self, layer: int, routes: Routes, hidden: HostRows | None = None, mended: bool = False
    ) -> Sequence[Call]:
        """See :class:`engine.moe.expert_parallel.LayerExchange`; the other nodes are asked for their results."""
        self._gather.check()
        if self._aborted:
            raise Interrupted
        if hidden is None:
            raise ValueError("central mode must be given the hidden states of each layer")
        self._layer, self._routes, self._shared = layer, routes, None
        if not routes.indices.size:
            return ()
        shared = self._router.share(layer, routes.indices, with_extra=True)
        self._ask(layer, routes, hidden)
        self._shared = shared
        return shared.calls(self._one_by_one)

    def send(self, mine: Words | None, width: int, word: np.dtype[Any]) -> None:
        """See :class:`engine.moe.expert_parallel.LayerExchange`; ``word`` must be float32."""
        if word != FLOAT32:
            raise ValueError("central mode exchanges float32 rows")
        self._mine, self._width = mine, width
        if self._shared is not None:
            self._begin_answers(self._shared, 0, width)

    def receive(self) -> Gathered | Routes:
        """See :class:`engine.moe.expert_parallel.LayerExchange`. Raises NodeFailed if a node cannot go on."""
        mine, routes, shared, width = self._mine, self._routes, self._shared, self._width
        self._mine = None
        if shared is None:
            return Gathered(routes.indices, routes.weights, outputs=np.empty((0, width), np.float32))
        received = self._gather.receive(self.recorder)
        outputs = np.empty((routes.indices.size, width), np.float32) if mine is None else mine
        outputs = outputs if outputs.flags.writeable else outputs.copy()
        for rank, view in enumerate(received):
            if rank != HEAD:
                rows = shared.rows[rank]
                outputs[rows] = self._results(self._layer, rank, view, len(rows), width)
        return Gathered(routes.indices, routes.weights, outputs=outputs)

    def leave(self, error: BaseException) -> None:
        """See :class:`engine.moe.expert_parallel.LayerExchange`: the other nodes' results are taken and dropped."""
        assert self._shared is not None, "no experts were called"
        self._begin_answers(self._shared, GAVE_UP, self._asked_width)
        self._gather.receive(self.recorder)

    def _ask(self, layer: int, routes: Routes, hidden: HostRows) -> None:
        """The first message: the routes and the hidden states."""
        rows, scale = np.ascontiguousarray(hidden.rows, np.float32), hidden.scale_input
        shape = SHAPE.pack(*routes.indices.shape, rows.shape[1], scale, hidden.reads)
        parts: list[Buffer] = [
            self._gather.header(layer) + shape,
            _bytes_of(np.ascontiguousarray(routes.indices, np.int32)),
        ]
        if scale:
            parts.append(_bytes_of(np.ascontiguousarray(routes.weights, np.float32)))
        self._asked_width = int(rows.shape[1])
        # The others contribute only a header.
        self._send([*parts, _bytes_of(rows)], HEADER.size)
        self._gather.receive(self.recorder)

    def _begin_answers(self, shared: SharedRoutes, flags: int, width: int) -> None:
        """Begin the second message, in which the others contribute their results."""
        self._send([self._gather.header(self._layer, flags)], most_results(shared, width))

    def _send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._gather.send(parts, capacity, self._layer, len(self._routes.indices), self.recorder)

    def _results(self, layer: int, rank: int, view: memoryview, rows: int, width: int) -> Floats:
        flags = check_header(view, rank, self._gather.number - 1)
        if flags & FAILED:
            raise NodeFailed(reason_in(view), [rank])
        expected = HEADER.size + rows * width * 4
        if flags or len(view) != expected:
            self._gather.lost = PeerLost(f"The ring ended: node {rank} sent what it must not send.", [rank])
            raise RingProtocolError(
                f"The ring ended: node {rank} sent {len(view)} bytes for layer {layer} where {expected} were expected; "
                "start it again."
            )
        return np.frombuffer(view, np.float32, rows * width, HEADER.size).reshape(rows, width)


class CentralNode:
    """A node that runs experts for the head in central mode; see :class:`CentralHead`.

    ``ran`` is called with the tokens of every layer. ``around`` returns the context in which a layer is answered. A
    layer has at most ``most_tokens`` tokens.
    """

    def __init__(
        self,
        context: RankContext,
        exchange: Exchange,
        runner: ExpertRunner,
        ran: Callable[[int], None] = lambda tokens: None,
        one_by_one: bool = False,
        around: Callable[[int], AbstractContextManager[None]] = lambda layer: nullcontext(),
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self._context = context
        self._most_tokens = most_tokens
        self._exchange = exchange
        self._around = around
        self._runner = runner
        self._router = Router(context)
        self._ran = ran
        self._one_by_one = one_by_one
        self._number = 0

    def serve(self) -> None:
        """Answer the head until the epoch ends, which raises PeerLost. Raises as :meth:`serve_layer`."""
        while True:
            self.serve_layer()

    def serve_layer(self) -> None:
        """Answer the head's next request.

        Raises PeerLost, RingProtocolError, and what the experts raised, of which the head is notified.
        """
        width = self._runner.width
        most = HEADER.size + SHAPE.size + self._most_tokens * (8 * self._context.placement.experts + 4 * width)
        asked = self._trade([HEADER.pack(self._number & 0xFFFFFFFF, 0, 0, _NOTHING)], most)
        problem: BaseException | None = None
        # The other nodes' results arrive here, too, or their reasons for refusing an invalid request.
        others = HEADER.size + REASON_BYTES
        try:
            layer, hidden, asked_routes = self._parsed(asked)
            routes = self._router.share(layer, asked_routes.indices, with_extra=True)
            others = most_results(routes, width)
            with self._around(layer):
                parts = self._results(layer, routes, hidden, asked_routes)
        except BaseException as error:
            problem = error
            text = (str(error) or type(error).__name__).encode()[:REASON_BYTES]
            parts = [HEADER.pack(self._number & 0xFFFFFFFF, 0, FAILED, _NOTHING), text]
        self._trade(parts, others)
        if problem is not None:
            raise problem

    def _trade(self, parts: Sequence[Buffer], capacity: int) -> memoryview:
        """Run one exchange. Returns the head's contribution."""
        self._exchange.send(parts, capacity)
        self._number += 1
        return self._exchange.receive()[HEAD]

    def _results(
        self,
        layer: int,
        routes: SharedRoutes,
        hidden: HostRows,
        asked: Routes,
    ) -> list[Buffer]:
        """The contribution with the results of this node's routes, float32, in the order of the routes."""
        header = HEADER.pack(self._number & 0xFFFFFFFF, layer, 0, _NOTHING)
        self._ran(len(asked.indices))

        def run(mine: Indices, extra: tuple[int, ...]) -> Floats:
            return self._runner.run_experts(
                layer, hidden.rows, mine, asked.weights, extra, hidden.scale_input, hidden.reads
            )

        results = run_calls(routes.calls(self._one_by_one), run)
        own = routes.rows[self._context.rank]
        if results is None or not len(own):
            return [header]
        return [header, _bytes_of(np.ascontiguousarray(results.take(own, axis=0), np.float32))]

    def _parsed(self, asked: memoryview) -> tuple[int, HostRows, Routes]:
        """The layer, hidden states and routes, with weights of one where they are not needed. Raises
        RingProtocolError."""
        check_header(asked, HEAD, self._number - 1)
        layer = int(HEADER.unpack_from(asked)[1])
        if layer not in self._context.placement.layers:
            raise RingProtocolError(f"the head asked for layer {layer}, which has no experts")
        at = HEADER.size + SHAPE.size
        if len(asked) < at:
            raise RingProtocolError(f"the head sent {len(asked)} bytes, too few for routes")
        tokens, k, width, scale, reads = SHAPE.unpack_from(asked, HEADER.size)
        count, experts = tokens * k, self._context.placement.experts
        expected = at + count * 4 * (2 if scale else 1) + tokens * width * 4
        if (
            not 0 < tokens <= self._most_tokens
            or not 0 < k <= experts
            or width != self._runner.width
            or max(scale, reads) > 1
        ):
            raise RingProtocolError(f"the head sent routes [{tokens}, {k}] of {width} numbers, which this model lacks")
        if len(asked) != expected:
            raise RingProtocolError(f"the head sent {len(asked)} bytes where {expected} were expected")
        indices = np.frombuffer(asked, np.int32, count, at).reshape(tokens, k)
        if indices.min() < 0 or indices.max() >= experts:
            raise RingProtocolError(f"the head sent routes to experts that are none of {experts}")
        at += count * 4
        weights = np.ones((tokens, k), np.float32)
        if scale:
            weights = np.frombuffer(asked, np.float32, count, at).reshape(tokens, k).copy()
            at += count * 4
        hidden = np.frombuffer(asked, np.float32, tokens * width, at).reshape(tokens, width).copy()
        return layer, HostRows(hidden, bool(scale), bool(reads)), Routes(indices, weights)


def most_results(routes: SharedRoutes, width: int) -> int:
    """Maximum bytes of a contribution with the results of a layer's routes, or with a reason for a failure."""
    return HEADER.size + max(REASON_BYTES, 4 * width * max(map(len, routes.rows)))


def check_header(view: memoryview, rank: int, number: int) -> int:
    """The flags of a contribution to exchange ``number``. Raises RingProtocolError."""
    if len(view) < HEADER.size:
        raise RingProtocolError(f"node {rank} sent {len(view)} bytes, less than a header")
    found, _, flags, _ = HEADER.unpack_from(view)
    if found != number & 0xFFFFFFFF:
        raise RingProtocolError(f"node {rank} is at exchange {found} of the epoch, this node at {number}")
    return int(flags)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B")
