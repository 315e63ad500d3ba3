"""What is measured, how figures become medians and ratios, and how they are printed. Pure: no clock, no processes."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.packed_tensors import PackedTensor
from engine.calibration.samples import Spread
from engine.models.architectures.families import stated_experts_per_token

OURS = "privatellm"
REFERENCE = "transformers-eager"
IK, IK_REPACKED = "ik_llama.cpp", "ik_llama.cpp, repacked"
PREFILL_ONLY = frozenset({"llama.cpp, all logits"})
"""Variants that differ from another of the same engine in nothing but prefill."""
DECODE_ONLY = frozenset({"mlx-lm"}) if sys.platform != "darwin" else frozenset()
"""Variants too slow for anything but decoding one row: mlx off Apple Silicon is there to check results."""

RUN_TOGETHER = frozenset({"privatellm", "llama.cpp", "llama.cpp, in place", IK, IK_REPACKED})
"""Variants that step texts of different lengths in one pass."""


@dataclass(frozen=True)
class Measure:
    """One thing to time: ``rows`` rows stepped after a prompt, or (``rows`` 0) a prompt of ``tokens`` tokens."""

    name: str
    rows: int = 0
    tokens: int = 0
    apart: bool = False
    """Whether each row goes on from a prompt of its own, as the answers of several programs do."""

    def of(self, variant: str) -> bool:
        """Whether it is measured for ``variant``."""
        if variant in PREFILL_ONLY:
            return self.rows == 0
        if self.apart and variant not in RUN_TOGETHER:
            return False
        return self.rows == 1 or variant not in DECODE_ONLY

    @property
    def tokens_per_pass(self) -> int:
        return self.rows or self.tokens


MEASURES = (
    Measure("decode", rows=1),
    Measure("4 rows", rows=4),
    Measure("8 rows", rows=8),
    Measure("12 rows", rows=12),
    *(Measure(f"{answers} answers", rows=answers, apart=True) for answers in (2, 4, 8, 16)),
    Measure("prefill 64", tokens=64),
    Measure("prefill 512", tokens=512),
)


Samples = dict[str, dict[str, list[float]]]
"""[engine variant][measure] -> seconds per forward pass, one figure per round, in the order of the rounds."""


def time_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Our time relative to theirs: ratio of the medians, and the range of the rounds' own ratios."""
    rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Spread(statistics.median(ours) / statistics.median(theirs), min(rounds), max(rounds))


def speed_ratio(samples: Samples, measure: str, other: str, ours: str = OURS) -> Spread:
    """How many times as fast ``ours`` is as ``other``: ratio of the medians, and the range of the rounds' ratios."""
    return time_ratio(samples[other][measure], samples[ours][measure])


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
    least_cosine: float
    """The smallest cosine that passes for equal."""
    apart: int = 0
    """Positions with a smaller one, or with another likeliest token that is no near tie."""
    may_differ: int = 0
    """How many of these there may be."""

    def __str__(self) -> str:
        return (
            f"{self.variant}: smallest cosine {self.cosine:.6f}, same choice in {self.equal_choices} of "
            f"{self.positions} positions, {self.near_ties} near ties, {self.apart} apart"
        )

    @property
    def equal(self) -> bool:
        return self.apart <= self.may_differ


MIN_COSINE = 0.998
PACKED_COSINE = 0.98
"""With packed weights, for which every engine rounds its inputs to eight bits in a way of its own. Where two experts
are about equally good, that sends a token to the one or the other."""
PACKED_MAY_DIFFER = 2
"""Positions that may differ with packed weights where a router chooses between experts: of few large ones, another one
of two equally good experts halves the cosine of its position, and moves a later one of its row through keys and values.
An engine that computes something else differs everywhere."""
NEAR_TIE = 0.02
"""Two logits are nearly equal if they differ by less than this share of the largest: what bfloat16 leaves."""
PACKED_NEAR_TIE = 0.05
"""The same with packed weights. At a cosine of 0.999 the difference of two logits is off by some 1.6 % of the largest,
and this is three times that."""


def compare_logits(
    variant: str,
    found: NDArray[np.float64],
    reference: NDArray[np.float64],
    least_cosine: float = MIN_COSINE,
    near_tie: float = NEAR_TIE,
    may_differ: int = 0,
) -> Comparison:
    """Compare [positions, vocabulary] logits with those of the reference. Raises ValueError if the shapes differ."""
    if found.shape != reference.shape:
        raise ValueError(f"{variant} gave logits {found.shape}, the reference {reference.shape}")
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(reference, axis=1)
    cosines = np.sum(found * reference, axis=1) / norms
    equal = ties = apart = 0
    for row, expected, cosine in zip(found, reference, cosines, strict=True):
        ours, theirs = int(row.argmax()), int(expected.argmax())
        same = ours == theirs
        tied = not same and expected[theirs] - expected[ours] <= near_tie * np.abs(expected).max()
        equal, ties = equal + same, ties + bool(tied)
        apart += not (same or tied) or not cosine >= least_cosine
    return Comparison(variant, float(cosines.min()), equal, len(found), ties, least_cosine, apart, may_differ)


