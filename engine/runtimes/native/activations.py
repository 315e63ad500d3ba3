"""The functions within networks and experts as the kernels know them, by ``config.json`` and the family's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.architectures.config_values import positive_number, whole_number
from engine.models.architectures.families import FAMILIES, completed
from engine.models.architectures.record import Family, Limit, unlimited
from engine.moe.kernels.layers import Gate

ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""The kernels' activations by transformers' names."""
WITHOUT_GATE: dict[str, str] = {"relu2": "relu", "xielu": "xielu"}
"""The same for networks without a gate, where they multiply what they are given, or are functions of it alone."""


def read_gate(config: Mapping[str, Any]) -> Gate:
    """The function between the matrices of the feed-forward networks."""
    if _is_clamped(FAMILIES[config["model_type"]]):
        alpha, limit = positive_number(config, "swiglu_alpha", 1.702), positive_number(config, "swiglu_limit", 7.0)
        return Gate("clamped", alpha, limit, beta=1.0)
    return Gate(_kernels(FAMILIES[config["model_type"]])[activation_of(config)])


def expert_gates(config: Mapping[str, Any]) -> tuple[Gate, ...]:
    """The function within the routed experts of each layer. Raises ModelError if a setting of their limits is
    impossible."""
    moe = FAMILIES[config["model_type"]].moe
    return limited_gates(completed(config), unlimited if moe is None else moe.limit)


def limited_gates(config: Mapping[str, Any], limit: Limit) -> tuple[Gate, ...]:
    """The function of each layer's networks, with the limits that the rule ``limit`` gives. Raises ModelError if a
    setting is missing or impossible."""
    gate, layers = read_gate(config), range(whole_number(config, "num_hidden_layers"))
    limits = (limit(config, layer) for layer in layers)
    return tuple(Gate("clamped_silu", limit=each) if each else gate for each in limits)


def _is_clamped(family: Family) -> bool:
    return family.activation == "clamped"


def _kernels(family: Family) -> Mapping[str, str]:
    """The kernels' activations by transformers' names."""
    return ACTIVATIONS if family.has_gates else WITHOUT_GATE


def activation_of(config: Mapping[str, Any]) -> Any:
    """The name of the function within networks and experts, as transformers has it."""
    return completed(config).get(FAMILIES[config["model_type"]].decoder.activation_setting) or "silu"


def has_kernel(family: Family, activation: Any) -> bool:
    """Whether the kernels know the ``activation`` within networks of ``family``."""
    return activation in _kernels(family) or _is_clamped(family)
