"""The executor boundary: hidden states and routes go in, the experts' weighted sum comes out.

mlx-lm's blocks call their ``SwitchGLU`` and multiply by the router's weights outside it. Here the whole block is ours:
the family's routing (:mod:`engine.runtimes.mlx.routing`), then an executor that owns the experts and returns one vector
per token. What crosses the boundary is then the same for an executor that spans machines: [..., hidden] once per
layer instead of [..., k, hidden].
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from engine.runtimes.mlx.routing import Layout
from engine.runtimes.mlx.spans import Spans

Array = Any


class Executor(Protocol):
    """Runs the routed experts of a model."""

    @property
    def description(self) -> str:
        """For the status line, e.g. ``local (mlx, gpu)``."""
        ...

    def run(self, layer: int, hidden: Array, indices: Array, weights: Array, beside: Array | None) -> Array:
        """The weighted sum over the routes of ``layer``.

        ``hidden`` [..., hidden], ``indices`` and ``weights`` [..., k]; returns [..., hidden] in hidden's dtype.
        ``beside`` is what else the layer will need and nothing here depends on: an executor that waits for something
        may have it evaluated meanwhile.
        """
        ...


class LocalExecutor:
    """All experts in this machine's memory, as mlx-lm's ``SwitchGLU`` modules: ``experts[layer]``."""

    def __init__(self, experts: dict[int, Any], device: str, spans: Spans) -> None:
        self._experts = experts
        self._spans = spans
        self.description = f"local (mlx, {device})"

    def run(self, layer: int, hidden: Array, indices: Array, weights: Array, beside: Array | None) -> Array:
        return self._spans.run(layer, "experts", lambda: weighted_sum(self._experts[layer](hidden, indices), weights))


def weighted_sum(outputs: Array, weights: Array) -> Array:
    """``outputs`` [..., k, hidden] of k experts, ``weights`` [..., k]: their sum [..., hidden]."""
    return (outputs * weights[..., None]).sum(axis=-2).astype(outputs.dtype)


class RoutedBlock(nn.Module):  # type: ignore[misc]
    """Takes the place of a decoder layer's MoE block, ``block`` being mlx-lm's without its routed experts."""

    def __init__(self, block: Any, layer: int, experts: int, layout: Layout, executor: Executor, spans: Spans) -> None:
        super().__init__()
        self.block = block
        self._layer = layer
        self._experts = experts
        self._layout = layout
        self._executor = executor
        self._spans = spans

    def __call__(self, hidden: Array) -> Array:
        if self._spans.active:
            mx.eval(hidden)
        indices, weights = self._spans.run(self._layer, "router", lambda: self._layout.route(self.block, hidden))
        self._spans.routes(self._layer, indices, self._experts)
        shared = self._layout.shared(self.block, hidden)
        routed = self._executor.run(self._layer, hidden, indices, weights, shared)
        return routed if shared is None else routed + shared
