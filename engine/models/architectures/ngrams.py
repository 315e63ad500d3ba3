"""Rows of tables of n-grams (qwen4_exp): which of them stand for a token and those before it.

Each head of an n-gram has its own part of the table, as long as a prime. A row is found by a hash: the tokens, each
multiplied by a number of its own place, joined by exclusive or, modulo that prime. Both kinds of numbers follow from
the settings.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import damaged, shown
from engine.models.architectures.config_values import whole_number

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""What splitmix64 adds for each number."""
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of splitmix64."""
_APART = 10007
"""What the seeds of two tables differ by."""

_MOST_TOKENS, _MOST_HEADS = 64, 256
"""Largest n-gram, and most heads of all tables, that are taken for real."""
_LARGEST_BASE = 1 << 31


@dataclass(frozen=True)
class NgramHash:
    """The hash of one table. ``multipliers`` [tokens]: one for each place of the longest n-gram, the latest token's
    first. ``sizes``, ``offsets`` [heads]: rows of each head's part, and where it begins. ``end``: the token that ends a
    text; nothing before it counts."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    heads_each: int
    end: int

    @property
    def tokens(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def rows(self) -> int:
        """Rows that the heads' parts take."""
        return self.offsets[-1] + self.sizes[-1]

    def rows_of(self, before: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows [texts, n, heads] of the tokens ``ids`` [texts, n], which follow ``before`` [texts, tokens - 1]."""
        history = np.concatenate([before, ids], axis=1)
        count, first = ids.shape[1], before.shape[1]
        ended = np.zeros(ids.shape, bool)
        mixed = np.zeros(ids.shape, np.int64)
        rows = []
        for place, multiplier in enumerate(self.multipliers):
            tokens = history[:, first - place : first - place + count]
            if place:
                ended |= tokens == self.end
            mixed = mixed ^ np.where(ended, self.end, tokens) * np.int64(multiplier)
            if place:
                heads = slice((place - 1) * self.heads_each, place * self.heads_each)
                rows.append(mixed[..., None] % np.array(self.sizes[heads]) + np.array(self.offsets[heads]))
        return np.concatenate(rows, axis=-1)


def ngram_hashes(config: Mapping[str, Any]) -> tuple[NgramHash, ...]:
    """The hash of each table, in the order of their layers. Raises ModelError naming a setting that is missing or
    impossible."""
    count = len(set(config["ple_layer_ids"]))
    tokens = whole_number(config, "ngram_size", minimum=2, maximum=_MOST_TOKENS)
    heads_each = whole_number(config, "heads_per_ngram", maximum=_MOST_HEADS)
    base = whole_number(config, "ngram_vocab_size_base", maximum=_LARGEST_BASE)
    vocabulary = whole_number(config, "vocab_size")
    seed, ends = config.get("seed"), config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if not isinstance(seed, int) or not isinstance(end, int) or not 0 <= end < vocabulary:
        raise damaged(f"config.json gives {shown(seed)} for seed and {shown(ends)} for eos_token_id, not numbers")
    heads = (tokens - 1) * heads_each
    if count * heads > _MOST_HEADS:
        raise damaged(f"config.json gives {count} tables of n-grams with {heads} heads each, over {_MOST_HEADS} in all")
    sizes = _primes(base, count * heads)
    return tuple(
        NgramHash(
            multipliers=_multipliers(vocabulary, tokens, seed + _APART * table),
            sizes=(own := sizes[table * heads : (table + 1) * heads]),
            offsets=(0, *itertools.accumulate(own[:-1])),
            heads_each=heads_each,
            end=end,
        )
        for table in range(count)
    )


def _multipliers(vocabulary: int, tokens: int, seed: int) -> tuple[int, ...]:
    """Odd numbers, such that their products with tokens fit into 64 bits."""
    half = max(1, ((1 << 63) - 1) // vocabulary // 2)
    return tuple(2 * (_mixed(seed + _STEP * place) % half) + 1 for place in range(1, tokens + 1))


def _mixed(value: int) -> int:
    """The number that splitmix64 makes of ``value``."""
    value = (value + _STEP) & _WORD
    for shift, factor in _FACTORS:
        value = ((value ^ (value >> shift)) * factor) & _WORD
    return value ^ (value >> 31)


@functools.cache
def _primes(least: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes from ``least`` on."""
    primes: list[int] = []
    candidate = max(least, 2)
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def _is_prime(value: int) -> bool:
    if value % 2 == 0:
        return value == 2
    return all(value % divisor for divisor in range(3, int(value**0.5) + 1, 2))
