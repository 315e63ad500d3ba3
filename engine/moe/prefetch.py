"""Prefetching experts that do not fit in memory: the system reads them before the kernels touch them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from engine.models.formats.model_files import Experts

if TYPE_CHECKING:
    import torch

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
        """``indices`` [tokens, k]: the experts of ``layer`` that are about to run, -1 for none. Never fails."""
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
