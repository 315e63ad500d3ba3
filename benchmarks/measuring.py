"""What is measured, how figures become medians and ratios, and how they are printed. Pure: no clock, no processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OURS = "privatellm"
REFERENCE = "transformers-eager"
PREFILL_ONLY = frozenset({"llama.cpp, all logits"})
"""Variants that differ from another of the same engine in nothing but prefill."""


@dataclass(frozen=True)
class Measure:
    """One thing to time: ``rows`` rows stepped after a prompt, or (``rows`` 0) a prompt of ``tokens`` tokens."""

    name: str
    rows: int = 0
    tokens: int = 0

    @property
    def tokens_per_pass(self) -> int:
        return self.rows or self.tokens


MEASURES = (
    Measure("decode", rows=1),
    Measure("4 rows", rows=4),
    Measure("8 rows", rows=8),
    Measure("12 rows", rows=12),
    Measure("prefill 64", tokens=64),
    Measure("prefill 512", tokens=512),
)


@dataclass(frozen=True)
class Spread:
    """The median over the rounds of a run, and the range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError if ``values`` is empty."""
        if not values:
            raise ValueError("no value was measured")
        return cls(statistics.median(values), min(values), max(values))


Samples = dict[str, dict[str, list[float]]]
"""[engine variant][measure] -> seconds per forward pass, one figure per round, in the order of the rounds."""


def speed_ratio(samples: Samples, measure: str, other: str, ours: str = OURS) -> Spread:
    """How many times as fast ``ours`` is as ``other``: ratio of the medians, and the range of the rounds' ratios."""
    own, theirs = samples[ours][measure], samples[other][measure]
    rounds = [b / a for a, b in zip(own, theirs, strict=True)]
    return Spread(statistics.median(theirs) / statistics.median(own), min(rounds), max(rounds))


@dataclass(frozen=True)
class Comparison:
    """The logits of one engine beside the reference's, over all positions that were compared."""

    variant: str
    cosine: float
    """The smallest cosine of any position."""
    equal_choices: int
    positions: int
    near_ties: int
    """Positions whose likeliest token differs, but whose two candidates the reference itself holds for nearly equal."""

    def __str__(self) -> str:
        return (
            f"{self.variant}: smallest cosine {self.cosine:.6f}, same choice in {self.equal_choices} of "
            f"{self.positions} positions, {self.near_ties} near ties"
        )

    @property
    def equal(self) -> bool:
        return self.cosine >= MIN_COSINE and self.equal_choices + self.near_ties == self.positions


MIN_COSINE = 0.998
NEAR_TIE = 0.02
"""Two logits are nearly equal if they differ by less than this share of the largest: what bfloat16 leaves."""


def compare_logits(variant: str, found: NDArray[np.float64], reference: NDArray[np.float64]) -> Comparison:
    """Compare [positions, vocabulary] logits with those of the reference. Raises ValueError if the shapes differ."""
    if found.shape != reference.shape:
        raise ValueError(f"{variant} gave logits {found.shape}, the reference {reference.shape}")
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(reference, axis=1)
    cosines = np.sum(found * reference, axis=1) / norms
    equal = ties = 0
    for row, expected in zip(found, reference, strict=True):
        ours, theirs = int(row.argmax()), int(expected.argmax())
        if ours == theirs:
            equal += 1
        elif expected[theirs] - expected[ours] <= NEAR_TIE * np.abs(expected).max():
            ties += 1
    return Comparison(variant, float(cosines.min()), equal, len(found), ties)


def bytes_per_token(config: dict[str, int], tied: bool = False) -> int:
    """Weight bytes a single token's decoding step reads in a Mixtral-shaped bfloat16 model: trunk and routed experts.

    The embedding counts as one row; a tied one is read whole, as the head. Norms and biases are left out.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = 2 * hidden * query + 2 * hidden * key_value
    router = hidden * config["num_local_experts"]
    experts = config["num_experts_per_tok"] * 3 * hidden * config["intermediate_size"]
    embedding = 0 if tied else hidden
    return 2 * (config["num_hidden_layers"] * (attention + router + experts) + vocabulary * hidden + embedding)


def _milliseconds(values: Sequence[float]) -> str:
    spread = Spread.of([1000 * value for value in values])
    digits = 0 if spread.median >= 100 else 1 if spread.median >= 10 else 2
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def markdown(title: str, samples: Samples, measures: Sequence[Measure]) -> str:
    """Two tables: milliseconds per forward pass of every engine, and how many times as fast the product is."""

    def cell(variant: str, measure: Measure) -> str:
        values = samples[variant].get(measure.name)
        return "–" if values is None else _milliseconds(values)

    def ratio(other: str, measure: Measure) -> str:
        return _ratio(speed_ratio(samples, measure.name, other)) if measure.name in samples[other] else "–"

    others = [variant for variant in samples if variant != OURS]
    variants = [OURS, *others] if OURS in samples else others
    lines = [f"### {title}", "", "Milliseconds per forward pass: median (lowest–highest round)", ""]
    lines += _table(
        ["", *variants, *([f"{OURS}, tokens/s"] if OURS in samples else [])],
        [
            [
                measure.name,
                *(cell(variant, measure) for variant in variants),
                *([_tokens_per_second(samples, measure)] if OURS in samples else []),
            ]
            for measure in measures
        ],
    )
    if OURS in samples and others:
        lines += ["", f"Speed of {OURS} relative to each (above 1: faster): ratio of medians (range over rounds)", ""]
        rows = [[measure.name, *(ratio(other, measure) for other in others)] for measure in measures]
        lines += _table(["", *others], rows)
    return "\n".join(lines)


def _tokens_per_second(samples: Samples, measure: Measure) -> str:
    return f"{measure.tokens_per_pass / statistics.median(samples[OURS][measure.name]):.1f}"


def read_fraction(samples: Samples, rates: Sequence[float], nbytes: int) -> list[str]:
    """One line per engine: the rate at which its decoding reads weights, as a share of the streaming-read rate."""
    rate = Spread.of([value / 1e9 for value in rates])
    lines = [
        f"Streaming read in the same run: {rate.median:.1f} GB/s ({rate.low:.1f}–{rate.high:.1f}). "
        f"A decoded token reads {nbytes / 1e9:.3f} GB of weights.",
        "",
    ]
    for variant, measured in samples.items():
        if "decode" in measured:
            achieved = nbytes / statistics.median(measured["decode"]) / 1e9
            lines.append(f"- {variant}: {achieved:.1f} GB/s, {achieved / rate.median:.0%} of it")
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
