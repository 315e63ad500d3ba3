"""Guesses are what followed the longest same tokens, and so many are run as the measured costs of passes allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generation.drafts import LEAST_MATCH, MEASURED, MOST_PLACES, ROW_COST, VALID_PASSES, PassCosts, Repetitions


def by_hand(tokens: list[int], most: int) -> set[tuple[int, ...]]:
    """What may be guessed after ``tokens``: what followed one of the longest of the latest occurrences of their end."""
    places = [
        end for end in range(LEAST_MATCH, len(tokens)) if tokens[end - LEAST_MATCH : end] == tokens[-LEAST_MATCH:]
    ]
    lengths = {}
    for end in places[-MOST_PLACES:]:
        length = LEAST_MATCH
        while length < end and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        lengths[end] = length
    found = set()
    for end, length in lengths.items():
        if length == max(lengths.values()):
            longer = list(tokens)
            for index in range(most):
                longer.append(longer[end + index])
            guessed = longer[len(tokens) :]
            found.add(tuple(guessed[: next((i for i, token in enumerate(guessed) if token < 0), most)]))
    return found


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=40), st.integers(1, 7))
def test_what_followed_the_same_tokens_is_guessed(tokens: list[int], most: int) -> None:
    said: list[int] = []
    repetitions = Repetitions(said)
    for token in tokens:
        expected = by_hand([*said, token], most)
        found = repetitions.guess(token, most)
        guessed = () if found is None else tuple(found.tokens)
        assert guessed in (expected or {()})
        assert found is None or 0 < found.chance < 1
        said.append(token)


def test_the_chance_is_learnt_whether_or_not_guesses_are_run() -> None:
    for right in (True, False):
        said: list[int] = []
        repetitions = Repetitions(said)
        chance = 0.5
        for number in range(400):
            # Every other four are the same, and what follows them is the same or new.
            token = [1, 2, 3, 4 if right else 10 + number][number % 4]
            found = repetitions.guess(token, 3)
            chance = found.chance if found is not None and number % 4 == 2 else chance
            said.append(token)
        assert chance > 0.9 if right else chance < 0.1


@given(st.lists(st.floats(0.1, 9), min_size=8, max_size=8), st.floats(0.01, 0.99), st.integers(0, 7))
def test_as_many_are_run_as_give_most_tokens_per_second(costs: list[float], chance: float, most: int) -> None:
    known = PassCosts()
    for count, seconds in enumerate(costs, 1):
        known.took(count, seconds)

    def rate(count: int) -> float:
        return sum(chance**index for index in range(count + 1)) / costs[count]

    best = known.worth(chance, most)
    assert 0 <= best <= most and rate(best) == pytest.approx(max(map(rate, range(most + 1))))


@given(st.dictionaries(st.integers(1, 8), st.floats(0.1, 9), min_size=1))
def test_costs_that_were_not_measured_lie_between_those_that_were(seconds: dict[int, float]) -> None:
    known = PassCosts()
    for count, cost in seconds.items():
        known.took(count, cost)
    for count in range(1, 9):
        if count in seconds:
            assert known.of(count) == seconds[count]
        elif min(seconds) < count < max(seconds):
            below, above = max(each for each in seconds if each < count), min(each for each in seconds if each > count)
            between = sorted((seconds[below], seconds[above]))
            assert between[0] - 1e-9 <= known.of(count) <= between[1] + 1e-9
        elif len(seconds) == 1:
            (single,) = seconds
            assert known.of(count) == pytest.approx(
                seconds[single] * (1 + ROW_COST * (count - 1)) / (1 + ROW_COST * (single - 1))
            )


def test_one_slow_pass_is_no_cost_and_old_costs_are_forgotten() -> None:
    known = PassCosts()
    for _ in range(MEASURED - 1):
        known.took(8, 2.0)
    known.took(8, 100.0)
    assert known.of(8) == 2.0
    assert known.worth(0.99, 7) == 0, "what a single token costs is not known yet"
    for _ in range(VALID_PASSES):
        known.took(1, 1.0)
    assert known.of(8) != 2.0 and known.worth(0.99, 7) == 7


def test_what_is_longer_than_all_that_was_measured_costs_as_much_more_as_that() -> None:
    known = PassCosts()
    known.took(1, 1.0)
    known.took(4, 1.06)
    assert known.of(16) == pytest.approx(1.3) and known.worth(0.9, 15) > 9
    known.took(4, 30.0)
    known.took(4, 30.0)
    assert known.worth(0.9, 15) == 0
