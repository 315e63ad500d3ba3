"""Choosing the next token on the GPU, by the rules of :mod:`engine.generation.sampling`, lazily.

Nothing here waits for the GPU: the chosen token can enter the next step before the host has seen it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from engine.generation.sampling import SamplingRule

Array = Any

_COLDEST = 1e-30
"""Lowest temperature in use, as on the host. Below it only the likeliest tokens have a weight in float32."""


def draw_token(logits: Array, rule: SamplingRule, key: Array | None) -> Array:
    """The next token [1] for ``logits`` [1, vocabulary] in float32; ``key`` is mlx's random key, which greedy decoding
    does not use."""
    if rule.greedy:
        return mx.argmax(logits, axis=-1)
    return mx.random.categorical(surviving(logits, rule), key=key)


def surviving(logits: Array, rule: SamplingRule) -> Array:
    """The logarithms [1, vocabulary] of what the tokens weigh, the likeliest 0, and -inf for those not to be drawn."""
    weights = (logits - mx.max(logits, axis=-1, keepdims=True)) / max(rule.temperature, _COLDEST)
    nothing = mx.array(-mx.inf, mx.float32)
    likeliest = weights
    if 0 < rule.top_k < logits.shape[-1]:
        likeliest = mx.topk(weights, rule.top_k, axis=-1)
        weights = mx.where(weights >= mx.min(likeliest, axis=-1, keepdims=True), weights, nothing)
    if rule.top_p < 1.0:
        # Of the vocabulary only what top-k left is sorted; who weighs as much as the last one that stays, stays too.
        held = -mx.sort(-likeliest, axis=-1)
        masses = mx.exp(held)
        inside = mx.cumsum(masses, axis=-1) - masses < rule.top_p * mx.sum(mx.exp(weights), axis=-1, keepdims=True)
        # The likeliest token, which weighs 0, always stays.
        last = mx.min(mx.where(inside, held, mx.array(0.0)), axis=-1, keepdims=True)
        weights = mx.where(weights >= last, weights, nothing)
    if rule.min_p > 0.0:
        weights = mx.where(mx.exp(weights) >= rule.min_p, weights, nothing)
    return weights


def are_scores(logits: Array) -> Array:
    """Whether ``logits`` [1, vocabulary] are numbers, and the highest is finite: [1]."""
    return ~mx.any(mx.isnan(logits), axis=-1) & mx.isfinite(mx.max(logits, axis=-1))
