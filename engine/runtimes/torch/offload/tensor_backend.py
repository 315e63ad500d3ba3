"""The common base of the torch runtime's backends: from tensors to the words of the exchange."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.models.formats.model_files import Experts
from engine.moe.backend import ExpertBackend, LayerCall
from engine.moe.expert_parallel import Floats, HostRows, Indices, Routes, Words
from engine.moe.popularity import Popularity

_WORDS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.uint16),
}


class TensorBackend(ExpertBackend[torch.Tensor]):
    """See :class:`engine.moe.backend.ExpertBackend`. In a ring, tensors are on the CPU.

    ``experts``: the experts that can be run. ``dtype``: the trunk's dtype.
    """

    popularity: Popularity

    def __init__(self, experts: Experts, dtype: torch.dtype) -> None:
        self.experts = experts
        self.dtype = dtype
        self.popularity = Popularity(experts.layers, experts.count)

    @property
    def held(self) -> int:
        return sum(len(self.experts.held(layer)) for layer in self.experts.layers)

    @property
    @abstractmethod
    def result_dtype(self) -> torch.dtype:
        """Dtype of a route's result before it is weighted. Results lose nothing if they travel in it."""

    @abstractmethod
    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of each route's expert, neither weighted nor added up.

        ``hidden`` [tokens, hidden] on the CPU, in the computed dtype or float32; ``indices`` [tokens, k], int32 or
        int64 on the CPU, -1 if another machine runs the route. Returns float32 [tokens * k, hidden] in the order of the
        routes, a new tensor; rows of routes with -1 are zero. A route's row does not depend on the other routes in the
        call, as far as the implementation can promise (see its description). ``input_weights`` [tokens, k]: for
        families that scale an expert's input (llama4).
        """

    @abstractmethod
    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        """The sum that a single CPU computes from results, to the bit, before it is rounded to hidden's dtype.

        ``routed`` [tokens * k, hidden] in ``result_dtype``, in the order of the routes; ``weights`` [tokens, k] from
        the router, None if they scaled the input. Returns float32 [tokens, hidden]. ``tokens`` > 0.
        """

    def begin(
        self,
        layer: int,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scale_input: bool = False,
        rows_too: bool = False,
    ) -> LayerCall[torch.Tensor]:
        routes = Routes(indices.to(torch.int32).contiguous().numpy(), weights.float().contiguous().numpy())
        rows: Floats | None = hidden.float().contiguous().numpy() if rows_too else None
        word = _WORDS[self.result_dtype]
        return LayerCall(layer, hidden, weights, routes, hidden.shape[1], word, scale_input, rows)

    def begin_on_host(self, layer: int, hidden: HostRows, routes: Routes) -> LayerCall[torch.Tensor]:
        rows = torch.from_numpy(hidden.rows).to(self.dtype)
        weights = torch.from_numpy(routes.weights).to(self.dtype)
        word = _WORDS[self.result_dtype]
        return LayerCall(layer, rows, weights, routes, rows.shape[1], word, hidden.scale_input)

    def results(
        self,
        call: LayerCall[torch.Tensor],
        mine: Indices,
        weights: Floats,
        extra: Sequence[int],
        word: np.dtype[Any],
    ) -> Words:
        routed = self._routed(call, mine, weights, extra)
        return _words(routed if word == call.word else routed.float())

    def sums(self, call: LayerCall[torch.Tensor], mine: Indices, weights: Floats, extra: Sequence[int]) -> Words:
        routed = self._routed(call, mine, weights, extra)
        return _words(self.combined(routed, len(mine), _shares(call, weights)))

    def joined(
        self, call: LayerCall[torch.Tensor], outputs: Words, weights: Floats, word: np.dtype[Any]
    ) -> torch.Tensor:
        tokens = call.hidden.shape[0]
        if not tokens:
            return torch.zeros_like(call.hidden)
        travelled = self.result_dtype if word == call.word else torch.float32
        routed = torch.from_numpy(outputs).view(travelled).to(self.result_dtype)
        return self.combined(routed, tokens, _shares(call, weights)).to(call.hidden.dtype)

    def added(self, call: LayerCall[torch.Tensor], sums: Sequence[Words]) -> torch.Tensor:
        if not sums:
            return torch.zeros_like(call.hidden)
        total = torch.from_numpy(sums[0])
        for other in sums[1:]:
            total += torch.from_numpy(other)
        return total.to(call.hidden.dtype)

    def _routed(
        self, call: LayerCall[torch.Tensor], mine: Indices, weights: Floats, extra: Sequence[int]
    ) -> torch.Tensor:
        """The results of the routes ``mine`` [tokens * k, width] in the dtype in which one machine weights them."""
        if extra:
            self.outputs(call.layer, call.hidden[:1], torch.tensor([list(extra)], dtype=torch.int32))
        scales = torch.from_numpy(weights).to(call.weights.dtype) if call.scale_input else None
        return self.outputs(call.layer, call.hidden, torch.from_numpy(mine), scales).to(self.result_dtype)


def _shares(call: LayerCall[torch.Tensor], weights: Floats) -> torch.Tensor | None:
    """Weights of the results; None if the inputs were weighted."""
    return None if call.scale_input else torch.from_numpy(weights).to(call.weights.dtype)


def _words(tensor: torch.Tensor) -> Words:
    """``tensor`` as words of the exchange: float32, or two-byte words."""
    plain = tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)
    words: Words = plain.numpy()
    return words.view(_WORDS[tensor.dtype])


# --- the weighted sum of routes --------------------------------------------------------------------------------------


def weighted_sum(routed: torch.Tensor, tokens: int, weights: torch.Tensor | None, rounded: torch.dtype) -> torch.Tensor:
    """The weighted sum of ``routed`` [tokens * k, hidden], float32 [tokens, hidden], in the order of each token's
    routes.

    ``rounded``: the dtype in which one machine's executor weights a route's result. ``weights`` [tokens, k]; None if
    the input was scaled. ``tokens`` is not 0.
    """
    results = routed.to(rounded).view(tokens, -1, routed.shape[1])
    if weights is not None:
        results = results * weights[:, :, None]
    return results.sum(dim=1, dtype=torch.float32)


# --- prefetching experts from the disk -------------------------------------------------------------------------------


_ASK_BYTES = 2**20
"""Bytes per request, as the system prefetches about as much at a time."""
_WILL_NEED = 3
"""Linux's and macOS's MADV_WILLNEED."""


class ReadAhead:
    """Announces to the system the experts that a layer will read, so that the disk reads them in parallel instead of
    page by page."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        library = ctypes.CDLL(None)
        self._advise = library.madvise
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def will_need(self, layer: int, indices: torch.Tensor) -> None:
        """Announce the experts of ``layer`` in ``indices`` [tokens, k], which are about to run; -1: none. Never
        fails."""
        for expert in indices.unique().tolist():
            if expert < 0:
                continue
            for address, nbytes in self._ranges_of(layer, expert):
                for start in range(0, nbytes, _ASK_BYTES):
                    self._advise(address + start, min(_ASK_BYTES, nbytes - start), _WILL_NEED)

    def _ranges_of(self, layer: int, expert: int) -> list[tuple[int, int]]:
        found = self._ranges.get((layer, expert))
        if found is None:
            found = self._ranges[layer, expert] = self._experts.place(layer, expert).page_ranges()
        return found
