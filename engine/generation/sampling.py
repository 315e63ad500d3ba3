"""Choosing the next token from logits: greedy, or drawn after temperature, top-k, top-p and min-p, in that order.

The order and the exact rule of each filter are those of transformers' logits processors, so a seedless comparison of
which tokens survive is exact; the draw itself uses numpy's generator and is reproducible from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.messages import Sampling
from engine.runtimes.protocol import Logits

_SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingRule:
    """A complete rule. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _in_range(name: str, value: float, low: float, high: float, advice: str) -> float:
    if not math.isfinite(value) or not low <= value <= high:
        raise ModelError(f"{name} is {value}, which is not {advice}.", kind="bad-input")
    return value


def sampling_rule(asked: Sampling, defaults: Mapping[str, Any]) -> SamplingRule:
    """What ``asked`` means for a model whose ``generation_config.json`` holds ``defaults``.

    What was not asked for is taken from the model. A model that does not ask for sampling is decoded greedily, unless
    a filter was asked for: then the temperature is 1.
    Raises ModelError (bad-input) for a value that means nothing.
    """
    wants_filter = any(value is not None for value in (asked.top_p, asked.top_k, asked.min_p))
    model_samples = bool(defaults.get("do_sample", False))

    def default(name: str, otherwise: float) -> float:
        value = defaults.get(name) if model_samples else None
        return otherwise if value is None else float(value)

    temperature = asked.temperature
    if temperature is None:
        temperature = default("temperature", 1.0 if model_samples or wants_filter else 0.0)
    top_k = int(default("top_k", 0)) if asked.top_k is None else asked.top_k
    top_p = default("top_p", 1.0) if asked.top_p is None else asked.top_p
    min_p = default("min_p", 0.0) if asked.min_p is None else asked.min_p
    _in_range("Temperature", temperature, 0.0, 100.0, "between 0 (greedy) and 100")
    _in_range("Top-p", top_p, 0.0, 1.0, "a probability between 0 and 1")
    _in_range("Min-p", min_p, 0.0, 1.0, "a probability between 0 and 1")
    if top_k < 0:
        raise ModelError(f"Top-k is {top_k}, which is not a number of tokens (0 means all).", kind="bad-input")
    if asked.seed is not None and not 0 <= asked.seed < _SEED_LIMIT:
        raise ModelError(f"The seed is {asked.seed}, which is not between 0 and 2**64 - 1.", kind="bad-input")
    return SamplingRule(temperature, top_k, top_p, min_p, asked.seed)


def greedy_token(logits: Logits) -> int:
    """The most likely token; the lowest id among equals.

    Raises ModelError if the logits are not numbers: continuing would be nonsense said with confidence.
    """
    token = int(np.argmax(logits))
    if not math.isfinite(float(logits[token])):
        raise ModelError(
            f"The model computed {float(logits[token])} where a score was expected; "
            "its weights are damaged or its dtype is too narrow: try --dtype float32."
        )
    return token


def largest(values: Logits, count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` largest of [n], and of all that equal the last of them, ascending. ``1 <= count``."""
    if count >= len(values):
        return np.arange(len(values))
    candidates = np.arange(len(values))
    block = len(values) // (8 * count)
    if block > 1:
        # The count-th largest of the maxima of blocks is no more than the count-th largest value: one fast pass
        # leaves a few candidates to sort, where partitioning a large vocabulary costs milliseconds.
        maxima = values[: block * 8 * count].reshape(8 * count, block).max(axis=1)
        candidates = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
    among = values[candidates]
    found: NDArray[np.int64] = candidates[among >= np.partition(among, -count)[-count]]
    return found


def surviving_tokens(logits: Logits, rule: SamplingRule) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that may be drawn and their probabilities, which sum to 1.

    ``logits`` is [vocabulary]; ``rule`` must not be greedy. The order is unspecified, but the same for the same input.
    """
    scaled = logits.astype(np.float32) / np.float32(rule.temperature)
    tokens = np.arange(scaled.shape[0])
    if 0 < rule.top_k < scaled.shape[0]:
        tokens = largest(scaled, rule.top_k)
    values = scaled[tokens].astype(np.float64)
    best = values.max()
    probabilities = np.exp(values - best)
    probabilities /= probabilities.sum()
    if rule.top_p < 1.0:
        kept = _nucleus(probabilities, rule.top_p)
        tokens, values, probabilities = tokens[kept], values[kept], probabilities[kept]
    if rule.min_p > 0.0:
        kept = np.flatnonzero(values >= best + math.log(rule.min_p))
        tokens, probabilities = tokens[kept], probabilities[kept]
    return tokens.astype(np.int64), probabilities / probabilities.sum()


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the likeliest tokens, likeliest first: kept while a token and all less likely hold over 1 - top_p."""
    rest = 1.0 - top_p
    # A token and all less likely hold at most its probability times their number, so most of a large vocabulary
    # drops out before the sort. (The likeliest never does, but for rounding.)
    candidates = np.flatnonzero(probabilities >= rest / len(probabilities) * (1.0 - 1e-9))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    dropped = max(0.0, 1.0 - float(probabilities[order].sum()))
    tail = np.cumsum(probabilities[order][::-1])[::-1] + dropped
    return order[: max(1, int(np.count_nonzero(tail > rest)))]


class Sampler:
    """Draws tokens by one rule; the same seed gives the same tokens for the same logits."""

    def __init__(self, rule: SamplingRule) -> None:
        self.rule = rule
        self._random = np.random.default_rng(rule.seed)

    def choose(self, logits: Logits) -> int:
        """The next token for ``logits`` [vocabulary]. Raises ModelError if they are not finite at the top."""
        best = greedy_token(logits)
        if self.rule.greedy:
            return best
        tokens, probabilities = surviving_tokens(logits, self.rule)
        point = self._random.random()
        index = int(np.searchsorted(np.cumsum(probabilities), point, side="right"))
        return int(tokens[min(index, len(tokens) - 1)])
