"""The near-data device against its data sheet, and the workflows against each other and the paper's trends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.near_data_device import Link, NearDevice, NearMemory, NearSystem, RooflineGpu
from benchmarks.papers.near_workflows import (
    NLLB_DECODER,
    NLLB_ENCODER,
    SWITCH_DECODER,
    SWITCH_ENCODER,
    HostCpu,
    activation_movement,
    dense_seconds,
    expert_bytes_of,
    hot_count,
    ideal,
    load_balanced,
    parameter_movement,
    simulate,
    tuned_alpha,
)

NLLB = NearSystem(hidden=2048, ffn=8192)
LAYERS = st.lists(st.integers(1, 400), max_size=60)


def skewed(seed: int, layers: int = 6, experts: int = 128) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [max(1, int(1500 / (rank + 1) ** chance.uniform(1.2, 1.6))) for rank in range(experts)] for _ in range(layers)
    ]


def test_the_memory_streams_what_the_paper_says() -> None:
    memory = NearMemory()
    assert memory.peak_rate / 8 == pytest.approx(68e9, rel=0.01)
    assert memory.stream_rate == pytest.approx(512e9, rel=0.01)
    whole = 64 * 1024 * 1024
    assert whole / memory.seconds(whole) == pytest.approx(memory.stream_rate, rel=0.01)
    assert memory.seconds(1) == memory.seconds(1024) > memory.first_word_s


def test_few_banks_cannot_hide_their_opening() -> None:
    assert NearMemory(banks=1, page_bytes=1024).stream_rate < 0.5 * NearMemory().stream_rate


def test_an_expert_of_four_tokens_takes_what_its_weights_take() -> None:
    device = NearDevice()
    streaming = NLLB.expert_bytes / device.stream_rate
    assert streaming < device.expert(4, 2048, 8192) < 1.1 * streaming
    assert device.expert(1, 2048, 8192) == pytest.approx(device.expert(4, 2048, 8192), rel=0.03)


def test_more_tokens_take_as_many_times_as_they_fill_tiles() -> None:
    device = NearDevice()
    four = device.expert(4, 2048, 8192)
    assert device.expert(5, 2048, 8192) == pytest.approx(2 * four, rel=0.05)
    assert device.expert(64, 2048, 8192) == pytest.approx(16 * four, rel=0.05)
    operations = 2 * 2 * 64 * 2048 * 8192 / device.expert(64, 2048, 8192)
    assert 0.9 < operations / (2 * 64 * 16 * 1e9) <= 1.0


@given(st.integers(0, 300), st.integers(1, 4096), st.integers(1, 4096))
@settings(max_examples=60, deadline=None)
def test_computing_is_never_faster_than_memory_or_arrays_allow(tokens: int, inner: int, outer: int) -> None:
    device = NearDevice()
    taken = device.gemm(tokens, inner, outer)
    assert taken >= 2 * inner * outer / device.stream_rate * (tokens > 0)
    assert taken >= tokens * inner * outer / (64 * 16 * 1e9)
    assert device.gemm(tokens + 1, inner, outer) >= taken


def test_twice_the_bandwidth_with_arrays_to_match_halves_the_time() -> None:
    fast = NearDevice(bandwidth_factor=2.0)
    assert NearDevice().gemm(3, 2048, 8192) / fast.gemm(3, 2048, 8192) == pytest.approx(2.0, rel=0.01)


def test_moving_a_single_tokens_expert_takes_many_times_its_computing() -> None:
    # The paper's figure 2(c): up to 30 times.
    copy, computing = Link().seconds(NLLB.expert_bytes), RooflineGpu().expert(1, 2048, 8192)
    assert 15 < copy / computing < 45


def test_the_papers_models_have_the_papers_sizes() -> None:
    assert expert_bytes_of([SWITCH_ENCODER, SWITCH_DECODER]) / 1e9 == pytest.approx(51.5, rel=0.01)
    assert expert_bytes_of([NLLB_ENCODER, NLLB_DECODER]) / 1e9 == pytest.approx(103.1, rel=0.01)


def test_equation_6_with_the_papers_bandwidths() -> None:
    assert NLLB.hot_share == pytest.approx(32 / (512 + 32), rel=0.01)
    assert hot_count(NLLB, 128, 1.0) == 8
    assert hot_count(NearSystem(2048, 8192, devices=4), 128, 1.0) == 2
    assert hot_count(NLLB, 4, 100.0) == 4


@given(LAYERS)
@settings(max_examples=60, deadline=None)
def test_the_extremes_of_load_balancing_are_the_other_workflows(tokens: list[int]) -> None:
    assert load_balanced(NLLB, tokens, 0) == activation_movement(NLLB, tokens)
    assert load_balanced(NLLB, tokens, len(tokens)) == parameter_movement(NLLB, tokens)
    assert ideal(NLLB, tokens) <= parameter_movement(NLLB, tokens)


@given(LAYERS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_all_devices_together_do_the_same_work(tokens: list[int], devices: int) -> None:
    one = activation_movement(NLLB, tokens)
    several = activation_movement(NLLB, tokens, devices=devices)
    computing = sum(map(NLLB.near_expert, tokens))
    assert several >= computing / devices
    # Each device has copies of its own to start, there and back.
    assert several <= one + 2 * devices * NLLB.link.fixed_s + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_tuned_alpha_has_no_better_neighbour_and_beats_both_extremes(seed: int) -> None:
    layers = skewed(seed)
    alpha = tuned_alpha(NLLB, layers)

    def total(near: float) -> float:
        return sum(load_balanced(NLLB, tokens, hot_count(NLLB, len(tokens), near)) for tokens in layers)

    step = 1.0 / (NLLB.hot_share * 128)
    assert total(alpha) <= min(total(alpha - step), total(alpha + step), total(alpha + 2 * step))
    assert total(alpha) <= min(total(0.0), total(1e9), total(1.0))


def test_the_trends_of_the_papers_figure_7() -> None:
    layers = skewed(7)
    speeds, gaps, hot = [], [], []
    for factor in (0.5, 1.0, 1.5, 2.0):
        system = NearSystem(2048, 8192, device=NearDevice(bandwidth_factor=factor))
        moving, near = simulate(system, "GPU+PM", layers).seconds, simulate(system, "MD+AM", layers).seconds
        both = simulate(system, "MD+LB", layers, tune_on=6)
        assert both.hot_share is not None
        speeds.append(moving / both.seconds)
        gaps.append(near / both.seconds)
        hot.append(both.hot_share)
    assert speeds == sorted(speeds)
    assert gaps == sorted(gaps, reverse=True)
    assert hot == sorted(hot, reverse=True)
    assert min(gaps) > 1.0


def test_a_cpu_near_the_memory_is_slower_than_the_device() -> None:
    layers = skewed(3)
    assert simulate(NLLB, "CPU+AM", layers).seconds > 2 * simulate(NLLB, "MD+LB", layers).seconds
    slow = simulate(NLLB, "CPU+AM", layers, cpu=HostCpu(memory_rate=20e9)).seconds
    assert slow > simulate(NLLB, "CPU+AM", layers).seconds


def test_no_routes_take_no_time() -> None:
    for workflow in ("GPU+PM", "MD+AM", "MD+LB", "CPU+AM", "Ideal"):
        assert simulate(NLLB, workflow, [[]]).seconds == 0.0
    assert NearDevice().expert(0, 2048, 8192) == 0.0


def test_what_is_not_experts_grows_with_rows_and_the_frameworks_time() -> None:
    gpu = RooflineGpu()
    assert dense_seconds(NLLB_ENCODER, gpu, 2048, 512) > dense_seconds(NLLB_ENCODER, gpu, 512, 512)
    more = dense_seconds(NLLB_DECODER, gpu, 1, 512, 1e-3) - dense_seconds(NLLB_DECODER, gpu, 1, 512)
    assert more == pytest.approx(24e-3)
