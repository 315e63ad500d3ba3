"""Beam search against transformers' own, and its row assignment against brute force."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.generation.beams import BeamRule, BeamRun, BeamState, Hypothesis, assign_rows, check_beams
from engine.generation.programs import Decoding, Program
from engine.generation.sampling import Logprobs, NotNumbersError, Sampler, SamplingRule
from engine.runtimes.protocol import Logits
from tests.support.pairwise import pairwise
from tests.support.tiny_models import write_tiny_model

PROMPT = [5, 17, 101, 42, 9, 77, 30]
FAMILIES = ("llama", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


class RecomputedRows:
    """TokenRows without a cache: each step runs the whole rows through transformers' model."""

    def __init__(self, model: Any, rows: list[list[int]], can_truncate: bool = True) -> None:
        self.model = model
        self.tokens = rows
        self.can_truncate = can_truncate
        self.moves: list[tuple[int, ...]] = []
        self.steps = 0

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens[0])

    def _logits(self) -> Logits:
        with torch.inference_mode():
            found = self.model(torch.tensor(self.tokens), use_cache=False).logits[:, -1]
        return found.float().numpy()

    def extend(self, tokens: Sequence[int], want_logits: bool = True) -> Logits | None:
        assert self.rows == 1
        self.tokens[0] = [*self.tokens[0], *tokens]
        return self._logits()[0] if want_logits else None

    def step(self, tokens: Sequence[int]) -> Logits:
        self.tokens = [[*row, token] for row, token in zip(self.tokens, tokens, strict=True)]
        self.steps += 1
        return self._logits()

    def truncate(self, length: int) -> None:
        assert self.can_truncate and self.rows == 1
        self.tokens[0] = self.tokens[0][:length]

    def fan_out(self, rows: int) -> RecomputedRows:
        wide = RecomputedRows(self.model, [list(self.tokens[0]) for _ in range(rows)], self.can_truncate)
        self.wide = wide
        return wide

    def reorder(self, parents: Sequence[int]) -> int:
        self.moves.append(tuple(parents))
        self.tokens = [list(self.tokens[parent]) for parent in parents]
        return sum(parent != row for row, parent in enumerate(parents))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    found = {}
    for family in FAMILIES:
        folder = write_tiny_model(tmp_path_factory.mktemp(family), family)
        found[family] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return found


def reference(model: Any, rule: BeamRule) -> list[tuple[list[int], float]]:
    """All sequences of transformers' search with their scores, best first; what follows an end is padding."""
    ends = sorted(rule.ends)
    found = model.generate(
        torch.tensor([PROMPT]),
        num_beams=rule.width,
        num_return_sequences=rule.width,
        do_sample=False,
        max_new_tokens=rule.max_tokens,
        length_penalty=rule.length_penalty,
        early_stopping=rule.early_stopping,
        eos_token_id=ends or None,
        repetition_penalty=rule.repetition_penalty,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sequences = []
    for row, score in zip(found.sequences[:, len(PROMPT) :].tolist(), found.sequences_scores.tolist(), strict=True):
        cut = next((index + 1 for index, token in enumerate(row) if token in rule.ends), len(row))
        sequences.append((row[:cut], score))
    return sequences


def alone(program: Program[None]) -> None:
    """Run a program whose passes are steps."""
    with contextlib.suppress(StopIteration):
        work = next(program)
        while True:
            assert isinstance(work, Decoding)
            work = program.send(work.rows.step(work.tokens))


def search(model: Any, rule: BeamRule) -> tuple[list[Hypothesis], RecomputedRows]:
    rows = RecomputedRows(model, [[]])
    logits = rows.extend(PROMPT)
    run = BeamRun(BeamState(rule), rows)
    run.begin(logits)
    while not run.state.done:
        alone(run.step())
    return run.state.hypotheses(), rows


def frequent_tokens(model: Any, count: int, width: int = 8) -> tuple[int, ...]:
    """Tokens that searches without an end like to use: as ends, they end beams early and at different lengths."""
    return tuple(token for token, _ in token_counts(model, width).most_common(count))


@functools.cache
def token_counts(model: Any, width: int) -> Counter[int]:
    found, _ = search(model, BeamRule(width=width, max_tokens=8))
    return Counter(token for beam in found for token in beam.tokens[2:])


def assert_equal(ours: list[Hypothesis], theirs: list[tuple[list[int], float]]) -> None:
    assert [list(beam.tokens) for beam in ours] == [tokens for tokens, _ in theirs]
    np.testing.assert_allclose([beam.score for beam in ours], [score for _, score in theirs], rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "width"),
    [
        *zip(FAMILIES, (2, 16, 3, 8, 3, 8), strict=True),
        *(
            pytest.param(*row, marks=pytest.mark.soak, id="all-{}-{}".format(*row))
            for row in product(FAMILIES, (2, 3, 8, 16))
        ),
    ],
)
def test_equals_transformers(models: dict[str, Any], family: str, width: int) -> None:
    model = models[family]
    ended_early = 0
    for ends in (0, 1, 3):
        rule = BeamRule(width=width, max_tokens=10, ends=frequent_tokens(model, ends, width))
        ours, _ = search(model, rule)
        assert_equal(ours, reference(model, rule))
        ended_early += sum(len(beam.tokens) < rule.max_tokens for beam in ours)
    assert ended_early or width == 2


