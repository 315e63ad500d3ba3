"""Each family's routing of hidden states, and the terms that it adds to the experts' weighted sum.

The arithmetic follows mlx-lm's blocks operation by operation, in their order, so that the sums are the same to the bit.
The executor computes only the product with the weights and the sum over the k routes, which are the same for all
families. A family is one entry of ``LAYOUTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.phimoe import sparsemixer

Array = Any
Block = Any
"""An mlx-lm module: the MoE block of a decoder layer."""

Routes = tuple[Array, Array]
"""(indices [..., k], weights [..., k]) for hidden states [..., hidden]."""
Route = Callable[..., Routes]
"""Given a block, hidden states, and whatever else the layer gives its block."""


@dataclass(frozen=True)
class Layout:
    """A family's MoE layer: the attribute of its MoE block in a decoder layer (``block``), of the routed experts in
    that block (``experts``), its routing, and the terms that it adds to the routed sum (shared experts)."""

    block: str
    experts: str
    route: Route
    shared: Callable[[Block, Array], Array | None]


def _top(scores: Array, k: int) -> Array:
    return mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k]


def _last(scores: Array, k: int) -> Array:
    # The same set as _top in another order: the order of a floating-point sum.
    return mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]


def _mixtral(block: Block, hidden: Array) -> Routes:
    gates = block.gate(hidden)
    indices = _top(gates, block.num_experts_per_tok)
    return indices, mx.softmax(mx.take_along_axis(gates, indices, axis=-1), axis=-1, precise=True)


def _qwen2_moe(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.gate(hidden), axis=-1, precise=True)
    indices = _top(gates, block.top_k)
    return indices, mx.take_along_axis(gates, indices, axis=-1)


def _qwen3_moe(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.gate(hidden), axis=-1, precise=True)
    indices = _last(gates, block.top_k)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    return indices, weights / mx.sum(weights, axis=-1, keepdims=True) if block.norm_topk_prob else weights


def _olmoe(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.gate(hidden), axis=-1, precise=True)
    indices = _top(gates, block.top_k)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    return indices, weights / weights.sum(axis=-1, keepdims=True) if block.norm_topk_prob else weights


def _gpt_oss(block: Block, hidden: Array) -> Routes:
    gates = block.router(hidden)
    indices = _last(gates, block.num_experts_per_tok)
    return indices, mx.softmax(mx.take_along_axis(gates, indices, axis=-1), axis=-1, precise=True)


def _own_gate(block: Block, hidden: Array) -> Routes:
    indices, weights = block.gate(hidden)
    return indices, weights


def _granitemoe(block: Block, hidden: Array) -> Routes:
    indices, weights = block.router(hidden)
    return indices, weights


def _phimoe(block: Block, hidden: Array) -> Routes:
    indices, weights = sparsemixer(block.gate(hidden), top_k=block.top_k, jitter_eps=block.jitter_eps)
    return indices, weights


def _dbrx(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.router(hidden).astype(mx.float32), axis=-1)
    indices = _top(gates, block.num_experts_per_tok)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    weights = weights / mx.linalg.norm(weights, ord=1, axis=-1, keepdims=True)
    return indices, weights.astype(hidden.dtype)


def _lfm2_moe(block: Block, hidden: Array) -> Routes:
    gates = mx.sigmoid(block.gate(hidden))
    scores = gates.astype(mx.float32) + block.expert_bias if block.use_expert_bias else gates
    indices = _last(scores, block.top_k)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    if block.norm_topk_prob:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-6)
    return indices, (weights * block.routed_scaling_factor).astype(hidden.dtype)


def _given(block: Block, hidden: Array, indices: Array, weights: Array) -> Routes:
    """Gemma's layers route themselves, as the router and the experts get the same hidden states with other norms."""
    return indices, weights


def _nothing(block: Block, hidden: Array) -> Array | None:
    return None


def _gated_shared_expert(block: Block, hidden: Array) -> Array | None:
    return mx.sigmoid(block.shared_expert_gate(hidden)) * block.shared_expert(hidden)


def _shared_experts(block: Block, hidden: Array) -> Array | None:
    return block.shared_experts(hidden) if "shared_experts" in block else None


LAYOUTS: dict[str, Layout] = {
    "mixtral": Layout("block_sparse_moe", "switch_mlp", _mixtral, _nothing),
    "qwen2_moe": Layout("mlp", "switch_mlp", _qwen2_moe, _gated_shared_expert),
    "qwen3_moe": Layout("mlp", "switch_mlp", _qwen3_moe, _nothing),
    "olmoe": Layout("mlp", "switch_mlp", _olmoe, _nothing),
    "gpt_oss": Layout("mlp", "experts", _gpt_oss, _nothing),
    "deepseek_v3": Layout("mlp", "switch_mlp", _own_gate, _shared_experts),
    "granitemoe": Layout("block_sparse_moe", "switch_mlp", _granitemoe, _nothing),
    "phimoe": Layout("block_sparse_moe", "switch_mlp", _phimoe, _nothing),
    "glm4_moe": Layout("mlp", "switch_mlp", _own_gate, _shared_experts),
    "glm4_moe_lite": Layout("mlp", "switch_mlp", _own_gate, _shared_experts),
    "dbrx": Layout("ffn", "experts", _dbrx, _nothing),
    "qwen3_next": Layout("mlp", "switch_mlp", _qwen3_moe, _gated_shared_expert),
    "qwen3_5_moe_text": Layout("mlp", "switch_mlp", _qwen3_moe, _gated_shared_expert),
    "lfm2_moe": Layout("feed_forward", "switch_mlp", _lfm2_moe, _nothing),
    "gemma4_text": Layout("experts", "switch_glu", _given, _nothing),
}
"""Layouts of the families with routed experts, by the family's name."""
