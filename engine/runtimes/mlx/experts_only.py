"""A node's experts without a trunk, on mlx, for central mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from engine.moe.expert_parallel import Floats, Indices
from engine.runtimes.mlx import wired
from engine.runtimes.mlx.backend import MlxBackend
from engine.runtimes.mlx.model import memory_named
from engine.runtimes.node_experts import NodeExperts


class WiredExperts(NodeExperts):
    """Node experts that the system may be asked to keep in the GPU's memory: ``weights`` are their modules by layer."""

    def __init__(
        self,
        backend: MlxBackend,
        width: int,
        description: str,
        weights: Mapping[int, Any],
        notices: Sequence[str] = (),
    ) -> None:
        super().__init__(backend, width, description, notices=notices)
        self._weights = dict(weights)
        self._wired = False

    def wire(self) -> None:
        """Have the system keep the weights in the GPU's memory until they are closed. A line is added to the notices
        if it will not keep all of them."""
        self._wired = True
        nbytes = sum(int(array.nbytes) for array in wired.arrays_of(None, self._weights))
        self.weights_are_wired, said = wired.wire(nbytes, 0)
        self.notices += [said] if said else []

    def hold_weights(self, wanted: bool) -> None:
        if self._wired:
            wired.LIMIT.hold(wanted)

    def kept_weights(self) -> wired.MlxWeights:
        return wired.MlxWeights(wired.arrays_of(None, self._weights))

    def run_experts(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        extra: Sequence[int] = (),
        scale: bool = False,
    ) -> Floats:
        """See :class:`engine.runtimes.node_experts.NodeExperts`. Raises ModelError if memory runs out."""
        with memory_named():
            return super().run_experts(layer, hidden, indices, weights, extra, scale)

    def close(self) -> None:
        """Free the memory."""
        super().close()
        self._weights = {}
        if self._wired:
            wired.LIMIT.restore()
            self._wired = False
        mx.clear_cache()
