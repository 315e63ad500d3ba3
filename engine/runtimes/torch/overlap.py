"""Shared experts are computed while the ring's exchange of the routed ones is on its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.runtimes.torch.ring_executor import RingExecutor

SHARED = ("shared_expert", "shared_experts")
"""What families call them, in the MoE block."""


class SharedMeanwhile:
    """Runs ``shared``, a child of ``block``, in the exchange of ``executor``; asked for afterwards, it has the result.

    Only where the block gives it the block's own input after the routed experts. A family that asks for it earlier gets
    it computed then.
    """

    def __init__(self, block: nn.Module, shared: nn.Module, executor: RingExecutor) -> None:
        self._executor = executor
        self._work = shared.forward
        self._given: torch.Tensor | None = None
        self._found: torch.Tensor | None = None
        block.register_forward_pre_hook(self._begin)
        shared.forward = self._forward

    def _begin(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._given, self._found = inputs[0], None
        self._executor.while_busy(self._compute)

    def _compute(self) -> None:
        if self._given is not None:
            self._found = self._work(self._given)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found, fits = self._found, hidden is self._given
        self._given = self._found = None
        self._executor.while_busy(None)
        if found is not None and fits:
            return found
        out: torch.Tensor = self._work(hidden)
        return out


def overlap_shared(block: nn.Module, executor: RingExecutor) -> None:
    """Have ``block``'s shared experts computed while the wire is busy, if it has any."""
    for name in SHARED:
        shared = getattr(block, name, None)
        if isinstance(shared, nn.Module):
            SharedMeanwhile(block, shared, executor)
