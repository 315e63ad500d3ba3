"""The ring executor of the torch runtime: this node's experts on its CPU, the others' results by the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.moe.expert_parallel import Gathered, Indices, NeedsHidden, Words
from engine.moe.popularity import Popularity
from engine.moe.timing import Recorder
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.offload.local import LocalExecutor

FEW_ROUTES = 64
"""Up to here routes are counted in Python, above by torch: Python wins while there are few of them."""
_WORDS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.uint16),
}


class RingExecutor:
    """See :class:`engine.runtimes.torch.offload.executor.Executor`. One thread at a time.

    ``local`` runs this node's experts, and would run all of them on one machine. In exact mode un-weighted results
    travel, and the sum is ``local``'s to the bit; in fast mode every node's weighted sum travels, as float32. In
    central mode the other nodes have no trunk.
    """

    def __init__(
        self,
        local: LocalExecutor,
        place: RingPlace,
        layers: Iterable[int],
        experts: int,
        recorder: Recorder,
    ) -> None:
        self._own = local
        self._dtype = local.result_dtype
        self._context = place.context
        self._exchange = place.exchange
        self._fast = place.context.mode == "fast"
        self._travels = local.result_dtype if place.context.mode == "exact" else torch.float32
        self._experts = experts
        self._popularity = Popularity(layers, experts)
        self._recorder = recorder
        self._while_busy: Callable[[], None] | None = None

    @property
    def description(self) -> str:
        context = self._context
        return f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}; {self._own.description})"

    @property
    def popularity(self) -> Popularity:
        """Of all routes, whoever ran them."""
        return self._popularity

    def while_busy(self, work: Callable[[], None] | None) -> None:
        """``work`` is done in the next exchange, while the wire is busy."""
        self._while_busy = work

    def run(self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See :class:`engine.runtimes.torch.offload.executor.Executor`. Raises what the exchange raises, PeerLost above
        all."""
        return self._run(layer, hidden, indices, weights, scale_input=False)

    def run_scaled_input(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self._run(layer, hidden, indices, weights, scale_input=True)

    def _run(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scale_input: bool
    ) -> torch.Tensor:
        tokens, width = hidden.shape
        dtype = weights.dtype

        def local(indices: Indices, weights: NDArray[np.float32], extra: tuple[int, ...]) -> Words:
            began = self._recorder.clock()
            out = self._local(layer, hidden, indices, torch.from_numpy(weights).to(dtype), extra, scale_input)
            if self._recorder.enabled:
                self._recorder.add(layer, "experts", self._recorder.clock() - began)
            return out

        chosen = indices.to(torch.int32).contiguous().numpy()
        shares = weights.float().contiguous().numpy()
        if isinstance(self._exchange, NeedsHidden):
            self._exchange.hidden(hidden.float().contiguous().numpy(), scale_input)
        work, self._while_busy = self._while_busy, None
        gathered = self._exchange.run(layer, chosen, shares, local, width, _WORDS[self._travels], work)
        if not tokens:
            return torch.zeros_like(hidden)
        began = self._recorder.clock()
        self._count(layer, gathered.indices)
        out = self._combined(gathered, tokens, None if scale_input else dtype).to(hidden.dtype)
        if self._recorder.enabled:
            self._recorder.add(layer, "experts", self._recorder.clock() - began)
        return out

    def _local(
        self,
        layer: int,
        hidden: torch.Tensor,
        mine: Indices,
        weights: torch.Tensor,
        extra: tuple[int, ...],
        scale_input: bool,
    ) -> Words:
        """See :class:`engine.moe.expert_parallel.Local`."""
        if extra:
            self._own.outputs(layer, hidden[:1], torch.tensor([extra], dtype=torch.int32))
        routed = self._own.outputs(layer, hidden, torch.from_numpy(mine), weights if scale_input else None)
        if not self._fast:
            return _words(routed.to(self._dtype).to(self._travels))
        return _words(self._own.combined(routed.to(self._dtype), hidden.shape[0], None if scale_input else weights))

    def _combined(self, gathered: Gathered, tokens: int, weighted_in: torch.dtype | None) -> torch.Tensor:
        """The sum [tokens, hidden], float32. ``weighted_in`` is the dtype of the router's weights, None if those went
        into the experts' inputs."""
        if gathered.outputs is None:
            total = torch.from_numpy(gathered.sums[0])
            for other in gathered.sums[1:]:
                total += torch.from_numpy(other)
            return total
        routed = torch.from_numpy(gathered.outputs).view(self._travels).to(self._dtype)
        shares = None if weighted_in is None else torch.from_numpy(gathered.weights).to(weighted_in)
        return self._own.combined(routed, tokens, shares)

    def _count(self, layer: int, indices: Indices) -> None:
        """Count all routes of a layer."""
        if indices.size <= FEW_ROUTES:
            counts = dict.fromkeys(chosen := indices.reshape(-1).tolist(), 0)
            for expert in chosen:
                counts[expert] += 1
        else:
            counts = {e: int(n) for e, n in enumerate(np.bincount(indices.reshape(-1))) if n}
        for expert, count in counts.items():
            self._popularity.add(layer, expert, count)
        if self._recorder.enabled:
            self._recorder.add_routes(layer, [counts.get(expert, 0) for expert in range(self._experts)])


def _words(tensor: torch.Tensor) -> Words:
    """``tensor`` as numbers that travel: float32, or two-byte words."""
    plain = tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)
    words: Words = plain.numpy()
    return words.view(_WORDS[tensor.dtype])
