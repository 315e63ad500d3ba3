"""Shared experts are computed while the ring's exchange of the routed ones is on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

SHARED = ("shared_expert", "shared_experts")
"""What families call them, in the MoE block."""


_EARLY = ("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock")
"""Blocks that ask for their shared expert before the routed ones, each with the same operations."""


class DoesMeanwhile(Protocol):
    """The module of a block's routed experts; ``meanwhile`` is done within its next call, or not at all."""

    meanwhile: Callable[[], None] | None


class SharedMeanwhile:
    """Runs ``shared``, a child of ``block``, in the exchange of ``experts``; asked for afterwards, it has the result.

    Only where the block gives it the block's own input after the routed experts. A family that asks for it earlier gets
    it computed then; those of :data:`_EARLY` have a block of their own here.
    """

    def __init__(self, block: nn.Module, shared: nn.Module, experts: DoesMeanwhile) -> None:
        self._experts = experts
        self._work = shared.forward
        self._given: torch.Tensor | None = None
        self._found: torch.Tensor | None = None
        block.register_forward_pre_hook(self._begin)
        shared.forward = self._forward

    def _begin(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._given, self._found = inputs[0], None
        self._experts.meanwhile = self._compute

    def _compute(self) -> None:
        if self._given is not None:
            self._found = self._work(self._given)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found, fits = self._found, hidden is self._given
        self._given = self._found = None
        self._experts.meanwhile = None
        if found is not None and fits:
            return found
        out: torch.Tensor = self._work(hidden)
        return out


class GatedSharedBlock(nn.Module):  # type: ignore[misc]
    """In a ring in place of the MoE blocks that ask for their shared expert before the routed ones.

    The same operations on the same numbers, in an order in which the shared expert runs while the wire is busy. The
    names of the children are the library's, so that the trunk's names fit.
    """

    def __init__(self, block: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.gate = block.gate
        self.experts = experts
        self.shared_expert = block.shared_expert
        self.shared_expert_gate = block.shared_expert_gate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        _, weights, indices = self.gate(rows)
        found: list[torch.Tensor] = []
        self.experts.meanwhile = lambda: found.append(self._shared(rows))
        routed = self.experts(rows, indices, weights)
        out: torch.Tensor = routed + (found[0] if found else self._shared(rows))
        return out.view(hidden.shape)

    def _shared(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)


def asks_early(block: nn.Module) -> bool:
    """Whether it is one that :class:`GatedSharedBlock` stands in for."""
    return type(block).__name__ in _EARLY


def overlap_shared(block: nn.Module, experts: DoesMeanwhile) -> None:
    """Have ``block``'s shared experts computed while the wire is busy, if it has any."""
    for name in SHARED:
        shared = getattr(block, name, None)
        if isinstance(shared, nn.Module):
            SharedMeanwhile(block, shared, experts)
