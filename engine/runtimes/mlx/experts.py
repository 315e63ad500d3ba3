"""The MoE block of a decoder layer: the family's routing, then an executor that owns the routed experts.

mlx-lm's blocks call their ``SwitchGLU`` and multiply by the router's weights outside it. Here the whole block is ours,
and the experts return one vector per token, [..., hidden] instead of [..., k, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from engine.models.architectures.record import MlxRecord, MoeRecord
from engine.moe.executor import LocalExecutor, RingExecutor
from engine.runtimes.mlx.backend import MlxBackend
from engine.runtimes.mlx.routing import ROUTES, SHARED
from engine.runtimes.mlx.spans import Spans

Array = Any


@dataclass
class RingPass:
    """State shared by the blocks of a model in a ring.

    ``check``, if set, is called before each layer and may end the pass. ``alone``: only routes to experts on this
    machine are run and nothing is exchanged; the results are meaningless.
    """

    executor: RingExecutor[Array]
    backend: MlxBackend
    check: Callable[[], None] | None = None
    alone: bool = False

    def run(self, layer: int, hidden: Array, indices: Array, weights: Array, shared: Array | None) -> Array:
        """The experts' sum [..., width] for ``hidden`` [..., width]. ``shared`` is evaluated while others are waited
        for."""
        if self.check is not None:
            self.check()
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.alone:
            return self.backend.run_here(layer, rows, indices, weights).reshape(hidden.shape)
        meanwhile = None if shared is None else partial(mx.async_eval, shared)
        return self.executor.run(layer, rows, indices, weights, meanwhile=meanwhile).reshape(hidden.shape)


class RoutedBlock(nn.Module):  # type: ignore[misc]
    """Replaces a decoder layer's MoE block. ``block`` is mlx-lm's, without its routed experts."""

    def __init__(
        self,
        block: Any,
        layer: int,
        experts: int,
        moe: MoeRecord,
        defined: MlxRecord,
        executor: LocalExecutor[Array] | RingPass,
        spans: Spans,
    ) -> None:
        super().__init__()
        self.block = block
        self._layer = layer
        self._experts = experts
        self._route = ROUTES[defined.route]
        self._shared = SHARED[moe.shared]
        self._executor = executor
        self._spans = spans

    def __call__(self, hidden: Array, *given: Array) -> Array:
        """``given``: further arguments that the layer passes to its block, such as Gemma's routes."""
        spans, executor, layer = self._spans, self._executor, self._layer
        if spans.active:
            mx.eval(hidden)
        indices, weights = spans.run(layer, "router", lambda: self._route(self.block, hidden, *given))
        shared = self._shared(self.block, hidden)
        before = spans.recorder.measured(layer)
        if isinstance(executor, RingPass):
            routed = executor.run(layer, hidden, indices, weights, shared)
        else:
            spans.routes(layer, indices, self._experts)
            routed = executor.run(layer, hidden, indices, weights)
        spans.inside += spans.recorder.measured(layer) - before
        return routed if shared is None else routed + shared
