"""What beams cost: memory of keys and values, and time of one step, predicted before anything runs.

Decoding is bound by the bytes read per step, so the time of a step is taken as proportional to them:

    bytes(W) = trunk + experts(W) * bytes per expert + W * context * key/value bytes per token

where experts(W) is the expected number of distinct experts that W beams use, summed over the MoE layers, if each
beam's ``k`` experts were drawn evenly: per layer E * (1 - (1 - k/E)**W). Beams that resemble one another use fewer, so
this errs on the side of saying too much. All memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CUT_BACK_TOKENS = 1024
"""Tokens before the last prefill chunk to which a row can always be cut back. An answer is kept whole until the next
prompt is prefilled, because a template may drop the thoughts at its beginning. Tokens that no window reaches from there
may be forgotten."""

_NOT_YET_DROPPED = 256
"""Tokens outside the window that a row still keeps: dropping so few is not worth copying the others."""


@dataclass(frozen=True)
class ModelCosts:
    """The sizes of a model that the predictions need. ``expert_bytes`` is all routed experts of all MoE layers."""

    trunk_bytes: int
    expert_bytes: int
    moe_layers: int
    experts: int
    experts_per_token: int
    key_value_bytes_per_token: int
    state_bytes: int = 0
    """Bytes of a row's states, which do not depend on its length."""
    unseen_bytes: int = 0
    """Bytes of keys and values that a row drops because its windows do not reach them."""


@dataclass(frozen=True)
class BeamCost:
    """``relative_step_time`` is the predicted time of one step, with one beam as 1.0."""

    width: int
    memory_bytes: int
    fits: bool
    relative_step_time: float


def windowed_tokens(window: int, chunk: int) -> int:
    """Maximum tokens of a prompt, prefilled by ``chunk``, that a layer with a ``window`` keeps."""
    return window + CUT_BACK_TOKENS + chunk + _NOT_YET_DROPPED


def unseen_bytes(tokens: int, window: int, bytes_per_token: int, chunk: int) -> int:
    """Minimum bytes of a prompt of ``tokens``, prefilled by ``chunk``, that layers with a ``window`` have dropped.
    These layers take ``bytes_per_token``."""
    return bytes_per_token * max(0, tokens - windowed_tokens(window, chunk))


def beam_memory(
    width: int, prompt_tokens: int, new_tokens: int, key_value_bytes_per_token: int, state_bytes: int = 0
) -> int:
    """Bytes of keys, values and ``state_bytes`` per row, while ``width`` beams grow to ``new_tokens`` each.

    Beams have rows of their own. The prompt's row stays beside them, so that the next question can start from it. At
    the end the winner's row is copied and replaces the prompt's row.
    """
    rows = 1 if width == 1 else width + 1
    return rows * ((prompt_tokens + new_tokens) * key_value_bytes_per_token + state_bytes)


def extra_beam_memory(
    width: int,
    prompt_tokens: int,
    new_tokens: int,
    key_value_bytes_per_token: int,
    cached_tokens: int,
    state_bytes: int = 0,
) -> int:
    """Additional bytes that the beams need if ``cached_tokens`` of the prompt are in the cache already."""
    whole = beam_memory(width, prompt_tokens, new_tokens, key_value_bytes_per_token, state_bytes)
    return max(0, whole - cached_tokens * key_value_bytes_per_token - (state_bytes if cached_tokens else 0))


def longest_answer(
    width: int,
    prompt_tokens: int,
    available_bytes: int,
    key_value_bytes_per_token: int,
    cached_tokens: int,
    state_bytes: int = 0,
) -> int:
    """The largest number of new tokens per beam for which :func:`extra_beam_memory` is within ``available_bytes``.

    -1 if not even the prompt's copies fit.
    """
    rows = 1 if width == 1 else width + 1
    available_bytes -= state_bytes * (rows - (1 if cached_tokens else 0))
    if available_bytes < 0:
        return -1
    if key_value_bytes_per_token <= 0:
        return 2**62
    tokens = available_bytes // key_value_bytes_per_token + cached_tokens
    return max(-1, tokens // rows - prompt_tokens)


def expected_distinct_experts(experts: int, per_token: int, rows: int) -> float:
    """Expected number of ``experts`` that ``rows`` tokens use, if each uses ``per_token`` different experts."""
    if experts == 0:
        return 0.0
    share = min(per_token, experts) / experts
    return experts * (1.0 - (1.0 - share) ** rows)


def step_bytes(costs: ModelCosts, width: int, context_tokens: int) -> float:
    """Bytes read in one step of ``width`` beams, each with ``context_tokens`` tokens in the cache."""
    per_expert = costs.expert_bytes / (costs.experts * costs.moe_layers) if costs.experts and costs.moe_layers else 0.0
    distinct = expected_distinct_experts(costs.experts, costs.experts_per_token, width)
    kept = context_tokens * costs.key_value_bytes_per_token - costs.unseen_bytes
    cache = width * (kept + 2 * costs.state_bytes)
    return costs.trunk_bytes + costs.moe_layers * distinct * per_expert + cache


def estimate_beams(
    costs: ModelCosts, widths: Iterable[int], context_tokens: int, cached_tokens: int, available_bytes: int
) -> list[BeamCost]:
    """The cost of each width for beams of ``context_tokens`` tokens, the conversation's included, of which
    ``cached_tokens`` are in memory now."""
    one_beam = step_bytes(costs, 1, context_tokens)
    estimates = []
    for width in widths:
        per_token, state = costs.key_value_bytes_per_token, costs.state_bytes - costs.unseen_bytes
        extra = extra_beam_memory(width, context_tokens, 0, per_token, cached_tokens, state)
        estimates.append(
            BeamCost(
                width=width,
                memory_bytes=beam_memory(width, context_tokens, 0, per_token, state),
                fits=extra <= available_bytes,
                relative_step_time=step_bytes(costs, width, context_tokens) / one_beam if one_beam else 1.0,
            )
        )
    return estimates
