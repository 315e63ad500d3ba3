"""Choosing the next token from logits: greedy, or drawn after temperature, top-k, top-p and min-p, in that order. A
bias, a repetition penalty, and penalties for presence and frequency come before all of them, in that order.

The order and the rule of each filter equal those of transformers' logits processors, so the same tokens survive. The
draw uses numpy's generator and is reproducible from a seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.ipc.messages import MOST_LOGPROBS, LikelyToken, Sampling, TokenLogprob
from engine.runtimes.protocol import Logits

_SEED_LIMIT = 2**64
_COLDEST = 1e-30
"""Lowest temperature used for weights. At this temperature only the likeliest tokens have a weight in float32."""
PENALTIES = (0.1, 10.0)
"""Smallest and largest repetition penalty. Below 1 it favours repetition."""
PENALISES_PROMPT = "repetition_penalty_counts_prompt"
"""Key in a ``generation_config.json`` that only privatellm reads: false if the penalty counts only the answer. A small
model that may not repeat the words of a question answers another one. Such a penalty changes logits in a beam search,
too."""
ANSWER_PENALTY = 2.0
"""Maximum penalty for presence or frequency. Its negative is the minimum."""
LARGEST_BIAS = 100.0
"""Maximum bias of a logit. Its negative is the minimum."""
MOST_BIASES = 4096
"""Maximum tokens with a bias."""
_BLOCK = 512
"""Number of weights summed at once when a token is drawn. Running sums of a large vocabulary would take
milliseconds."""


@dataclass(frozen=True)
class SamplingRule:
    """A complete rule. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing, and a
    ``repetition_penalty`` of 1, other penalties of 0 and no ``bias`` change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    penalises_prompt: bool = True
    """Whether the repetition penalty counts the tokens of the prompt, too, as transformers does."""
    presence_penalty: float = 0.0
    """Penalty subtracted from the logit of each token in the answer."""
    frequency_penalty: float = 0.0
    """Penalty subtracted from a token's logit for each occurrence in the answer."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Values added to the logits, by token id."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def as_computed(self) -> bool:
        """Whether tokens are chosen by the unchanged logits of the model."""
        return self.repetition_penalty == 1.0 and not (self.presence_penalty or self.frequency_penalty or self.bias)

    def of_sample(self, index: int) -> SamplingRule:
        """The rule for sample ``index`` of several. If a seed was asked for, each sample has another one."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % _SEED_LIMIT)

    def penalised_of(self, prompt: Iterable[int]) -> frozenset[int]:
        """The tokens of ``prompt`` that the penalty counts. Those below zero are no tokens of the vocabulary."""
        counts = self.repetition_penalty != 1.0 and self.penalises_prompt
        return frozenset(token for token in prompt if token >= 0) if counts else frozenset()

    @property
    def used(self) -> Sampling:
        """The sampling values in effect. A greedy rule has no filters and draws nothing."""
        changes = Sampling(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.bias),
        )
        if self.greedy:
            return msgspec.structs.replace(changes, temperature=0.0)
        return msgspec.structs.replace(
            changes,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
        )


def _in_range(name: str, value: float, low: float, high: float, advice: str) -> float:
    if not math.isfinite(value) or not low <= value <= high:
        raise ModelError(f"{name} is {value}, which is not {advice}.", kind="bad-input")
    return value


