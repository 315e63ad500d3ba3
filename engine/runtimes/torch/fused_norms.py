"""Norms of transformers' trunks in one operation of torch each, for GPUs.

transformers writes a root-mean-square norm as seven operations. On a GPU each of them takes the host longer to begin
than the device to do, and norms are a third of what a layer begins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class FusedNorm(nn.Module):  # type: ignore[misc]
    """``weight`` [width] times what is left of the input [..., width] when its last dimension has a mean square of one.
    Rounded once, where transformers rounds twice."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Replace the norms of ``model`` that are the same as :class:`FusedNorm`; how many those are.

    A name is not trusted: each norm is run on numbers of every size, beside the one that would take its place.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    replaced = 0
    for name, norm in found:
        fused = _fused(norm)
        if fused is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fused)
            replaced += 1
    return replaced


def _fused(norm: Any) -> FusedNorm | None:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    fused = FusedNorm(weight, epsilon)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, len(weight), generator=generator) * torch.tensor([[1e-4], [0.1], [1.0], [30.0], [1e3]])
    probe = numbers.to(weight.device, weight.dtype)
    with torch.inference_mode():
        try:
            wanted = norm(probe)
        except (RuntimeError, TypeError, ValueError):  # a norm of another kind, with further arguments
            return None
        same = wanted.shape == probe.shape and wanted.dtype == probe.dtype
        # Two roundings in place of one are a step apart.
        step = 4 * torch.finfo(weight.dtype).eps
        return fused if same and torch.allclose(fused(probe), wanted, rtol=step, atol=step) else None
