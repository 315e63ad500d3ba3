"""The cost of beams against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.memory import (
    ModelSizes,
    beam_memory,
    estimate_beams,
    expected_distinct_experts,
    extra_beam_memory,
    longest_answer,
    step_bytes,
)

MIXTRAL = ModelSizes(
    layers=32,
    hidden=4096,
    trunk_bytes=3_000_000_000,
    expert_bytes=90_000_000_000,
    moe_layers=32,
    experts=8,
    experts_per_token=2,
    key_value_bytes_per_token=131_072,
)


@pytest.mark.parametrize(("experts", "per_token", "rows"), [(4, 2, 1), (4, 2, 3), (5, 3, 2), (6, 1, 3), (3, 3, 2)])
def test_distinct_experts_by_enumeration(experts: int, per_token: int, rows: int) -> None:
    choices = list(itertools.combinations(range(experts), per_token))
    draws = list(itertools.product(choices, repeat=rows))
    mean = sum(len(set(itertools.chain(*draw))) for draw in draws) / len(draws)
    assert expected_distinct_experts(experts, per_token, rows) == pytest.approx(mean)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16))
def test_distinct_experts_stay_in_bounds(experts: int, per_token: int, rows: int) -> None:
    found = expected_distinct_experts(experts, per_token, rows)
    used = min(per_token, experts)
    assert used - 1e-9 <= found <= min(experts, used * rows) + 1e-9
    assert found <= expected_distinct_experts(experts, per_token, rows + 1) + 1e-9


def test_step_reads_the_trunk_once_and_each_expert_once() -> None:
    one = step_bytes(MIXTRAL, 1, 0)
    assert one == pytest.approx(3e9 + 90e9 * 2 / 8)
    many = step_bytes(MIXTRAL, 1000, 0)
    assert many == pytest.approx(93e9)
    assert step_bytes(MIXTRAL, 2, 1000) - step_bytes(MIXTRAL, 2, 0) == 2 * 1000 * 131_072


def test_a_dense_model_pays_for_the_cache_alone() -> None:
    dense = ModelSizes(1, 0, 0, 0, 1, 1_000_000, 0, 100)
    costs = estimate_beams(dense, [1, 4], 1000, 0, 10**9)
    assert costs[0].relative_step_time == 1.0
    assert costs[1].relative_step_time == pytest.approx((1_000_000 + 400_000) / 1_100_000)


@given(
    st.integers(1, 16),
    st.integers(0, 5000),
    st.integers(0, 10**7),
    st.integers(1, 4096),
    st.integers(0, 6000),
    st.sampled_from([0, 1, 1000, 10**6]),
)
def test_longest_answer_is_the_longest(
    width: int, prompt: int, available: int, per_token: int, cached: int, state: int
) -> None:
    found = longest_answer(width, prompt, available, per_token, min(cached, prompt), state)
    if found >= 0:
        assert extra_beam_memory(width, prompt, found, per_token, min(cached, prompt), state) <= available
    assert extra_beam_memory(width, prompt, found + 1, per_token, min(cached, prompt), state) > available


@given(st.integers(1, 15), st.integers(0, 5000), st.integers(1, 5000))
def test_wider_and_longer_cost_more(width: int, prompt: int, new: int) -> None:
    assert beam_memory(width + 1, prompt, new, 8) > beam_memory(width, prompt, new, 8)
    assert beam_memory(width, prompt, new + 1, 8) > beam_memory(width, prompt, new, 8)


def test_fits_changes_where_memory_ends() -> None:
    needed = extra_beam_memory(8, 2000, 0, MIXTRAL.key_value_bytes_per_token, 500)
    assert [cost.fits for cost in estimate_beams(MIXTRAL, [8], 2000, 500, needed)] == [True]
    assert [cost.fits for cost in estimate_beams(MIXTRAL, [8], 2000, 500, needed - 1)] == [False]
    widths = [cost.relative_step_time for cost in estimate_beams(MIXTRAL, range(1, 17), 2000, 0, needed)]
    assert widths == sorted(widths)
    assert widths[0] == 1.0


def test_every_row_has_states_of_its_own() -> None:
    assert beam_memory(4, 100, 20, 8, 1000) == beam_memory(4, 100, 20, 8) + 5 * 1000
    assert extra_beam_memory(4, 100, 20, 8, 50, 1000) == extra_beam_memory(4, 100, 20, 8, 50) + 4 * 1000
    assert longest_answer(4, 100, 3999, 0, 50, 1000) == -1 < longest_answer(4, 100, 4000, 0, 50, 1000)
    costs = ModelSizes(1, 0, 0, 0, 1, 1_000_000, 0, 100, state_bytes=50_000)
    assert step_bytes(costs, 3, 1000) == 1_000_000 + 3 * (100_000 + 100_000)


def test_beams_do_not_pay_for_what_no_window_reaches() -> None:
    kept = 1024 + 256 + 100 + 512
    whole = ModelSizes(1, 0, 0, 0, 1, 1_000_000, 0, 100, windowed_bytes_per_token=40, window=100)
    costs = whole.with_windows(512)
    assert [sizes.dropped_bytes(kept) for sizes in (whole, costs)] == [0, 0]
    assert [sizes.dropped_bytes(kept + 7) for sizes in (whole, costs)] == [0, 7 * 40]
    dropped = (2000 - kept) * 40
    assert step_bytes(costs, 3, 2000) == 1_000_000 + 3 * (200_000 - dropped)
    (found,) = estimate_beams(costs, [3], 2000, 2000, 0)
    assert found.memory_bytes == 4 * (200_000 - dropped)
    needed = extra_beam_memory(3, 2000, 50, 100, 2000, -dropped)
    assert needed == 3 * (200_000 - dropped) + 4 * 50 * 100
    assert longest_answer(3, 2000, needed, 100, 2000, -dropped) == 50


def test_a_model_without_cache_has_no_limit() -> None:
    assert longest_answer(16, 100, 0, 0, 0) > 10**9