@pytest.mark.sampled
@pytest.mark.parametrize("penalty", [1.2, 0.8])
def test_a_repetition_penalty_equals_transformers(models: dict[str, Any], penalty: float) -> None:
    model = models["mixtral"]
    plain = BeamRule(4, 12, ends=frequent_tokens(model, 1))
    rule = replace(plain, repetition_penalty=penalty, prompt=frozenset(PROMPT))
    ours, _ = search(model, rule)
    assert_equal(ours, reference(model, rule))
    assert [beam.tokens for beam in ours] != [beam.tokens for beam in search(model, plain)[0]]


def searched(rule: BeamRule, logits: Logits) -> Hypothesis:
    """The best sequence of a model that always has the same ``logits`` [vocabulary]."""
    state = BeamState(rule)
    while not state.done:
        state.advance(np.stack([logits] * len(state.running)))
    return state.hypotheses()[0]


def test_a_penalty_of_logits_ends_a_loop_that_one_of_log_probabilities_does_not() -> None:
    logits = np.array([0.0, 10.0, 8.0, 7.5, 7.0, 0.0, 0.0, 0.0], dtype=np.float32)
    rule = BeamRule(2, 4, repetition_penalty=1.5)
    assert searched(rule, logits).tokens == (1, 1, 1, 1)
    assert searched(replace(rule, penalises_logits=True), logits).tokens == (1, 2, 3, 4)


def test_one_beam_with_a_penalty_of_logits_is_the_greedy_answer() -> None:
    steps = np.random.default_rng(0).normal(size=(12, 40)).astype(np.float32)
    state = BeamState(BeamRule(1, 12, repetition_penalty=1.3, penalises_logits=True))
    sampler = Sampler(SamplingRule(repetition_penalty=1.3, penalises_prompt=False), PROMPT)
    for logits in steps:
        state.advance(logits[None])
    assert list(state.hypotheses()[0].tokens) == [sampler.choose(logits) for logits in steps]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "length_penalty", "early_stopping"),
    pairwise(("mixtral", "gpt_oss"), (-1.0, 0.0, 0.6, 2.0), (False, True)),
)
def test_equals_transformers_with_penalties(
    models: dict[str, Any], family: str, length_penalty: float, early_stopping: bool
) -> None:
    model = models[family]
    for width, ends in ((4, 2), (5, 1)):
        rule = BeamRule(width, 12, length_penalty, early_stopping, frequent_tokens(model, ends))
        ours, _ = search(model, rule)
        assert_equal(ours, reference(model, rule))


def test_one_beam_is_greedy(models: dict[str, Any]) -> None:
    model = models["llama"]
    ours, _ = search(model, BeamRule(width=1, max_tokens=9))
    greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert list(ours[0].tokens) == greedy[0, len(PROMPT) :].tolist()


