"""Sampling against transformers' logits processors, and its distribution against the probabilities."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import ModelError
from engine.generation.sampling import (
    Sampler,
    SamplerState,
    SamplingRule,
    greedy_token,
    largest,
    penalised,
    sampling_rule,
)
from engine.ipc.messages import Sampling
from engine.runtimes.protocol import Logits
from tests.support.survivors import surviving_tokens


def random_logits(seed: int, vocabulary: int, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * scale).astype(np.float32)


def processed(logits: Logits, rule: SamplingRule) -> np.ndarray[Any, Any]:
    """Probabilities [vocabulary] after transformers' processors."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(rule.temperature)])
    if rule.top_k:
        processors.append(TopKLogitsWarper(rule.top_k))
    if rule.top_p < 1.0:
        processors.append(TopPLogitsWarper(rule.top_p))
    if rule.min_p > 0.0:
        processors.append(MinPLogitsWarper(rule.min_p))
    scores = processors(torch.zeros(1, 1, dtype=torch.int64), torch.from_numpy(logits)[None].double())
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("vocabulary", [7, 160, 3001, 50_000])
@pytest.mark.parametrize(
    "rule",
    [
        SamplingRule(temperature=0.7),
        SamplingRule(temperature=1.3, top_k=1),
        SamplingRule(temperature=0.2, top_k=40),
        SamplingRule(temperature=1.0, top_p=0.9),
        SamplingRule(temperature=2.0, top_p=0.999),
        SamplingRule(temperature=1.0, top_p=0.0),
        SamplingRule(temperature=0.9, min_p=0.05),
        SamplingRule(temperature=1.5, top_k=30, top_p=0.8, min_p=0.1),
        SamplingRule(temperature=0.6, top_k=500, top_p=0.95, min_p=0.01),
    ],
    ids=str,
)
def test_equals_the_processors_of_transformers(rule: SamplingRule, vocabulary: int) -> None:
    for seed in range(5):
        logits = random_logits(seed, vocabulary)
        tokens, probabilities = surviving_tokens(logits, rule)
        found = np.zeros(vocabulary)
        found[tokens] = probabilities
        expected = processed(logits, rule)
        assert set(tokens) == set(np.flatnonzero(expected))
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=60),
    st.floats(0.1, 5.0),
    st.integers(0, 70),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
@settings(deadline=None)
def test_something_always_survives(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values, dtype=np.float32)
    tokens, probabilities = surviving_tokens(logits, SamplingRule(temperature, top_k, top_p, min_p))
    assert len(tokens) == len(set(tokens)) >= 1
    assert greedy_token(logits) in tokens or logits[tokens].max() == logits.max()
    assert probabilities.min() > 0
    assert probabilities.sum() == pytest.approx(1.0)
    if top_k:
        assert len(tokens) <= max(top_k, (logits >= np.sort(logits)[-min(top_k, len(values))]).sum())


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=2000), st.integers(1, 40))
@settings(deadline=None)
def test_largest(values: list[int], count: int) -> None:
    array = np.array(values, dtype=np.float32)
    smallest = np.sort(array)[::-1][min(count, len(values)) - 1]
    assert largest(array, count).tolist() == [i for i, value in enumerate(values) if value >= smallest]


@pytest.mark.soak
def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.1, 0.3, 0.1], dtype=np.float32))
    sampler = Sampler(SamplingRule(temperature=1.0, seed=3))
    counts = np.bincount([sampler.choose(logits) for _ in range(20_000)], minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.1, 0.3, 0.1], atol=0.02)


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=2000),
    st.floats(0.05, 4.0),
    st.floats(0.0, 1.0, exclude_max=True),
)
@settings(deadline=None)
def test_the_nucleus_is_the_fewest_likeliest_tokens(values: list[int], temperature: float, top_p: float) -> None:
    """Of many that weigh the same, as whole numbers do, too."""
    logits = np.array(values, dtype=np.float32)
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    order = np.lexsort((np.arange(len(values)), -weights))
    held = np.cumsum(weights[order], dtype=np.float64)
    whole = weights.sum(dtype=np.float64)
    near = np.abs(held - top_p * whole) < 1e-6 * whole
    assume(not near.any())
    expected = order[: 1 + np.count_nonzero(held < top_p * whole)]
    tokens, _ = surviving_tokens(logits, SamplingRule(temperature, top_p=top_p))
    assert tokens.tolist() == sorted(expected.tolist())