def sampling_rule(asked: Sampling, defaults: Mapping[str, Any]) -> SamplingRule:
    """The rule for the request ``asked`` and a model whose ``generation_config.json`` holds ``defaults``.

    Values that were not requested come from the model. A model whose defaults do not sample, or at temperature 0, is
    decoded greedily, unless a filter was requested; the temperature is then 1. Raises ModelError (bad-input) for an
    impossible value.
    """
    wants_filter = any(value is not None for value in (asked.top_p, asked.top_k, asked.min_p))
    model_samples = bool(defaults.get("do_sample", False)) and defaults.get("temperature") != 0

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
    penalty = asked.repetition_penalty
    if penalty is None:
        penalty = stated_penalty(defaults) or 1.0
    _in_range("Repetition penalty", penalty, *PENALTIES, "between {} and {}, where 1 is none".format(*PENALTIES))
    if asked.seed is not None and not 0 <= asked.seed < _SEED_LIMIT:
        raise ModelError(f"The seed is {asked.seed}, which is not between 0 and 2**64 - 1.", kind="bad-input")
    allowed = f"between {-ANSWER_PENALTY:g} and {ANSWER_PENALTY:g}"
    for name, value in (("Presence", asked.presence_penalty), ("Frequency", asked.frequency_penalty)):
        _in_range(f"{name} penalty", value, -ANSWER_PENALTY, ANSWER_PENALTY, allowed)
    if len(asked.logit_bias) > MOST_BIASES:
        raise ModelError(f"{len(asked.logit_bias)} tokens have a bias, and at most {MOST_BIASES} may.", "bad-input")
    for token, value in asked.logit_bias.items():
        if token < 0:
            raise ModelError(f"Token id {token} has a bias, and no token has such an id.", "bad-input")
        allowed = f"between {-LARGEST_BIAS:g} and {LARGEST_BIAS:g}"
        _in_range(f"The bias of token {token}", value, -LARGEST_BIAS, LARGEST_BIAS, allowed)
    return SamplingRule(
        temperature,
        top_k,
        top_p,
        min_p,
        asked.seed,
        penalty,
        defaults.get(PENALISES_PROMPT) is not False,
        asked.presence_penalty,
        asked.frequency_penalty,
        asked.logit_bias,
    )


def own_sampling(defaults: Mapping[str, Any]) -> Sampling | None:
    """The sampling of a model with these ``defaults`` if nothing is asked for; None if they are impossible."""
    try:
        rule = sampling_rule(Sampling(), defaults)
    except (ModelError, TypeError, ValueError):
        return None
    return Sampling(
        temperature=rule.temperature,
        top_p=rule.top_p,
        top_k=rule.top_k,
        min_p=rule.min_p,
        repetition_penalty=rule.repetition_penalty,
    )


def stated_penalty(defaults: Mapping[str, Any]) -> float | None:
    """The repetition penalty in a ``generation_config.json``; None if it has no usable one."""
    value = defaults.get("repetition_penalty")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if PENALTIES[0] <= value <= PENALTIES[1] else None


def usual_limit(defaults: Mapping[str, Any]) -> int | None:
    """The limit of an answer, in tokens, in a ``generation_config.json``; None if it has none."""
    value = defaults.get("max_new_tokens")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def penalised(scores: Logits, seen: Collection[int], penalty: float) -> Logits:
    """A copy of ``scores`` [vocabulary] in which the scores of the tokens ``seen`` are lowered.

    Positive scores are divided by ``penalty``, others multiplied by it (transformers'
    RepetitionPenaltyLogitsProcessor).
    """
    tokens = np.fromiter(seen, np.int64, len(seen))
    found = scores.copy()
    values = found[tokens]
    found[tokens] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))
    return found


class NotNumbersError(ModelError):
    """Raised if the logits are not numbers."""


def greedy_token(logits: Logits) -> int:
    """The likeliest token; the lowest id among equals.

    Raises NotNumbersError if the logits are not numbers, because the answer would be nonsense.
    """
    token = int(np.argmax(logits))
    if not math.isfinite(float(logits[token])):
        raise NotNumbersError(
            f"The model computed {float(logits[token])} where a score was expected; "
            "its weights are damaged or its dtype is too narrow: try --dtype float32."
        )
    return token


