"""Limits within networks and experts that a family has and transformers does not compute (Ling 3).

What SiLU gives is at most the limit, and what it multiplies is between the limit and its negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.models.architectures.families import FAMILIES, completed
from engine.models.architectures.record import Limit
from engine.runtimes.torch.experts_module import ExpertsPlace, gate_of
from engine.runtimes.torch.offload.gates import Activation, FamilyGate

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SILU = Activation("silu")
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


class LimitedActivation(nn.Module):  # type: ignore[misc]
    """``activation`` of [..., width], at most ``limit``."""

    def __init__(self, activation: nn.Module, limit: float) -> None:
        super().__init__()
        self.activation = activation
        self.limit = limit

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(hidden)
        return out.clamp(max=self.limit)


def gates_of(places: Iterable[ExpertsPlace], config: Mapping[str, Any]) -> dict[int, FamilyGate]:
    """The activation of each layer's experts, with the limit that ``config.json`` gives it."""
    gates = {place.layer: gate_of(place.experts) for place in places}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.moe is None:
        return gates
    for layer, gate in gates.items():
        limit = family.moe.limit(completed(config), layer)
        if limit and gate.activation == _SILU:
            limited = Activation("clamped_silu", limit=limit)
            gates[layer] = FamilyGate(limited, limited)
    return gates


def limit_networks(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Limit the networks of ``model`` that all tokens pass, once their weights are in place, where ``config.json`` asks
    for it and their modules do not do it themselves."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return
    rule: Limit = family.decoder.limit
    for name, module in list(model.named_modules()):
        found = _LAYER.search(f".{name}.")
        if found is None or hasattr(module, "limit") or not all(hasattr(module, part) for part in _PARTS):
            continue
        limit = rule(completed(config), int(found[1]))
        if limit:
            module.act_fn = LimitedActivation(module.act_fn, limit)
            module.up_proj.register_forward_hook(partial(_clamped, limit))


def _clamped(limit: float, module: nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out.clamp(-limit, limit)
