"""Predicted speed of several answers at once, against all choices and by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.calibration import Calibration, Curve, ExpertShape
from engine.planning.memory import ModelSizes
from engine.planning.prediction import (
    ANSWERS,
    DECODE_CONTEXT,
    Shares,
    answers_per_s,
    cpu_speed,
    cpu_step_s,
    experts_s,
    streaming_step_s,
)

CURVE = Curve((1, 2, 5), (1.0, 1.1, 2.0))
MODEL = ModelSizes(
    layers=6,
    moe_layers=4,
    experts=8,
    experts_per_token=2,
    hidden=1024,
    trunk_bytes=600_000_000,
    expert_bytes=32 * 10_000_000,
    key_value_bytes_per_token=100_000,
)
CALIBRATION = Calibration(
    version=1,
    shape=ExpertShape(1024, 512, "BF16", 10_000_000),
    machine="here",
    cpu=Curve((1, 8, 100), (1e-3, 1.5e-3, 10e-3)),
    memory_read=10e9,
)


@pytest.mark.parametrize(("experts", "per_token", "rows"), [(4, 2, 3), (5, 2, 2), (4, 4, 2), (3, 1, 5)])
def test_experts_of_several_rows_against_all_choices(experts: int, per_token: int, rows: int) -> None:
    choices = list(itertools.product(itertools.combinations(range(experts), per_token), repeat=rows))
    expected = 0.0
    for chosen in choices:
        counts = Counter(expert for row in chosen for expert in row)
        expected += sum(CURVE.at(count) for count in counts.values()) / len(choices)
    assert experts_s(CURVE, [per_token / experts] * experts, rows) == pytest.approx(expected)


def test_experts_of_unlike_use_against_all_choices() -> None:
    chances = (0.7, 0.2, 0.1)  # of rows with one expert
    expected = 0.0
    for chosen in itertools.product(range(3), repeat=4):
        probability = 1.0
        for expert in chosen:
            probability *= chances[expert]
        expected += probability * sum(CURVE.at(count) for count in Counter(chosen).values())
    assert experts_s(CURVE, chances, 4) == pytest.approx(expected)


def test_one_row_is_the_step_that_is_predicted_alone() -> None:
    shares = Shares((0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02))
    assert cpu_step_s(MODEL, CALIBRATION, shares, 1e-4, 0.8) == cpu_speed(MODEL, CALIBRATION, shares, 1e-4, 0.8).step_s
    assert cpu_step_s(MODEL, CALIBRATION, Shares.even(8)) == pytest.approx(
        (600_000_000 + DECODE_CONTEXT * 100_000) / 10e9 + 4 * 2 * 1e-3
    )


def test_more_rows_take_as_many_times_as_long_in_the_trunk_as_in_an_expert() -> None:
    experts = 4 * experts_s(CALIBRATION.cpu, [0.25] * 8, 8)
    trunk = (1.5 * 600_000_000 + 8 * DECODE_CONTEXT * 100_000) / 10e9
    assert cpu_step_s(MODEL, CALIBRATION, Shares.even(8), rows=8) == pytest.approx(trunk + experts)


@given(st.sampled_from([Shares.even(8), Shares((0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.01, 0.0))]))
def test_more_rows_take_longer_but_less_each(shares: Shares) -> None:
    seconds = [cpu_step_s(MODEL, CALIBRATION, shares, 1e-4, rows=rows) for rows in range(1, 17)]
    assert all(later > earlier for earlier, later in itertools.pairwise(seconds))
    each = [total / rows for rows, total in enumerate(seconds, 1)]
    assert all(later < earlier for earlier, later in itertools.pairwise(each))


def test_what_streams_reads_the_trunk_once_and_the_texts_of_all() -> None:
    found = streaming_step_s(MODEL, 1e9, 1e-3, rows=2)
    distinct = 8 * (1 - 0.75**2)
    read = 600_000_000 + 2 * DECODE_CONTEXT * 100_000 + 4 * distinct * 10_000_000
    assert found == pytest.approx(6e-3 + read / 1e9)
    assert streaming_step_s(replace(MODEL, experts=0, moe_layers=0), 1e9) == pytest.approx(
        (600_000_000 + DECODE_CONTEXT * 100_000) / 1e9
    )


def test_what_streams_does_not_multiply_any_number_of_rows_meanwhile() -> None:
    """A guessed processor reads 40 and multiplies 1000 billion; the trunk has 300 million numbers of 16 bits."""
    model = replace(MODEL, experts=0, moe_layers=0, key_value_bytes_per_token=0)
    assert streaming_step_s(model, 40e9, rows=16) == streaming_step_s(model, 40e9) == pytest.approx(0.015)
    assert streaming_step_s(model, 40e9, rows=100) == pytest.approx(100 * 2 * 0.3e9 / 1e12)


def test_answers_beyond_a_pass_take_turns() -> None:
    taken = {1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0}
    assert answers_per_s(taken.__getitem__, 8) == pytest.approx((1.0, 2 / 1.5, 4 / 2.0, 8 / 3.0, 16 / 6.0))
    assert answers_per_s(taken.__getitem__, 1) == pytest.approx((1.0,) * len(ANSWERS))
    assert answers_per_s({1: 1.0, 2: 1.5, 3: 1.8}.__getitem__, 3) == pytest.approx(
        (1.0, 2 / 1.5, 4 / 2.8, 8 / 5.1, 16 / 10.0)
    )
