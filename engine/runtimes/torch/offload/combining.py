"""Routes' results become a weighted sum: the arithmetic of one machine, for executors that share them with others."""

from __future__ import annotations

import torch


def weighted_sum(routed: torch.Tensor, tokens: int, weights: torch.Tensor | None, rounded: torch.dtype) -> torch.Tensor:
    """``routed`` [tokens * k, hidden] to float32 [tokens, hidden], added in the order of each token's routes.

    ``rounded`` is the dtype in which the executor of one machine weights a route's result; ``weights`` [tokens, k],
    None where the input was scaled. ``tokens`` is not 0.
    """
    results = routed.to(rounded).view(tokens, -1, routed.shape[1])
    if weights is not None:
        results = results * weights[:, :, None]
    return results.sum(dim=1, dtype=torch.float32)