@pytest.mark.parametrize("temperature", [1e-40, 1e-320, 1e-9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float, top_p: float) -> None:
    logits = random_logits(1, 3000)
    sampler = Sampler(SamplingRule(temperature, top_p=top_p, seed=1))
    assert {sampler.choose(logits) for _ in range(20)} == {greedy_token(logits)}


@pytest.mark.soak
def test_draws_from_a_large_vocabulary_follow_the_probabilities() -> None:
    """Where the weights are summed by blocks: each block is drawn as often as it should be, and no weight of zero."""
    logits = np.full(5000, -np.inf, dtype=np.float32)
    likely = np.arange(3, 5000, 1000)
    logits[likely] = np.log(np.array([0.1, 0.3, 0.2, 0.15, 0.25], dtype=np.float32))
    sampler = Sampler(SamplingRule(temperature=1.0, seed=5))
    drawn = np.array([sampler.choose(logits) for _ in range(10_000)])
    assert set(drawn) == set(likely)
    np.testing.assert_allclose([(drawn == token).mean() for token in likely], [0.1, 0.3, 0.2, 0.15, 0.25], atol=0.02)


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingRule(temperature=2.0, seed=seed))
        return [sampler.choose(random_logits(step, 500)) for step in range(30)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


@given(
    st.builds(
        SamplingRule,
        temperature=st.sampled_from([0.0, 1.5]),
        top_k=st.sampled_from([0, 20]),
        seed=st.sampled_from([0, 2**64 - 1]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        penalises_prompt=st.booleans(),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, -0.5]),
        bias=st.sampled_from([{}, {3: 2.0}]),
    ),
    st.integers(0, 2**32 - 1),
    st.lists(st.booleans(), min_size=2, max_size=12),
)
def test_another_sampler_goes_on_with_the_same_tokens(rule: SamplingRule, seed: int, here: list[bool]) -> None:
    scores = np.random.default_rng(seed).normal(size=(len(here), 30)).astype(np.float32)
    alone, first = Sampler(rule, [1, 2, 3]), Sampler(rule, [1, 2, 3])
    for logits, chooses in zip(scores, here, strict=True):
        if chooses:
            token = first.choose(logits)
        else:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state), type=SamplerState)
            token = Sampler.going_on(sent).choose(logits)
            first.take(token)
        assert token == alone.choose(logits)
    assert first.state == alone.state


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(SamplingRule()).choose(np.array([1, 3, 3, 2], dtype=np.float32)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = np.full(5, bad, dtype=np.float32)
    with pytest.raises(ModelError, match="float32"):
        Sampler(SamplingRule(temperature=1.0)).choose(logits)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_penalised_as_transformers_does(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = np.random.default_rng(1).normal(size=50).astype(np.float32)
    seen = [3, 3, 7, 49, 0]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), torch.tensor(scores[None]))[0].numpy()
    before = scores.copy()
    np.testing.assert_array_equal(penalised(scores, set(seen), penalty), theirs)
    np.testing.assert_array_equal(scores, before)


def test_what_was_said_is_counted_with_the_prompt() -> None:
    logits = np.array([4.0, 3.9, 3.8, -1.0], dtype=np.float32)
    sampler = Sampler(SamplingRule(repetition_penalty=1.5), [1])
    assert [sampler.choose(logits) for _ in range(4)] == [0, 2, 0, 0]
    drawn = Sampler(SamplingRule(temperature=1e-6, seed=1, repetition_penalty=1.5), [1])
    assert [drawn.choose(logits) for _ in range(4)] == [0, 2, 0, 0]


MODEL = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("asked", "defaults", "expected"),
    [
        (Sampling(), {}, SamplingRule()),
        (Sampling(), {"temperature": 0.6, "top_k": 20}, SamplingRule()),
        (Sampling(), {"do_sample": True}, SamplingRule(temperature=1.0)),
        (Sampling(seed=4), MODEL, SamplingRule(temperature=0.2, top_p=0.9, seed=4)),
        (Sampling(temperature=0.0), MODEL, SamplingRule(top_p=0.9)),
        (Sampling(temperature=0.8, top_p=1.0), MODEL, SamplingRule(temperature=0.8)),
        (Sampling(top_k=5), {}, SamplingRule(temperature=1.0, top_k=5)),
        (Sampling(min_p=0.1), {"do_sample": True, "min_p": None}, SamplingRule(temperature=1.0, min_p=0.1)),
        (Sampling(), {"repetition_penalty": 1.1}, SamplingRule(repetition_penalty=1.1)),
        (
            Sampling(),
            {"repetition_penalty": 1.1, "repetition_penalty_counts_prompt": False},
            SamplingRule(repetition_penalty=1.1, penalises_prompt=False),
        ),
        (Sampling(repetition_penalty=1.0), {"repetition_penalty": 1.1}, SamplingRule()),
        (Sampling(), {"repetition_penalty": "much"}, SamplingRule()),
    ],
)
def test_what_was_not_asked_is_the_models(asked: Sampling, defaults: dict[str, Any], expected: SamplingRule) -> None:
    assert sampling_rule(asked, defaults) == expected


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (Sampling(temperature=-0.1), "Temperature is -0.1"),
        (Sampling(temperature=float("nan")), "Temperature is nan"),
        (Sampling(temperature=float("inf")), "Temperature is inf"),
        (Sampling(top_p=1.5), "Top-p is 1.5"),
        (Sampling(min_p=-1.0), "Min-p is -1"),
        (Sampling(top_k=-2), "Top-k is -2"),
        (Sampling(repetition_penalty=0.0), "Repetition penalty is 0"),
        (Sampling(seed=-1), "seed is -1"),
        (Sampling(seed=2**64), "seed is"),
    ],
)
def test_nonsense_is_refused(asked: Sampling, text: str) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        sampling_rule(asked, {})
    assert caught.value.kind == "bad-input"
