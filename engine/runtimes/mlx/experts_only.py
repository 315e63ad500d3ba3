"""A node's experts without a trunk, by mlx: what it is in central mode."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.exchange.layers import Indices
from engine.runtimes.mlx.model import memory_named
from engine.runtimes.mlx.ring import RingExecutor


class MlxExperts:
    """See :class:`engine.ring.running.central.ExpertRunner`. ``width``: numbers of a hidden state."""

    def __init__(self, executor: RingExecutor, width: int) -> None:
        self._executor = executor
        self.width = width
        self.description = executor.description

    def run_experts(
        self,
        layer: int,
        hidden: NDArray[np.float32],
        indices: Indices,
        weights: NDArray[np.float32],
        extra: Sequence[int],
        scale: bool,
    ) -> NDArray[np.float32]:
        """See :class:`engine.ring.running.central.ExpertRunner`. Raises ModelError if memory runs out."""
        if scale:
            raise ModelError("mlx runs no family that scales its experts' inputs; choose the torch runtime.")
        with memory_named():
            rows = mx.array(hidden).astype(self._executor.computes_in)
            found = self._executor.results(layer, rows, indices, self._executor.computes_in, tuple(extra))
            out: NDArray[np.float32] = np.array(found.astype(mx.float32))
        return out

    def close(self) -> None:
        """Free the memory."""
        self._executor.close()
        mx.clear_cache()