@dataclass(frozen=True)
class ReadBytes:
    """Weight bytes of each part of a model. Norms and biases are left out.

    ``attention``, ``router``, ``expert`` (one of them) and ``dense`` (a feed-forward network without experts) are of
    one layer; ``head`` includes the embedding's one row, and all of a tied embedding.
    """

    attention: int
    router: int
    expert: int
    head: int
    layers: int
    experts: int
    per_token: int
    dense: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ReadBytes:
        """From the ``config.json`` of a bfloat16 model that has routed experts in every layer, or none."""
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        query, key_value = heads * head, config["num_key_value_heads"] * head
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        ffn = config["moe_intermediate_size"] if "moe_intermediate_size" in config else config["intermediate_size"]
        embedding = 0 if config.get("tie_word_embeddings") else hidden
        return cls(
            attention=2 * (2 * hidden * query + 2 * hidden * key_value),
            router=2 * hidden * experts,
            expert=2 * 3 * hidden * ffn if experts else 0,
            head=2 * (vocabulary * hidden + embedding),
            layers=config["num_hidden_layers"],
            experts=experts,
            per_token=config["num_experts_per_tok"] if experts else 0,
            dense=0 if experts else 2 * 3 * hidden * ffn,
        )

    @classmethod
    def packed(cls, tensors: Iterable[PackedTensor], config: Mapping[str, Any]) -> ReadBytes:
        """From the tensors of a packed file: the mean of its layers, as they are stored."""
        return cls._of_tensors(((tensor.name, tensor.nbytes) for tensor in tensors), config)

    @classmethod
    def widened(cls, tensors: Iterable[PackedTensor], config: Mapping[str, Any]) -> ReadBytes:
        """What :meth:`packed` would give if the weights were bfloat16."""
        return cls._of_tensors(((tensor.name, 2 * math.prod(tensor.shape)) for tensor in tensors), config)

    @classmethod
    def _of_tensors(cls, tensors: Iterable[tuple[str, int]], config: Mapping[str, Any]) -> ReadBytes:
        attention = router = expert = dense = vocabulary = 0
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
        layers = config["num_hidden_layers"]
        for name, nbytes in tensors:
            if any(part in name for part in (".attn_", ".ssm_", ".shortconv.", "_shexp")):
                attention += nbytes
            elif "ffn_gate_inp" in name:
                router += nbytes
            elif "_exps" in name:
                expert += nbytes // experts
            elif ".ffn_" in name:
                dense += nbytes
            elif name == ("token_embd.weight" if config["tie_word_embeddings"] else "output.weight"):
                vocabulary += nbytes
        return cls(
            attention=attention // layers,
            router=router // layers,
            expert=expert // layers,
            head=vocabulary,
            layers=layers,
            experts=experts,
            per_token=stated_experts_per_token(config) or 1,
            dense=dense // layers,
        )

    def step(self, distinct: float | None = None) -> float:
        """Bytes of a step in which each layer uses ``distinct`` experts (those of one token unless given)."""
        used = self.per_token if distinct is None else distinct
        return self.head + self.layers * (self.attention + self.router + self.dense + used * self.expert)


@dataclass(frozen=True)
class Routing:
    """How many different experts a layer used in a step: the mean over layers and steps, and what even routing would
    have used."""

    distinct: float
    expected: float

    @property
    def degenerate(self) -> bool:
        """Fewer than four fifths of what even routing uses: several rows then cost too little in every engine."""
        return self.distinct < 0.8 * self.expected

    def __str__(self) -> str:
        return f"{self.distinct:.1f} (evenly routed {self.expected:.1f})"


def _milliseconds(values: Sequence[float]) -> str:
    spread = Spread.of([1000 * value for value in values])
    digits = 0 if spread.median >= 100 else 1 if spread.median >= 10 else 2
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def ratio_text(spread: Spread) -> str:
    """A median with its range, if there is one."""
    low, high = f"{spread.low:.2f}", f"{spread.high:.2f}"
    return f"{spread.median:.2f}" + (f" ({low}–{high})" if low != high else "")


def markdown(title: str, samples: Samples, measures: Sequence[Measure]) -> str:
    """Two tables: milliseconds per forward pass of every engine, and how many times as fast the product is."""

    def cell(variant: str, measure: Measure) -> str:
        values = samples[variant].get(measure.name)
        return "–" if values is None else _milliseconds(values)

    def ratio(other: str, measure: Measure) -> str:
        return ratio_text(speed_ratio(samples, measure.name, other)) if measure.name in samples[other] else "–"

    others = [variant for variant in samples if variant != OURS]
    variants = [OURS, *others] if OURS in samples else others
    lines = [f"### {title}", "", "Milliseconds per forward pass: median (lowest–highest round)", ""]
    lines += table(
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
        lines += table(["", *others], rows)
    return "\n".join(lines)


def _tokens_per_second(samples: Samples, measure: Measure) -> str:
    return f"{measure.tokens_per_pass / statistics.median(samples[OURS][measure.name]):.1f}"


def read_fraction(samples: Samples, rates: Sequence[float], step_bytes: Mapping[str, int]) -> list[str]:
    """The rate at which each engine's steps read weights, as a share of the streaming-read rate. ``step_bytes``: bytes
    of the weights that a step of each measure reads, each expert once."""
    rate = Spread.of([value / 1e9 for value in rates])
    lines = [
        f"Streaming read in the same run: {rate.median:.1f} GB/s ({rate.low:.1f}–{rate.high:.1f}). Share of it at "
        "which steps read their weights, each expert once:",
        "",
    ]

    def share(variant: str, measure: str) -> str:
        seconds = samples[variant].get(measure)
        if not seconds:
            return "–"
        return f"{step_bytes[measure] / statistics.median(seconds) / 1e9 / rate.median:.0%}"

    rows = [
        [measure, f"{nbytes / 1e9:.3f}", *(share(variant, measure) for variant in samples)]
        for measure, nbytes in step_bytes.items()
    ]
    return lines + table(["", "GB", *samples], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
