"""The modules that replace transformers' routed experts. They hold no weights and use the executor."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from engine.errors import ModelError
from engine.moe.executor import Executor
from engine.runtimes.torch.offload.gates import FamilyGate, family_gate

_LAYER_AND_PLACE = re.compile(r"\.(?:layers|blocks)\.(\d+)(?:\..+)?\.experts$")


@dataclass(frozen=True)
class ExpertsPlace:
    """The modules with the routed experts of ``layer``: ``experts``, and its parent ``block``, which is the MoE block,
    or the whole layer if it has none."""

    layer: int
    block_name: str
    block: nn.Module
    experts: nn.Module


class RoutedExperts(nn.Module):  # type: ignore[misc]
    """Replaces a family's ``experts`` module: ``(hidden [..., hidden], indices [tokens, k], weights [tokens, k])``
    returns the weighted sum in hidden's shape.

    ``last``: number of positions at the end whose results are needed, the others are zero; None: all. ``meanwhile``:
    the block's work for the next call, done while other machines are waited for.
    """

    def __init__(self, layer: int, executor: Executor[torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.executor = executor
        self.last: int | None = None
        self.meanwhile: Callable[[], None] | None = None

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        work, self.meanwhile = self.meanwhile, None
        out = _of_the_last(self.last, self.executor, self.layer, rows, indices, weights, False, work)
        return out.view(hidden.shape)


class ScaledInputBlock(nn.Module):  # type: ignore[misc]
    """Replaces llama4's MoE block, which scales the inputs of experts and repeats every token for every expert.

    Here only the chosen experts run. The names of the children are the library's, so that the trunk's names fit.
    """

    def __init__(self, layer: int, executor: Executor[torch.Tensor], block: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.executor = executor
        self.last: int | None = None
        self.top_k: int = block.top_k
        self.router = block.router
        self.shared_expert = block.shared_expert

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        scores, logits = self.router(hidden)
        indices = torch.topk(logits, self.top_k, dim=1).indices
        found: list[torch.Tensor] = []
        work = (lambda: found.append(self.shared_expert(hidden))) if self.executor.in_ring else None
        shares = scores.gather(1, indices)
        routed = _of_the_last(self.last, self.executor, self.layer, hidden, indices, shares, True, work)
        out: torch.Tensor = found[0] if found else self.shared_expert(hidden)
        out.add_(routed)
        return out, logits


def _of_the_last(
    last: int | None,
    executor: Executor[torch.Tensor],
    layer: int,
    rows: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    scale_input: bool,
    work: Callable[[], None] | None,
) -> torch.Tensor:
    """The experts' sum for the last ``last`` of ``rows`` [tokens, hidden], with zeros for the others; None: all."""
    if last is None or last >= len(rows):
        return executor.run(layer, rows, indices, weights, scale_input, work)
    out = torch.zeros_like(rows)
    # In a ring the other nodes come to this layer too.
    if last or executor.in_ring:
        first = len(rows) - last
        out[first:] = executor.run(layer, rows[first:], indices[first:], weights[first:], scale_input, work)
    return out


def find_experts(model: nn.Module) -> list[ExpertsPlace]:
    """All modules of ``model`` with routed experts, by layer."""
    places = []
    for name, module in model.named_modules():
        found = _LAYER_AND_PLACE.search(f".{name}")
        if found:
            block_name = name.removesuffix(".experts")
            places.append(ExpertsPlace(int(found[1]), block_name, model.get_submodule(block_name), module))
    return places


def experts_per_token(places: list[ExpertsPlace]) -> int:
    """Number of experts per token, which families keep in the block or in its router; 0 for a dense model."""
    for place in places:
        for module in place.block.modules():
            # gemma4's router looks it up in the configuration.
            top_k = getattr(module, "top_k", None) or getattr(getattr(module, "config", None), "top_k_experts", None)
            if isinstance(top_k, int):
                return top_k
    return 0


