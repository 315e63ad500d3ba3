"""Each family's routing of hidden states, and the terms that it adds to the experts' weighted sum.

The arithmetic follows mlx-lm's blocks operation by operation, in their order, so that the sums are the same to the bit.
The executor computes only the product with the weights and the sum over the k routes, which are the same for all
families. A family's record names its routing by a key of ``ROUTES``, and the kind of its shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.kimi_linear import _group_expert_select as select_in_groups
from mlx_lm.models.mistral4 import mistral4_expert_select
from mlx_lm.models.phimoe import sparsemixer

from engine.models.architectures.record import SharedExpert

Array = Any
Block = Any
"""An mlx-lm module: the MoE block of a decoder layer."""

Routes = tuple[Array, Array]
"""(indices [..., k], weights [..., k]) for hidden states [..., hidden]."""
Route = Callable[..., Routes]
"""Given a block, hidden states, and whatever else the layer gives its block."""


def _top(scores: Array, k: int) -> Array:
    return mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k]


def _last(scores: Array, k: int) -> Array:
    # The same set as _top in another order: the order of a floating-point sum.
    return mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]


def _softmax_of_best(block: Block, hidden: Array) -> Routes:
    gates = block.gate(hidden)
    indices = _top(gates, block.num_experts_per_tok)
    return indices, mx.softmax(mx.take_along_axis(gates, indices, axis=-1), axis=-1, precise=True)


def _best_of_softmax(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.gate(hidden), axis=-1, precise=True)
    indices = _top(gates, block.top_k)
    return indices, mx.take_along_axis(gates, indices, axis=-1)


def _last_of_softmax(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.gate(hidden), axis=-1, precise=True)
    indices = _last(gates, block.top_k)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    return indices, weights / mx.sum(weights, axis=-1, keepdims=True) if block.norm_topk_prob else weights


def _normalised_best(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.gate(hidden), axis=-1, precise=True)
    indices = _top(gates, block.top_k)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    return indices, weights / weights.sum(axis=-1, keepdims=True) if block.norm_topk_prob else weights


def _softmax_of_last(block: Block, hidden: Array) -> Routes:
    gates = block.router(hidden)
    indices = _last(gates, block.num_experts_per_tok)
    return indices, mx.softmax(mx.take_along_axis(gates, indices, axis=-1), axis=-1, precise=True)


def _own_gate(block: Block, hidden: Array) -> Routes:
    indices, weights = block.gate(hidden)
    return indices, weights


def _own_router(block: Block, hidden: Array) -> Routes:
    indices, weights = block.router(hidden)
    return indices, weights


def _sparsemixer(block: Block, hidden: Array) -> Routes:
    indices, weights = sparsemixer(block.gate(hidden), top_k=block.top_k, jitter_eps=block.jitter_eps)
    return indices, weights


def _best_by_length(block: Block, hidden: Array) -> Routes:
    gates = mx.softmax(block.router(hidden).astype(mx.float32), axis=-1)
    indices = _top(gates, block.num_experts_per_tok)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    weights = weights / mx.linalg.norm(weights, ord=1, axis=-1, keepdims=True)
    return indices, weights.astype(hidden.dtype)


def _last_of_corrected(block: Block, hidden: Array) -> Routes:
    gates = mx.sigmoid(block.gate(hidden))
    scores = gates.astype(mx.float32) + block.expert_bias if block.use_expert_bias else gates
    indices = _last(scores, block.top_k)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    if block.norm_topk_prob:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-6)
    return indices, (weights * block.routed_scaling_factor).astype(hidden.dtype)


def _best_of_corrected(block: Block, hidden: Array) -> Routes:
    gates = mx.sigmoid(block.gate(hidden.astype(mx.float32)))
    indices = _top(gates + block.e_score_correction_bias, block.num_experts_per_tok)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    return indices, (weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-20)).astype(hidden.dtype)


def _best_of_biased(block: Block, hidden: Array) -> Routes:
    scores = mx.sigmoid(block.router(hidden).astype(mx.float32))
    indices = _top(scores + block.expert_bias, block.num_experts_per_tok)
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if block.num_experts_per_tok > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return indices, weights * block.route_scale


def _grouped_softmax(block: Block, hidden: Array) -> Routes:
    args = block.args
    groups = args.n_group, args.topk_group
    indices, weights = mistral4_expert_select(
        block.gate(hidden), block.num_experts_per_tok, *groups, args.routed_scaling_factor, args.norm_topk_prob
    )
    return indices, weights


def _best_of_groups(block: Block, hidden: Array) -> Routes:
    args = block.args
    indices, weights = select_in_groups(
        block.gate(hidden),
        block.e_score_correction_bias,
        args.num_experts_per_token,
        args.num_expert_group,
        args.topk_group,
        args.routed_scaling_factor,
        args.moe_renormalize,
        args.moe_router_activation_func,
    )
    return indices, weights


def _given(block: Block, hidden: Array, indices: Array, weights: Array) -> Routes:
    """Gemma's layers route themselves, as the router and the experts get the same hidden states with other norms."""
    return indices, weights


def _nothing(block: Block, hidden: Array) -> Array | None:
    return None


def _gated_shared_expert(block: Block, hidden: Array) -> Array | None:
    return mx.sigmoid(block.shared_expert_gate(hidden)) * block.shared_expert(hidden)


def _shared_experts(block: Block, hidden: Array) -> Array | None:
    name = next((name for name in ("shared_experts", "share_expert") if name in block), None)
    return None if name is None else block[name](hidden)


ROUTES: dict[str, Route] = {
    "softmax-of-best": _softmax_of_best,
    "softmax-of-last": _softmax_of_last,
    "best-of-softmax": _best_of_softmax,
    "last-of-softmax": _last_of_softmax,
    "normalised-best-of-softmax": _normalised_best,
    "best-of-softmax-by-length": _best_by_length,
    "last-of-corrected-sigmoids": _last_of_corrected,
    "best-of-corrected-sigmoids": _best_of_corrected,
    "best-of-biased-sigmoids": _best_of_biased,
    "best-of-grouped-softmax": _grouped_softmax,
    "best-of-groups": _best_of_groups,
    "sparsemixer": _sparsemixer,
    "own-gate": _own_gate,
    "own-router": _own_router,
    "given": _given,
}
"""Ways to route, by the names that records give them."""
SHARED: dict[SharedExpert, Callable[[Block, Array], Array | None]] = {
    "none": _nothing,
    "gated": _gated_shared_expert,
    "plain": _shared_experts,
    "network": _nothing,
}
"""The terms that blocks add to the routed sum."""
