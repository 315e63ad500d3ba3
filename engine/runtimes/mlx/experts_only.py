"""A node's experts without a trunk, by mlx: what it is in central mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.moe.expert_parallel import Indices
from engine.runtimes.mlx import wired
from engine.runtimes.mlx.model import memory_named
from engine.runtimes.mlx.ring import RingExecutor
from engine.runtimes.protocol import LoadedExperts


class MlxExperts(LoadedExperts):
    """See :class:`engine.runtimes.protocol.LoadedExperts`. ``width``: numbers of a hidden state; ``notices``: what
    the person should know of how they were loaded; ``weights``: the experts' modules by layer."""

    def __init__(
        self, executor: RingExecutor, width: int, weights: Mapping[int, Any], notices: Sequence[str] = ()
    ) -> None:
        self._executor = executor
        self._weights = dict(weights)
        self._wired = False
        self.width = width
        self.description = executor.description
        self.notices: list[str] = list(notices)

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
        hidden: NDArray[np.float32],
        indices: Indices,
        weights: NDArray[np.float32],
        extra: Sequence[int],
        scale: bool,
    ) -> NDArray[np.float32]:
        """See :class:`engine.runtimes.protocol.LoadedExperts`. Raises ModelError if memory runs out."""
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
        self._weights = {}
        if self._wired:
            wired.LIMIT.restore()
            self._wired = False
        mx.clear_cache()
