"""A forward pass whose routed experts are run by a ring: cut at every MoE layer, joined by the exchange."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.moe.expert_parallel import Gathered, Indices, NeedsHidden, Words
from engine.moe.popularity import Popularity
from engine.runtimes.native.bindings import MEANING, PARTS, Cut, Pass, native
from engine.runtimes.native.experts_only import HeldExperts
from engine.runtimes.protocol import RingPlace

WORD = np.dtype(np.float32)
"""Results travel as the kernels add them up."""

KEPT_ROWS = 1024
"""So many rows of results are kept for the next layer; the buffer of a long prefill is not."""

_EXPERTS = PARTS.index("experts")

Floats = NDArray[np.float32]


class RingTrunk:
    """Runs passes of a trunk whose routed experts are in a ring. One thread at a time."""

    def __init__(self, place: RingPlace, experts: HeldExperts, top_k: int, width: int, popularity: Popularity) -> None:
        """``experts`` are those this node runs, ``top_k`` the routes of a token, ``width`` the numbers of its hidden
        state. ``popularity`` counts the routes of all nodes."""
        self._exchange = place.exchange
        self._wants_hidden = place.exchange if isinstance(place.exchange, NeedsHidden) else None
        self._fast = place.context.mode == "fast"
        self.logits = place.logits
        """Whether the passes compute logits that are asked for; else only what leads to them."""
        self._experts = experts
        self._top_k = top_k
        self._width = width
        self._counts = {layer: popularity.address(layer) for layer in experts.layers}
        self._native = native()
        self._cut = Cut()
        self._seconds: NDArray[np.float64] | None = None
        self._shared: Callable[[], int] | None = None
        self._indices: Indices = np.empty((0, top_k), np.int32)
        self._weights: Floats = np.empty((0, top_k), np.float32)
        self._out: Floats = np.empty((0, width), np.float32)
        self._out_address = 0

    def run(
        self,
        pool: int,
        trunk: int,
        call: Pass,
        shared: Container[int],
        seconds: NDArray[np.float64] | None,
        check: Callable[[], None] | None,
        begins: bool,
    ) -> None:
        """One pass of the ``trunk`` at that address on the ``pool`` at that one, with the logits if they are wanted.

        Without :attr:`logits` it ends after the last layer, if that has experts.

        ``shared`` are the layers with a shared expert. Seconds of the experts are added to ``seconds`` [layers, parts],
        unless it is None. ``check`` may raise to end the pass; it is asked where the other nodes can be told: between
        the exchanges, and before the first if the operation ``begins`` with this pass.
        Raises ModelError, and what the exchange raises.
        """
        self._seconds = seconds
        self._shared = None  # a pass that was ended may have left one
        address, cut, layers = ctypes.addressof(call), self._cut, int(call.last_layer)
        expected, done, first = self._experts.layers, 0, 0
        while True:
            call.first_layer, call.last_layer = first, layers
            if check is not None and (done > 0 or begins) and done < len(expected):
                check()
                call.last_layer = min(first + 1, layers)
            _checked(self._native.pllm_trunk_to_routes(pool, trunk, address, ctypes.addressof(cut)))
            if cut.layer < 0:
                first = int(call.last_layer)
                if first == layers:
                    break
                continue
            layer = int(cut.layer)
            if layer in shared:
                self._shared = partial(self._native.pllm_trunk_shared, pool, trunk, address, layer)
            self._one_layer(layer, int(cut.rows))
            done, first = done + 1, layer + 1
            if first == layers and not self.logits:
                break
        for layer in expected[done:]:
            # Nothing of it is wanted, here as on all nodes; they stay in step.
            self._exchanged(layer, 0)
        if len(self._out) > KEPT_ROWS:
            self._make_room(0)

    def _one_layer(self, layer: int, rows: int) -> None:
        """What comes between a layer's routes and the next layer: its experts' sum, where the trunk goes on from."""
        found = self._exchanged(layer, rows)
        self._run_shared()
        begun = time.perf_counter()
        self._count(layer, found.indices)
        if found.outputs is not None:
            self._sum_up(found.outputs, found.weights, rows)
        else:
            self._add_up(found.sums, rows)
        self._took(layer, begun)

    def _exchanged(self, layer: int, rows: int) -> Gathered:
        self._layer = layer
        self._indices, self._weights = self._routes(rows)
        if self._wants_hidden is not None:
            numbers = ctypes.string_at(self._cut.hidden, rows * self._width * 4) if rows else b""
            self._wants_hidden.hidden(np.frombuffer(numbers, np.float32).reshape(rows, self._width), False)
        meanwhile = None if self._shared is None else self._run_shared
        return self._exchange.run(layer, self._indices, self._weights, self._local, self._width, WORD, meanwhile)

    def _run_shared(self) -> None:
        """The shared expert of the layer, unless there is none or it was run."""
        shared, self._shared = self._shared, None
        if shared is not None:
            _checked(shared())

    def _routes(self, rows: int) -> tuple[Indices, Floats]:
        """Copies of the routes of the layer the pass was cut at: indices and weights [rows, k]."""
        shape, nbytes = (rows, self._top_k), rows * self._top_k * 4
        if not rows:
            return np.empty(shape, np.int32), np.empty(shape, np.float32)
        indices = np.frombuffer(ctypes.string_at(self._cut.indices, nbytes), np.int32).reshape(shape)
        weights = np.frombuffer(ctypes.string_at(self._cut.weights, nbytes), np.float32).reshape(shape)
        return indices, weights

    def _local(self, indices: Indices, weights: Floats, extra: tuple[int, ...]) -> Floats:
        """See :class:`engine.moe.expert_parallel.Local`. What is returned is void when this is called again."""
        begun = time.perf_counter()
        if not len(indices):
            return np.empty((0, self._width), np.float32)
        rows = len(indices) if self._fast else indices.size
        if len(self._out) != rows:
            self._make_room(rows)
        shares = self._cut.weights if weights is self._weights else _address(weights, np.float32)
        self._experts.run(
            self._layer, self._cut.hidden, indices, shares, extra,
            outputs_to=0 if self._fast else self._out_address, sum_to=self._out_address if self._fast else 0,
        )  # fmt: skip
        self._took(self._layer, begun)
        return self._out

    def _make_room(self, rows: int) -> None:
        self._out = np.empty((rows, self._width), np.float32)
        self._out_address = int(self._out.ctypes.data)

    def _sum_up(self, outputs: Words, weights: Floats, rows: int) -> None:
        """The weighted sum of every route's result [rows * k, width]."""
        if outputs.shape != (rows * self._top_k, self._width) or weights.shape != (rows, self._top_k):
            raise ModelError(f"The exchange gave results {outputs.shape} for {rows} tokens.", kind="internal")
        results = self._out_address if outputs is self._out else _address(outputs, np.float32)
        shares = self._cut.weights if weights is self._weights else _address(weights, np.float32)
        self._experts.weighted_sum(results, shares, rows, self._top_k, self._width, self._cut.sum)

    def _add_up(self, sums: Sequence[Words], rows: int) -> None:
        """The nodes' weighted sums [rows, width], in their order."""
        words = memoryview((ctypes.c_float * (rows * self._width)).from_address(self._cut.sum))
        total = np.frombuffer(words, np.float32).reshape(rows, self._width)
        total[:] = sums[0] if sums else 0
        for part in sums[1:]:
            total += part

    def _count(self, layer: int, indices: Indices) -> None:
        routes = self._cut.indices if indices is self._indices else _address(indices, np.int32)
        count, to = self._experts.count, self._counts[layer]
        _checked(self._native.pllm_count_routes(routes, indices.size, count, to))

    def _took(self, layer: int, begun: float) -> None:
        if self._seconds is not None:
            self._seconds[layer, _EXPERTS] += time.perf_counter() - begun


def _address(array: NDArray[Any], kind: type[np.float32] | type[np.int32]) -> int:
    """Where the numbers of ``array`` lie. Raises ModelError if they are not of that kind, one after the other."""
    if array.dtype != kind or not array.flags.c_contiguous:
        raise ModelError(f"An exchange hands out {array.dtype} where {np.dtype(kind)} is expected.", kind="internal")
    return int(array.ctypes.data)


def _checked(code: int) -> None:
    if code:
        raise ModelError(f"The native trunk could not run: {MEANING.get(code, code)}.", kind="internal")
