"""The ring executor of the mlx runtime: this node's experts in its memory, the others' results by the exchange.

Routes and results cross the border to the host, where the exchange is: the GPU is waited for twice per MoE layer. In
exact mode every node gets all un-weighted results and adds them up with the very expression of the local executor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.moe.expert_parallel import Gathered, Indices, LayerExchange, NeedsHidden, Words
from engine.moe.popularity import Popularity
from engine.moe.rank_context import RankContext
from engine.planning.placement import Placement
from engine.runtimes.mlx.experts import weighted_sum
from engine.runtimes.mlx.spans import Spans

Array = Any

SORTED_FROM = 64
"""From so many routes on mlx-lm's experts sort them, which may choose another kernel."""
_WORDS: dict[Any, np.dtype[Any]] = {
    mx.float32: np.dtype(np.float32),
    mx.bfloat16: np.dtype(np.uint16),
    mx.float16: np.dtype(np.uint16),
}


class RingExecutor:
    """See :class:`engine.runtimes.mlx.experts.Executor`. One thread at a time.

    ``experts[layer]`` is a ``SwitchGLU`` of the experts that ``context`` holds of that layer, ascending; a layer of
    which it holds none is absent. Without an ``exchange`` there are only :meth:`results`.
    """

    def __init__(
        self,
        experts: Mapping[int, Any],
        context: RankContext,
        exchange: LayerExchange | None,
        device: str,
        spans: Spans,
    ) -> None:
        placement = context.placement
        self._experts = dict(experts)
        self._slots = {layer: slots_of(placement, context.rank, layer) for layer in placement.layers}
        self._exchange = exchange
        self._mode = context.mode
        self._spans = spans
        self._popularity = Popularity(placement.layers, placement.experts)
        self._dtypes: dict[Any, Any] = {}
        self.alone = exchange is None
        """Run only the routes to this node's experts and exchange nothing: what comes out is of no use."""
        self.check: Callable[[], None] | None = None
        """If set, called before each layer; may end the pass."""
        self.description = f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}; local (mlx, {device}))"

    @property
    def popularity(self) -> Popularity:
        """Of all routes, whoever ran them."""
        return self._popularity

    def run(self, layer: int, hidden: Array, indices: Array, weights: Array, beside: Array | None) -> Array:
        """See :class:`engine.runtimes.mlx.experts.Executor`. Raises what the exchange raises, PeerLost above all.

        ``beside`` is evaluated while the wire is busy.
        """
        if self.check is not None:
            self.check()
        recorder = self._spans.recorder
        before = recorder.measured(layer)
        out = self._run(layer, hidden, indices, weights, beside)
        self._spans.inside += recorder.measured(layer) - before
        return out

    def _run(self, layer: int, hidden: Array, indices: Array, weights: Array, beside: Array | None) -> Array:
        rows = hidden.reshape(-1, hidden.shape[-1])
        # All that crosses the border is converted first, so that the GPU is waited for once here, and once for results.
        routes, scales = indices.astype(mx.int32), weights.astype(mx.float32)
        needs_hidden = not self.alone and isinstance(self._exchange, NeedsHidden)
        floats = rows.astype(mx.float32) if needs_hidden else rows
        mx.eval(rows, routes, scales, floats)
        chosen = np.array(routes).reshape(-1, indices.shape[-1])
        shares = np.array(scales).reshape(chosen.shape)
        dtype = self._result_dtype(hidden.dtype)

        def local(indices: Indices, weights: NDArray[np.float32], extra: tuple[int, ...]) -> Words:
            words: Words = self._timed(layer, lambda: self._local(layer, rows, indices, weights, extra, dtype))
            return words

        def meanwhile() -> None:
            mx.async_eval(beside)  # type: ignore[no-untyped-call]

        width, travels = int(rows.shape[1]), dtype if self._mode == "exact" else mx.float32
        if self.alone or self._exchange is None:
            held = np.where(self._slots[layer][chosen] >= 0, chosen, np.int32(-1))
            gathered = Gathered(
                chosen, shares, outputs=_to_words(self.results(layer, rows, held, dtype).astype(travels))
            )
        else:
            if isinstance(self._exchange, NeedsHidden):
                self._exchange.hidden(np.array(floats), False)
            work = None if beside is None else meanwhile
            gathered = self._exchange.run(layer, chosen, shares, local, width, _WORDS[travels], work)
            self._count(layer, gathered.indices)
        if gathered.weights is not shares:
            weights = mx.array(gathered.weights).astype(weights.dtype).reshape(weights.shape)
        out: Array = self._timed(layer, lambda: _combined(gathered, travels, dtype, weights))
        return out.reshape(hidden.shape)

    def _timed(self, layer: int, work: Callable[[], Any]) -> Any:
        """``work()``; while somebody looks, evaluated and timed as the layer's experts."""
        if not self._spans.active:
            return work()
        began = self._spans.clock()
        result = work()
        if isinstance(result, mx.array):
            mx.eval(result)
        self._spans.recorder.add(layer, "experts", self._spans.clock() - began)
        return result

    def _local(
        self,
        layer: int,
        rows: Array,
        indices: Indices,
        weights: NDArray[np.float32],
        extra: tuple[int, ...],
        dtype: Any,
    ) -> Words:
        """See :class:`engine.moe.expert_parallel.Local`."""
        results = self.results(layer, rows, indices, dtype, extra)
        if self._mode != "fast":
            return _to_words(results if self._mode == "exact" else results.astype(mx.float32))
        tokens, k = indices.shape
        shares = mx.array(np.where(indices >= 0, weights, np.float32(0)))
        return _to_words(weighted_sum(results.reshape(tokens, k, -1).astype(mx.float32), shares))

    def results(self, layer: int, rows: Array, indices: Indices, dtype: Any, extra: tuple[int, ...] = ()) -> Array:
        """The results [tokens * k, width] of the routes that are not -1; zeros elsewhere."""
        chosen = indices.reshape(-1)
        routes = np.flatnonzero(chosen >= 0)
        slots = self._slots[layer]
        wanted = [slots[chosen[routes]], slots[list(extra)]]
        tokens = [routes // indices.shape[1], np.zeros(len(extra), np.intp)]
        out = mx.zeros((len(chosen), rows.shape[1]), dtype)
        number = len(routes) + len(extra)
        if not number:
            return out
        if len(chosen) >= SORTED_FROM > number:
            # One machine would have sorted these routes.
            wanted.append(np.full(SORTED_FROM - number, wanted[0][0] if len(routes) else wanted[1][0], np.int32))
            tokens.append(np.zeros(SORTED_FROM - number, np.intp))
        given = rows[mx.array(np.concatenate(tokens).astype(np.int32))]
        found = self._experts[layer](given, mx.array(np.concatenate(wanted).astype(np.int32))[:, None])[:, 0]
        if len(routes):
            out[mx.array(routes.astype(np.int32))] = found[: len(routes)]
        else:
            # Nobody asks for it: it is run so that the experts' memory stays wired.
            mx.async_eval(found)  # type: ignore[no-untyped-call]
        return out

    def close(self) -> None:
        """Drop the experts."""
        self._experts.clear()

    @property
    def computes_in(self) -> Any:
        """The dtype of the experts, or of what scales them where they are quantised."""
        for experts in self._experts.values():
            linear = experts.down_proj
            scales = linear.get("scales")
            kept = linear["weight"].dtype if scales is None else scales.dtype
            return kept if kept in _WORDS else mx.float32
        return mx.float32

    def _result_dtype(self, hidden: Any) -> Any:
        """What an expert makes of hidden states of that type: the same on all nodes that hold any."""
        found = self._dtypes.get(hidden)
        if found is None:
            found = hidden
            for experts in self._experts.values():
                scales = experts.down_proj.get("scales")
                kept = experts.down_proj["weight"].dtype if scales is None else scales.dtype
                if kept in _WORDS:
                    found = mx.result_type(mx.zeros(1, hidden), mx.zeros(1, kept))
                break
            self._dtypes[hidden] = found
        return found

    def _count(self, layer: int, indices: Indices) -> None:
        for expert, count in zip(*np.unique(indices, return_counts=True), strict=True):
            self._popularity.add(layer, int(expert), int(count))


def slots_of(placement: Placement, rank: int, layer: int) -> NDArray[np.int32]:
    """Per expert, its place among those of ``layer`` that ``rank`` holds; -1 for the others."""
    slots = np.full(placement.experts, -1, np.int32)
    held = list(placement.held(rank, layer))
    slots[held] = np.arange(len(held))
    return slots


def _combined(gathered: Gathered, travels: Any, dtype: Any, weights: Array) -> Array:
    """The weighted sum [..., width] in ``dtype``; ``weights`` [..., k]."""
    if gathered.outputs is None:
        total = mx.array(gathered.sums[0])
        for other in gathered.sums[1:]:
            total = total + mx.array(other)
        return total.astype(dtype)
    outputs = _from_words(gathered.outputs, travels).astype(dtype)
    return weighted_sum(outputs.reshape(*weights.shape, -1), weights)


def _to_words(array: Array) -> Words:
    words: Words = np.array(array if array.dtype == mx.float32 else array.view(mx.uint16))
    return words


def _from_words(words: Words, dtype: Any) -> Array:
    array = mx.array(words)
    return array if dtype == mx.float32 else array.view(dtype)
