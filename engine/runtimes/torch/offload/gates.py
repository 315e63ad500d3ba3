"""The product of gate and up inside an expert: the family's own function, and its name in the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``gate(gate_out, up_out)``, both [tokens, ffn]: the input of the down projection, as the family computes it."""

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped", "clamped_silu"]


@dataclass(frozen=True)
class Activation:
    """A gate that needs no Python: ``kind(gate) * up``.

    ``clamped`` is ``g * sigmoid(alpha * g) * (u + beta)`` with g = gate, at most ``limit``, and u = up, between
    ``-limit`` and ``limit``. ``clamped_silu`` is ``g * u`` with g = silu(gate), at most ``limit``, and the same u. The
    other kinds ignore the numbers.
    """

    kind: ActivationKind
    alpha: float = 0.0
    limit: float = 0.0
    beta: float = 0.0

    def __call__(self, gate_out: torch.Tensor, up_out: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "silu":
                return functional.silu(gate_out) * up_out
            case "gelu":
                return functional.gelu(gate_out) * up_out
            case "gelu_tanh":
                return functional.gelu(gate_out, approximate="tanh") * up_out
            case "relu":
                return functional.relu(gate_out) * up_out
            case "clamped":
                gate, up = gate_out.clamp(max=self.limit), up_out.clamp(-self.limit, self.limit)
                return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)
            case "clamped_silu":
                return functional.silu(gate_out).clamp(max=self.limit) * up_out.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class FamilyGate:
    """A family's gate: the library's ``function``, and the equal ``activation`` of the kernels, or None."""

    function: Gate
    activation: Activation | None

    def __call__(self, gate_out: torch.Tensor, up_out: torch.Tensor) -> torch.Tensor:
        return self.function(gate_out, up_out)


def family_gate(
    function: Gate, alpha: float | None = None, limit: float | None = None, alone: bool = False
) -> FamilyGate:
    """The gate ``function`` with the activation that it equals. ``alpha`` and ``limit`` are those of a possibly clamped
    gate. ``alone``: it is given the same numbers twice, as experts without a gate do.

    Names are not trusted: the function is run on numbers of every size, and an activation with other results is not
    used.
    """
    candidates = [Activation("silu"), Activation("gelu"), Activation("gelu_tanh"), Activation("relu")]
    if limit is not None:
        candidates.append(Activation("clamped_silu", limit=limit))
        candidates.append(Activation("clamped", 1.0, limit))
    if alpha is not None and limit is not None:
        candidates.append(Activation("clamped", alpha, limit, 1.0))
    gate_out, up_out = _probe()
    up_out = gate_out if alone else up_out
    try:
        expected = function(gate_out, up_out)
    except (RuntimeError, ValueError, TypeError):  # a gate with weights of its own, of another size
        return FamilyGate(function, None)
    if expected.shape != gate_out.shape:
        return FamilyGate(function, None)
    for candidate in candidates:
        if torch.allclose(candidate(gate_out, up_out), expected, rtol=1e-5, atol=1e-6):
            return FamilyGate(function, candidate)
    return FamilyGate(function, None)


def _probe() -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of a row of gates and a row of ups, [n, n]: near zero, around the usual limits, and far beyond."""
    steps = torch.cat((torch.linspace(-12.0, 12.0, 97), torch.tensor([-1e4, -300.0, -40.0, 40.0, 300.0, 1e4])))
    gate_out, up_out = torch.meshgrid(steps, steps, indexing="ij")
    return gate_out.contiguous(), up_out.contiguous()