def gate_of(experts: nn.Module) -> FamilyGate:
    """The family's own activation, as ``gate(gate_out, up_out)``.

    A family's ``_apply_gate`` is called, not reimplemented. It gets gate and up in the order it expects. Experts
    without a gate give the same for both. Raises ModelError if the module's experts are of another kind.
    """
    apply_gate = getattr(type(experts), "_apply_gate", None)
    # Importing the library's default for a comparison would import torch's compiler, which takes 90 MB.
    if apply_gate is not None and apply_gate.__qualname__ != "_default_apply_gate":
        if not getattr(experts, "has_gate", True) or getattr(experts, "has_post_expert_norm", False):
            raise ModelError(f"The experts of {type(experts).__name__} are of a kind that this version cannot run.")
        gate = _CalledGate(experts, interleaved=not getattr(experts, "is_concatenated", True))
        return family_gate(gate, *_clamp_of(experts))
    # dbrx keeps its activation one module further down.
    activation = getattr(experts, "act_fn", None) or getattr(getattr(experts, "mlp", None), "activation_fn", None)
    if activation is None:
        raise ModelError(f"The experts of {type(experts).__name__} are of a kind that this version cannot run.")

    if not getattr(experts, "has_gate", True):
        return family_gate(lambda gate_out, up_out: activation(gate_out), alone=True)

    def product(gate_out: torch.Tensor, up_out: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = activation(gate_out) * up_out
        return out

    return family_gate(product)


def _clamp_of(experts: nn.Module) -> tuple[float | None, float | None]:
    """The two numbers of a clamped gate, or the limit alone, by the names that families use for them."""
    for names in (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit")):
        alpha, limit = (getattr(experts, name, None) for name in names)
        if isinstance(limit, float | int):
            return float(alpha) if isinstance(alpha, float | int) else None, float(limit)
    return None, None


class _CalledGate:
    """Joins gate and up again and calls the library's ``_apply_gate`` on them."""

    def __init__(self, experts: Any, interleaved: bool) -> None:
        self._experts = experts
        self._interleaved = interleaved

    def __call__(self, gate_out: torch.Tensor, up_out: torch.Tensor) -> torch.Tensor:
        if self._interleaved:
            joined = torch.stack((gate_out, up_out), dim=-1).flatten(-2)
        else:
            joined = torch.cat((gate_out, up_out), dim=-1)
        out: torch.Tensor = self._experts._apply_gate(joined)
        return out


def replace_experts(model: nn.Module, places: list[ExpertsPlace], executor: Executor[torch.Tensor]) -> None:
    """Replace the modules at ``places`` by ours. The library's modules, which never had weights, are dropped."""
    for place in places:
        if _scales_input(place.block):
            _put(model, place.block_name, ScaledInputBlock(place.layer, executor, place.block))
            continue
        routed = RoutedExperts(place.layer, executor)
        setattr(place.block, "experts", routed)  # noqa: B010
        if executor.in_ring:
            if asks_early(place.block):
                _put(model, place.block_name, GatedSharedBlock(place.block, routed))
            else:
                overlap_shared(place.block, routed)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` at ``name`` in ``model``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _scales_input(block: nn.Module) -> bool:
    return type(block).__name__ == "Llama4TextMoe"


# --- shared experts during the exchange ------------------------------------------------------------------------------


SHARED = ("shared_expert", "shared_experts")
"""Families' names of the shared expert in the MoE block."""


_EARLY = ("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock")
"""Blocks that run their shared expert before the routed ones, all with the same operations."""


class DoesMeanwhile(Protocol):
    """A block's module of routed experts. Its next call runs ``meanwhile``, or nothing does."""

    meanwhile: Callable[[], None] | None


class SharedMeanwhile:
    """Runs ``shared``, a child of ``block``, during the exchange of ``experts``, and returns the result when it is
    asked for.

    This works only if the block gives it the block's own input, after the routed experts. Families that ask earlier get
    the result computed then. Those of :data:`_EARLY` have their own block here.
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
    """Whether :class:`GatedSharedBlock` can replace ``block``."""
    return type(block).__name__ in _EARLY


def overlap_shared(block: nn.Module, experts: DoesMeanwhile) -> None:
    """Compute the shared experts of ``block``, if it has any, while the exchange is under way."""
    for name in SHARED:
        shared = getattr(block, name, None)
        if isinstance(shared, nn.Module):
            SharedMeanwhile(block, shared, experts)
