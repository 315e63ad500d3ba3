"""What executors that run all experts themselves have in common: their popularity, and spans for the timing panel."""

from __future__ import annotations

import torch

from engine.models.files import Experts
from engine.moe.popularity import Popularity
from engine.moe.timing import Recorder


class MeasuredExecutor:
    """See :class:`engine.runtimes.torch.offload.executor.Executor`; subclasses say how the experts run, and count the
    routes."""

    def __init__(self, experts: Experts, recorder: Recorder) -> None:
        self._recorder = recorder
        self._popularity = Popularity(experts.layers, experts.count)

    @property
    def popularity(self) -> Popularity:
        return self._popularity

    def run(self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.executor.Executor`. The sum is made in float32 and rounded once,
        as in the
        library's own grouped and batched implementations."""
        if self._recorder.enabled:
            return self._measured(layer, hidden, indices, weights, scale_input=False)
        return self._run(layer, hidden, indices, weights, False)

    def run_scaled_input(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if self._recorder.enabled:
            return self._measured(layer, hidden, indices, weights, scale_input=True)
        return self._run(layer, hidden, indices, weights, True)

    def _measured(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scale_input: bool
    ) -> torch.Tensor:
        recorder = self._recorder
        before = self._popularity.counts(layer)
        self._wait()
        start = recorder.clock()
        out = self._run(layer, hidden, indices, weights, scale_input)
        self._wait()
        recorder.add(layer, "experts", recorder.clock() - start)
        after = self._popularity.counts(layer)
        recorder.add_routes(layer, [new - old for new, old in zip(after, before, strict=True)])
        return out

    def _run(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scale_input: bool
    ) -> torch.Tensor:
        raise NotImplementedError

    def _wait(self) -> None:
        """Until the device has done all it was asked."""