def largest(values: Logits, count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` largest values of [n], and of all that equal the smallest of these, ascending. ``1 <=
    count``."""
    if count >= len(values):
        return np.arange(len(values))
    candidates = np.arange(len(values))
    block = len(values) // (8 * count)
    if block > 1:
        # The count-th largest block maximum is at most the count-th largest value. One fast pass therefore leaves a few
        # candidates to sort; partitioning a large vocabulary would take milliseconds.
        maxima = values[: block * 8 * count].reshape(8 * count, block).max(axis=1)
        candidates = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
    among = values[candidates]
    found: NDArray[np.int64] = candidates[among >= np.partition(among, -count)[-count]]
    return found


def weighed(logits: Logits, rule: SamplingRule) -> tuple[NDArray[np.int64] | None, Logits]:
    """The token ids that may be drawn, ascending (None: the whole vocabulary), and their weights, the largest being 1.

    ``logits`` is [vocabulary]; ``rule`` must not be greedy.
    """
    best = logits.max()
    tokens: NDArray[np.int64] | None = None
    if 0 < rule.top_k < len(logits):
        tokens = largest(logits, rule.top_k)
        logits = logits[tokens]
    # The best logit is subtracted before the division, so that a temperature near 0 causes no overflow. float32 is used
    # because numpy computes sixteen of its exponentials at a time, and a vocabulary has up to 200,000 tokens.
    weights = np.subtract(logits, best, dtype=np.float32)
    weights /= np.float32(max(rule.temperature, _COLDEST))
    np.exp(weights, out=weights)
    if rule.top_p < 1.0:
        kept = _nucleus(weights, rule.top_p)
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    if rule.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(rule.min_p))
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    return tokens, weights


def _nucleus(weights: Logits, top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest likeliest tokens whose weights reach ``top_p`` of the total; at least one."""
    whole = float(weights.sum(dtype=np.float64))
    target = whole * top_p
    # A token and all less likely ones together weigh at most its weight times their number, so most of a large
    # vocabulary is excluded at once. (The likeliest token never is, except by rounding.)
    likely = np.flatnonzero(weights >= whole * (1.0 - top_p) / len(weights) * (1.0 - 1e-6))
    among = weights[likely]
    # Sorting takes milliseconds, so only the weights near the border are sorted. The upper bits of positive floats have
    # the same order as the floats, and name bins that are each as wide as a sixteenth of their weights.
    bins = among.view(np.uint32) >> np.uint32(19)
    held = np.bincount(bins, weights=among)[::-1]
    above = np.cumsum(held) - held
    border = len(held) - max(1, int(np.searchsorted(above, target)))
    ordered = np.sort(among[bins == border])[::-1]
    before = above[len(held) - 1 - border] + np.cumsum(ordered, dtype=np.float64) - ordered
    count = max(1, int(np.searchsorted(before, target)))
    last = ordered[count - 1]
    surplus = np.count_nonzero(ordered[:count] == last) - np.count_nonzero(ordered == last)
    kept = among >= last
    if surplus:
        # Among tokens with the same weight as the last one, those with the lowest ids are kept.
        kept[np.flatnonzero(among == last)[surplus:]] = False
    survivors: NDArray[np.int64] = likely[kept]
    return survivors


def _drawn(weights: Logits, point: float) -> int:
    """The index at which the running sum of the weights passes the fraction ``point`` (0 <= point < 1) of the total."""
    starts = np.arange(0, len(weights), _BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = point * float(ends[-1])
    block = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    within = np.cumsum(weights[starts[block] : starts[block] + _BLOCK], dtype=np.float64)
    if block:
        within += ends[block - 1]
    index = int(starts[block] + np.searchsorted(within, target, side="right"))
    if index < len(weights) and weights[index] > 0:
        return index
    # The sum by blocks and the running sum differ in their last bits, so the target may lie behind a block's end.
    return int(np.flatnonzero(weights[: starts[block] + _BLOCK])[-1])


class TokenGuide(Protocol):
    """A guide that says which tokens may come next (:class:`engine.generation.constraints.AnswerGuide`)."""

    @property
    def over(self) -> bool: ...

    def copy(self) -> Self: ...

    def allowed(self) -> NDArray[np.bool_]: ...

    def take(self, token: int) -> bool: ...


class SamplerState(msgspec.Struct, frozen=True):
    """The state with which another sampler can continue.

    It contains the rule, the number of tokens drawn, and the tokens that the penalties count, in the prompt and in the
    answer (each with its number).
    """

    rule: SamplingRule
    drawn: int
    seen: list[int]
    counts: dict[int, int]


class Sampler:
    """Draws tokens by one rule. The same seed gives the same tokens for the same logits.

    ``before``: the tokens of the prompt, which a repetition penalty counts, too. ``guide`` says which tokens may come
    next, if the answer must have a form.
    """

    def __init__(self, rule: SamplingRule, before: Iterable[int] = (), guide: TokenGuide | None = None) -> None:
        self.rule = rule
        self.guide = guide
        self._bits = np.random.PCG64(rule.seed)
        self._random = np.random.Generator(self._bits)
        self._drawn = 0
        self._seen = set(rule.penalised_of(before))
        self._counts: Counter[int] = Counter()

    @classmethod
    def going_on(cls, state: SamplerState) -> Sampler:
        """A sampler without a guide that continues from ``state``. Raises ValueError if that is impossible."""
        sampler = cls(state.rule)
        sampler._bits.advance(state.drawn)
        sampler._drawn = state.drawn
        sampler._seen.update(state.seen)
        sampler._counts.update(state.counts)
        return sampler

    @property
    def state(self) -> SamplerState:
        return SamplerState(self.rule, self._drawn, sorted(self._seen), dict(self._counts))

    @property
    def unbound(self) -> bool:
        """Whether the unchanged logits and any random numbers decide: there is no seed, penalty, bias or guide."""
        return (self.rule.greedy or self.rule.seed is None) and self.rule.as_computed and self.guide is None

    def choose(self, logits: Logits) -> int:
        """The next token for ``logits`` [vocabulary]. Raises ModelError if they are not finite at the top."""
        best = greedy_token(logits)
        if self.rule.as_computed and self.guide is None:
            return best if self.rule.greedy else self._draw(logits)
        logits = self._changed(logits)
        token = self._chosen(logits) if self.guide is None else self._guided(logits, self.guide)
        self._count(token)
        return token

    def take(self, token: int) -> None:
        """Continue as if :meth:`choose` had chosen ``token``, which was chosen elsewhere by this rule without a
        guide."""
        if not self.rule.greedy:
            self._bits.advance(1)
            self._drawn += 1
        if not self.rule.as_computed:
            self._count(token)

    def _count(self, token: int) -> None:
        self._seen.add(token)
        self._counts[token] += 1

    @property
    def over(self) -> bool:
        """Whether the answer is complete and nothing may be added to it."""
        return self.guide is not None and self.guide.over

    def _chosen(self, logits: Logits) -> int:
        return int(np.argmax(logits)) if self.rule.greedy else self._draw(logits)

    def _guided(self, logits: Logits, guide: TokenGuide) -> int:
        """A token that ``guide`` accepts. Changes ``logits``."""
        logits[~guide.allowed()] = -np.inf
        while True:
            token = self._chosen(logits)
            if guide.take(token):
                return token
            logits[token] = -np.inf
            if not np.isfinite(logits.max()):
                raise ModelError("No token of the model goes on with the form that was asked for.", kind="bad-input")

    def _changed(self, logits: Logits) -> Logits:
        """A copy of ``logits`` with the rule's bias and penalties."""
        rule = self.rule
        logits = logits.copy()
        for token, value in rule.bias.items():
            if token < len(logits):
                logits[token] += np.float32(value)
        if rule.repetition_penalty != 1.0:
            logits = penalised(logits, self._seen, rule.repetition_penalty)
        if rule.presence_penalty or rule.frequency_penalty:
            for token, count in self._counts.items():
                logits[token] -= np.float32(rule.presence_penalty + count * rule.frequency_penalty)
        return logits

    def _draw(self, logits: Logits) -> int:
        tokens, weights = weighed(logits, self.rule)
        index = _drawn(weights, self._random.random())
        self._drawn += 1
        return index if tokens is None else int(tokens[index])


# --- log-probabilities -----------------------------------------------------------------------------------------------


class Logprobs:
    """Reports chosen tokens with their log-probabilities and those of the ``count`` likeliest tokens.

    ``bytes_of`` gives a token's bytes. Raises ModelError (bad-input) for an impossible ``count``.
    """

    def __init__(self, count: int, bytes_of: Callable[[int], bytes]) -> None:
        if not 0 <= count <= MOST_LOGPROBS:
            raise ModelError(
                f"{count} likeliest tokens were asked for, and between 0 and {MOST_LOGPROBS} are reported.",
                kind="bad-input",
            )
        self._count = count
        self._bytes_of = bytes_of

    def of(self, logits: Logits, token: int) -> TokenLogprob:
        """The report on ``token``, chosen from the model's unchanged ``logits`` [vocabulary].

        Raises NotNumbersError if they are not numbers.
        """
        best = logits[greedy_token(logits)]
        whole = best + np.log(np.exp(logits - best, dtype=np.float32).sum(dtype=np.float64))
        top: list[LikelyToken] = []
        if self._count:
            found = largest(logits, self._count)
            found = found[np.argsort(-logits[found], kind="stable")[: self._count]]
            top = [LikelyToken(*self._spelled(int(each)), float(logits[each] - whole)) for each in found]
        return TokenLogprob(*self._spelled(token), float(logits[token] - whole), top)

    def _spelled(self, token: int) -> tuple[int, str, bytes]:
        data = self._bytes_of(token)
        return token, data.decode("utf-8", "replace"), data