def test_prompt_runs_once_and_unchanged_rows_stay(models: dict[str, Any]) -> None:
    _, rows = search(models["mixtral"], BeamRule(width=6, max_tokens=14))
    assert rows.tokens == [PROMPT]
    assert rows.wide.steps == 13
    assert rows.wide.moves
    for parents in rows.wide.moves:
        assert parents != tuple(range(6))
        # Whoever has children keeps its own row for one of them: nothing is overwritten that is still needed.
        assert all(parents[parent] == parent for parent in parents)


def test_cancelled_search_offers_running_beams(models: dict[str, Any]) -> None:
    rows = RecomputedRows(models["olmoe"], [[]])
    logits = rows.extend(PROMPT)
    run = BeamRun(BeamState(BeamRule(width=4, max_tokens=50)), rows)
    run.begin(logits)
    for _ in range(2):
        alone(run.step())
        assert not run.state.done
    found = run.state.hypotheses()
    assert [len(beam.tokens) for beam in found] == [3] * 4
    assert not any(beam.finished for beam in found)
    assert [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)
    assert rows.tokens == [PROMPT]


def test_stop_check_finishes_a_beam(models: dict[str, Any]) -> None:
    def pair(tokens: Sequence[int]) -> bool:
        return len(tokens) >= 2 and tokens[-1] % 4 == 0

    found, _ = search(models["llama"], BeamRule(width=4, max_tokens=12, hits_stop=pair))
    assert any(len(beam.tokens) < 12 for beam in found)
    for beam in found:
        assert not any(pair(beam.tokens[:end]) for end in range(1, len(beam.tokens)))


def test_everything_ends_at_once() -> None:
    state = BeamState(BeamRule(width=2, max_tokens=9, hits_stop=lambda tokens: True))
    state.advance(np.arange(12, dtype=np.float32)[None])
    assert [beam.tokens for beam in state.hypotheses()] == [(11,), (10,)]
    state.advance(np.zeros((2, 12), dtype=np.float32))
    assert state.done


def test_ties_take_the_lowest_token_of_the_best_beam() -> None:
    state = BeamState(BeamRule(width=3, max_tokens=3))
    state.advance(np.zeros((1, 40), dtype=np.float32))
    assert [beam.tokens for beam in state.hypotheses()] == [(0,), (1,), (2,)]
    state.advance(np.zeros((3, 40), dtype=np.float32))
    assert [beam.tokens for beam in state.hypotheses()] == [(0, 0), (0, 1), (0, 2)]


def test_nonsense_is_refused() -> None:
    for width in (0, -1, 17):
        with pytest.raises(ModelError, match="Beam width"):
            check_beams(width, 1.0)
    with pytest.raises(ModelError, match="Length penalty"):
        check_beams(2, float("nan"))
    with pytest.raises(ModelError, match="fewer beams"):
        BeamState(BeamRule(width=8, max_tokens=3)).advance(np.zeros((1, 10), dtype=np.float32))


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("spoiled", [slice(None), slice(7, 8), slice(-3, None)])
@pytest.mark.parametrize("vocabulary", [10, 1000, 33_000])
def test_scores_that_are_no_numbers_are_said(vocabulary: int, spoiled: slice, penalty: float) -> None:
    logits = np.zeros((1, vocabulary), dtype=np.float32)
    logits[:, spoiled] = np.nan
    for width in (2, 3, 5):
        with pytest.raises(NotNumbersError, match="nan"):
            BeamState(BeamRule(width=width, max_tokens=3, repetition_penalty=penalty)).advance(logits)
    with pytest.raises(NotNumbersError, match="nan"):
        Logprobs(5, lambda token: b"").of(logits[0], 0)


@given(st.integers(1, 16).flatmap(lambda width: st.lists(st.integers(0, width - 1), min_size=width, max_size=width)))
def test_rows_are_a_permutation_and_as_few_move_as_can_be(parents: list[int]) -> None:
    rows = assign_rows(parents)
    assert sorted(rows) == list(range(len(parents)))
    moved = sum(row != parent for row, parent in zip(rows, parents, strict=True))
    assert moved == len(parents) - len(set(parents))


@given(st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_no_assignment_moves_fewer_rows(parents: list[int]) -> None:
    def moved(rows: Sequence[int]) -> int:
        return sum(row != parent for row, parent in zip(rows, parents, strict=True))

    assert moved(assign_rows(parents)) == min(moved(rows) for rows in itertools.permutations(range(5)))
