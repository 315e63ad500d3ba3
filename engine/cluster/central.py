"""Central mode: the head routes and asks each node for its experts' results; two messages per MoE layer.

For nodes whose bits would differ: only the head runs a trunk, and what it sends and gets are float32 rows whatever the
nodes compute in (figures 2 and 3 of the paper of private LLMs on Apple Silicon). The others keep no state between two
layers, so a pass may end anywhere without telling them.
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
    Trading,
    reason_in,
)
from engine.cluster.transport.exchange import Buffer, Exchange, PeerLost, RingProtocolError
from engine.cluster.waiting import Waits
from engine.moe.expert_parallel import Gathered, Indices, Local, Words
from engine.moe.rank_context import HEAD, RankContext
from engine.moe.timing import Recorder
from engine.runtimes.protocol import Interrupted

SHAPE = struct.Struct("<IIIB3x")
"""Tokens, experts per token, numbers of a hidden state, whether the input is scaled by the weights."""
MOST_TOKENS = 1 << 20
"""Of a layer, unless a node is told that there will be fewer."""
_F32 = np.dtype(np.float32)
_NOTHING = bytes(8)

Floats = NDArray[np.float32]


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
    ) -> Floats:
        """Un-weighted results [tokens * k, width] in the order of the routes; what rows of -1 hold does not matter.

        ``hidden`` [tokens, width]; ``indices`` [tokens, k], -1 for routes of other nodes; ``scale``: the inputs are
        multiplied by ``weights`` [tokens, k] (llama4). ``extra`` experts are run on any token, for nothing.
        """
        ...


class CentralHead:
    """The head's :class:`engine.moe.expert_parallel.LayerExchange` in central mode. One thread, but for :meth:`abort`.

    The runtime gives the hidden states by :meth:`hidden` before each :meth:`run`. ``one_by_one``: experts are called
    one after the other, the paper's naive version.
    """

    def __init__(
        self, context: RankContext, exchange: Exchange, recorder: Recorder | None = None, one_by_one: bool = False
    ) -> None:
        if not context.is_head:
            raise ValueError(f"rank {context.rank} is not the head")
        self.context = context
        self.recorder = recorder
        self._trading = Trading(exchange)
        self._router = Router(context)
        self._one_by_one = one_by_one
        self._number = 0
        self._hidden: tuple[Floats, bool] | None = None
        self._aborted = False
        self._lost: PeerLost | None = None

    @property
    def waits(self) -> Waits:
        """What the head's thread waits for of others; from any thread."""
        return self._trading.waits

    def begin_pass(self) -> None:
        """A pass begins. An :meth:`abort` that came before it is forgotten."""
        self._aborted = False

    def abort(self) -> None:
        """From any thread: end the pass at its next layer."""
        self._aborted = True

    def give_up(self, reason: str = "") -> bool:
        """The pass ended: nobody else is in it. Raises PeerLost."""
        if self._lost is not None:
            raise self._lost
        return True

    def hidden(self, rows: Floats, scale_input: bool) -> None:
        """What the experts of the next :meth:`run` get, [tokens, width]; ``scale_input``: multiplied by the weights."""
        self._hidden = (np.ascontiguousarray(rows, np.float32), scale_input)

    def run(
        self,
        layer: int,
        indices: Indices,
        weights: Floats,
        local: Local,
        width: int,
        word: np.dtype[Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """See :class:`engine.moe.expert_parallel.LayerExchange`; ``word`` must be float32. Raises NodeFailed if a node
        cannot go on."""
        if self._lost is not None:
            raise self._lost
        if self._aborted:
            raise Interrupted
        given, self._hidden = self._hidden, None
        if given is None or word != _F32:
            raise ValueError(
                "central mode exchanges float32 rows, and must be given the hidden states before each layer"
            )
        if not indices.size:
            return Gathered(indices, weights, outputs=np.empty((0, width), np.float32))
        routes = self._router.share(layer, indices, with_extra=True)
        self._ask(layer, indices, weights, *given)
        try:
            mine = self._own(routes, weights, local) if routes.runs_any else None
        except BaseException:
            self._answers(layer, GAVE_UP, routes, indices, width)
            raise
        received, problem = self._answers(layer, 0, routes, indices, width, meanwhile)
        outputs = mine if mine is not None and mine.flags.writeable else np.empty((indices.size, width), np.float32)
        if mine is not None and outputs is not mine:
            outputs[:] = mine
        for rank, view in enumerate(received):
            if rank != HEAD:
                outputs[routes.rows[rank]] = self._results(layer, rank, view, len(routes.rows[rank]), width)
        if problem is not None:
            raise problem
        return Gathered(indices, weights, outputs=outputs)

    def _ask(self, layer: int, indices: Indices, weights: Floats, rows: Floats, scale: bool) -> None:
        """The first message: the routes and the hidden states."""
        shape = SHAPE.pack(*indices.shape, rows.shape[1], scale)
        parts: list[Buffer] = [self._header(layer, 0) + shape, _bytes_of(np.ascontiguousarray(indices, np.int32))]
        if scale:
            parts.append(_bytes_of(np.ascontiguousarray(weights, np.float32)))
        # The others only say that they are there.
        self._trade(layer, [*parts, _bytes_of(rows)], HEADER.size, len(indices))

    def _answers(
        self,
        layer: int,
        flags: int,
        routes: SharedRoutes,
        indices: Indices,
        width: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[memoryview], BaseException | None]:
        """The second message, in which the others give their results."""
        parts = [self._header(layer, flags)]
        return self._trade(layer, parts, most_results(routes, width), len(indices), meanwhile)

    def _own(self, routes: SharedRoutes, weights: Floats, local: Local) -> Words:
        if not self._one_by_one:
            return local(routes.mine, weights, routes.extra)
        return one_by_one(routes, lambda mine, extra: local(mine, weights, extra))

    def _header(self, layer: int, flags: int) -> bytes:
        return HEADER.pack(self._number & 0xFFFFFFFF, layer, flags, _NOTHING)

    def _trade(
        self,
        layer: int,
        parts: Sequence[Buffer],
        capacity: int,
        tokens: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[memoryview], BaseException | None]:
        try:
            return self._trading.trade(parts, capacity, layer, tokens, self.recorder, meanwhile)
        except PeerLost as lost:
            self._lost = lost
            raise
        finally:
            self._number += 1

    def _results(self, layer: int, rank: int, view: memoryview, rows: int, width: int) -> Floats:
        flags = check_header(view, rank, self._number - 1)
        if flags & FAILED:
            raise NodeFailed(reason_in(view), [rank])
        expected = HEADER.size + rows * width * 4
        if flags or len(view) != expected:
            self._lost = PeerLost(f"The ring ended: node {rank} sent what it must not send.", [rank])
            raise RingProtocolError(
                f"The ring ended: node {rank} sent {len(view)} bytes for layer {layer} where {expected} were expected; "
                "start it again."
            )
        return np.frombuffer(view, np.float32, rows * width, HEADER.size).reshape(rows, width)


class CentralNode:
    """A node that runs experts for the head, in central mode; see :class:`CentralHead`.

    ``ran`` is told the tokens of every layer; ``around`` makes, of a layer's number, what it is answered within.
    A layer has at most ``most_tokens``.
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
        """Answer the head until the epoch ends: that raises PeerLost. Raises as :meth:`serve_layer`."""
        while True:
            self.serve_layer()

    def serve_layer(self) -> None:
        """Answer what the head asks next. Raises PeerLost, RingProtocolError, and what the experts raised, which the
        head is told."""
        width = self._runner.width
        most = HEADER.size + SHAPE.size + self._most_tokens * (8 * self._context.placement.experts + 4 * width)
        asked = self._trade([HEADER.pack(self._number & 0xFFFFFFFF, 0, 0, _NOTHING)], most)
        problem: BaseException | None = None
        # The other nodes' results come here, too; of an ask that makes no sense, they say so.
        others = HEADER.size + REASON_BYTES
        try:
            layer, hidden, indices, weights, scale = self._parsed(asked)
            routes = self._router.share(layer, indices, with_extra=True)
            others = most_results(routes, width)
            with self._around(layer):
                parts = self._results(layer, routes, hidden, indices, weights, scale)
        except BaseException as error:
            problem = error
            text = (str(error) or type(error).__name__).encode()[:REASON_BYTES]
            parts = [HEADER.pack(self._number & 0xFFFFFFFF, 0, FAILED, _NOTHING), text]
        self._trade(parts, others)
        if problem is not None:
            raise problem

    def _trade(self, parts: Sequence[Buffer], capacity: int) -> memoryview:
        """One exchange; what the head contributed."""
        self._exchange.send(parts, capacity)
        self._number += 1
        return self._exchange.receive()[HEAD]

    def _results(
        self,
        layer: int,
        routes: SharedRoutes,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        scale: bool,
    ) -> list[Buffer]:
        """The results of this node's routes, float32, in the order of the routes."""
        header = HEADER.pack(self._number & 0xFFFFFFFF, layer, 0, _NOTHING)
        self._ran(len(indices))
        if not routes.runs_any:
            return [header]

        def run(mine: Indices, extra: tuple[int, ...]) -> Floats:
            return self._runner.run_experts(layer, hidden, mine, weights, extra, scale)

        results = one_by_one(routes, run) if self._one_by_one else run(routes.mine, routes.extra)
        own = routes.rows[self._context.rank]
        if not len(own):
            return [header]
        return [header, _bytes_of(np.ascontiguousarray(results.take(own, axis=0), np.float32))]

    def _parsed(self, asked: memoryview) -> tuple[int, Floats, Indices, Floats, bool]:
        """The layer, hidden states, indices, weights (ones where they are not needed). Raises RingProtocolError."""
        check_header(asked, HEAD, self._number - 1)
        layer = int(HEADER.unpack_from(asked)[1])
        if layer not in self._context.placement.layers:
            raise RingProtocolError(f"the head asked for layer {layer}, which has no experts")
        at = HEADER.size + SHAPE.size
        if len(asked) < at:
            raise RingProtocolError(f"the head sent {len(asked)} bytes, too few for routes")
        tokens, k, width, scale = SHAPE.unpack_from(asked, HEADER.size)
        count, experts = tokens * k, self._context.placement.experts
        expected = at + count * 4 * (2 if scale else 1) + tokens * width * 4
        if not 0 < tokens <= self._most_tokens or not 0 < k <= experts or width != self._runner.width or scale > 1:
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
        return layer, hidden, indices, weights, bool(scale)


def most_results(routes: SharedRoutes, width: int) -> int:
    """Bytes of the largest contribution with the results of a layer's routes, or with the reason why there are none."""
    return HEADER.size + max(REASON_BYTES, 4 * width * max(map(len, routes.rows)))


def one_by_one(routes: SharedRoutes, run: Callable[[Indices, tuple[int, ...]], Words]) -> Words:
    """The results of all of ``routes.mine``, one call of ``run`` per expert: what an unstacked model does."""
    flat = routes.mine.reshape(-1)
    active = [int(expert) for expert in np.unique(flat) if expert >= 0]
    merged: Words | None = None
    for expert in active:
        only = np.where(routes.mine == expert, routes.mine, np.int32(-1))
        found = run(only, ())
        if merged is None:
            merged = np.array(found)
        else:
            rows = np.flatnonzero(flat == expert)
            merged[rows] = found[rows]
    for expert in routes.extra:
        found = run(np.full_like(routes.mine, -1), (expert,))
        merged = np.array(found) if merged is None else merged
    assert merged is not None, "asked for nothing"
    return merged


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
