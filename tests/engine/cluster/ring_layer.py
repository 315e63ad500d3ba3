"""A layer of a ring without a model: the product's executor over experts that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.moe.backend import ExpertBackend, LayerCall
from engine.moe.executor import RingExecutor
from engine.moe.expert_parallel import Floats, Gathered, HostRows, Indices, LayerExchange, RankContext, Routes, Words
from engine.moe.timing import Recorder

F32 = np.dtype(np.float32)
Local = Callable[[Indices, Floats, tuple[int, ...]], Words]


class MadeUpExperts(ExpertBackend[Any]):
    """``local(indices, weights, extra)`` makes results or sums; the sum of a layer is what was gathered."""

    popularity = None
    description = "made up"
    held = 0

    def __init__(self, local: Local, width: int) -> None:
        self._local = local
        self._width = width

    def run(self, layer: int, hidden: Any, indices: Any, weights: Any, scale_input: bool = False) -> Any:
        raise NotImplementedError

    def begin(
        self,
        layer: int,
        hidden: Any,
        indices: Any,
        weights: Any,
        scale_input: bool = False,
        rows_too: bool = False,
    ) -> LayerCall[Any]:
        routes = Routes(indices, weights)
        return LayerCall(layer, hidden, weights, routes, self._width, F32, scale_input, hidden if rows_too else None)

    def begin_on_host(self, layer: int, hidden: HostRows, routes: Routes) -> LayerCall[Any]:
        return self.begin(layer, hidden.rows, routes.indices, routes.weights, hidden.scale_input)

    def results(
        self, call: LayerCall[Any], mine: Indices, weights: Floats, extra: Sequence[int], word: np.dtype[Any]
    ) -> Words:
        return self._local(mine, weights, tuple(extra))

    def sums(self, call: LayerCall[Any], mine: Indices, weights: Floats, extra: Sequence[int]) -> Words:
        return self._local(mine, weights, tuple(extra))

    def joined(self, call: LayerCall[Any], outputs: Words, weights: Floats, word: np.dtype[Any]) -> Any:
        return outputs, weights

    def added(self, call: LayerCall[Any], sums: Sequence[Words]) -> Any:
        return tuple(sums)


class _Noting:
    """``exchange``, of which what it gathered is kept."""

    def __init__(self, exchange: LayerExchange) -> None:
        self.found: Gathered | None = None
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def receive(self) -> Gathered | Routes:
        found = self._exchange.receive()
        self.found = found if isinstance(found, Gathered) else None
        return found


def run_layer(
    layers: Any,
    layer: int,
    routes: tuple[Indices, Floats],
    local: Local,
    width: int,
    hidden: Floats | None = None,
    scale_input: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Gathered:
    """What the nodes make of ``layer`` together, by the product's executor of a ring."""
    context: RankContext = layers.context
    noting: Any = _Noting(layers)
    given = layers.recorder
    recorder = (
        given
        if given is not None
        else Recorder(max(context.placement.layers) + 1, context.placement.layers, context.placement.experts)
    )
    executor = RingExecutor(
        MadeUpExperts(local, width), noting, context, context.placement.layers, context.placement.experts, recorder
    )
    executor.run(layer, hidden, *routes, scale_input=scale_input, meanwhile=meanwhile)
    assert noting.found is not None
    found: Gathered = noting.found
    return found


class Doubling:
    width = 4

    def run_experts(
        self, layer: int, hidden: Any, indices: Any, weights: Any, extra: Any, scale: bool, reads: bool
    ) -> Any:
        return hidden.repeat(indices.shape[1], axis=0) * 2
