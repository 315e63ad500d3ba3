"""Attention to chosen blocks of tokens (qwen4_exp), while the text is so short that all are chosen.

transformers chooses for each token by itself, in a loop of some twenty operations, also where there is nothing to
choose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def attend_to_all_while_few(model: nn.Module) -> None:
    """Let the indexers of ``model`` skip the choice where their budget covers the whole text."""
    for module in model.modules():
        if hasattr(module, "token_budget") and hasattr(module, "compress_ratio"):
            _AllWhileFew(module)


class _AllWhileFew:
    """Stands in for the forward pass of ``indexer``. The keys of all tokens are kept as there."""

    def __init__(self, indexer: Any) -> None:
        self._indexer = indexer
        self._choose = indexer.forward
        # A block that is not complete is seen whatever is chosen.
        self._most = indexer.token_budget + indexer.compress_ratio - 1
        indexer.forward = self

    def __call__(
        self, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """The tokens that each token of ``hidden`` [rows, tokens, hidden] may attend to, besides what ``mask``
        [rows, 1, tokens, all tokens] says."""
        if mask.shape[-1] > self._most:
            chosen: torch.Tensor = self._choose(hidden, positions, mask, cache)
            return chosen
        if cache is not None:
            queries = self._indexer.index_n_heads * self._indexer.index_head_dim
            cache.update_indexer(self._indexer.index_qk_proj(hidden)[..., queries:], self._indexer.layer_idx)
        return mask.new_ones((1, 1, 1, 1), dtype=torch.bool)
