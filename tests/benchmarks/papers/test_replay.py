"""Replaying routes: counters by hand, the cache against a simple model, and what popularity survives."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.replay import ReplayedCache, Step, replay
from engine.ipc.messages import ExpertPolicy
from engine.planning.calibration import ExpertShape, Processor, estimated
from engine.planning.policy import CacheRule, policy_named

NAMES = get_args(ExpertPolicy)
SHAPE = ExpertShape(hidden=1024, ffn=2048, dtype="BF16", expert_bytes=3 * 1024 * 2048 * 2)
MEASURED = estimated(SHAPE, cpu=Processor(20e9, 200e9), gpu=Processor(500e9, 50e12, 1e-5), pcie_rate=20e9)
LAYERS, EXPERTS = 4, 8
ORDER = [(layer, expert) for expert in range(EXPERTS) for layer in range(LAYERS)]


def routes(seed: int, rows: list[int], per_token: int = 2) -> list[Step]:
    chance = random.Random(seed)
    made = []
    for count in rows:
        layers = []
        for _ in range(LAYERS):
            tokens = [0] * EXPERTS
            for _ in range(count):
                for expert in chance.sample(range(EXPERTS), per_token):
                    tokens[expert] += 1
            layers.append(tuple((expert, n) for expert, n in enumerate(tokens) if n))
        made.append(Step(count, tuple(layers)))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_counters_agree_with_the_routes(name: ExpertPolicy) -> None:
    trace = routes(1, [20, 1, 1, 4])
    done = replay(trace, policy_named(name, EXPERTS), MEASURED, 12, EXPERTS, ORDER)
    active = sum(len(layer) for step in trace for layer in step.layers)
    sent = sum(tokens for step in trace for layer in step.layers for _, tokens in layer)
    assert done.hits + done.misses == active
    assert 0 <= done.moved <= done.misses
    copied = 4 * LAYERS * EXPERTS if name == "stream" else done.moved
    assert done.weight_bytes == copied * SHAPE.expert_bytes
    assert done.activation_bytes <= sent * 2 * 4 * SHAPE.hidden
    assert len(done.seconds) == 4
    assert max(done.cpu_s, done.gpu_s) <= done.total_s * (1 + 1e-9) <= (done.cpu_s + done.gpu_s) * (1 + 1e-8)
    assert done.hit_rate == pytest.approx(done.hits / active)


def test_everything_there_is_all_hits_and_no_copies() -> None:
    done = replay(routes(2, [5, 1]), policy_named("lru-offload"), MEASURED, LAYERS * EXPERTS, EXPERTS, ORDER)
    assert (done.hit_rate, done.weight_bytes, done.moved, done.cpu_s) == (1.0, 0, 0, 0.0)


def test_a_warm_up_is_not_counted() -> None:
    trace = routes(3, [1] * 6)
    whole = replay(trace, policy_named("lru-offload"), MEASURED, 8, EXPERTS)
    later = replay(trace, policy_named("lru-offload"), MEASURED, 8, EXPERTS, warm_up=4)
    assert later.seconds == whole.seconds[4:]
    assert later.hits + later.misses == 2 * LAYERS * 2


def test_the_least_recently_used_goes_first_and_never_one_in_use() -> None:
    cache = ReplayedCache(CacheRule("lru", True, "layer"), 2 * LAYERS, LAYERS, EXPERTS)
    for expert in (0, 1):
        cache.used(0, [expert])
        assert cache.admit(0, expert, [expert])
    cache.used(0, [0])
    cache.used(0, [2])
    assert cache.admit(0, 2, [2])
    assert [(0, expert) in cache for expert in range(3)] == [True, False, True]
    cache.used(0, [0, 2, 3])
    assert not cache.admit(0, 3, [0, 2, 3])


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(0, 40),
    uses=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1), max_size=3)), max_size=40),
    kind=st.sampled_from(["lru", "lfru", "static", "none", "layers"]),
    scope=st.sampled_from(["layer", "global"]),
)
def test_a_cache_never_holds_more_than_its_slots(
    slots: int, uses: list[tuple[int, set[int]]], kind: str, scope: str
) -> None:
    rule = CacheRule(kind, kind in ("lru", "lfru"), scope)  # type: ignore[arg-type]
    cache = ReplayedCache(rule, slots, LAYERS, EXPERTS, ORDER)
    before = len(cache)
    for layer, experts in uses:
        cache.used(layer, experts)
        there = {expert for expert in experts if (layer, expert) in cache}
        for expert in experts - there:
            kept = cache.admit(layer, expert, experts)
            assert kept == ((layer, expert) in cache)
        assert all((layer, expert) in cache for expert in there)
        assert len(cache) <= (0 if kind == "none" else min(slots, LAYERS * EXPERTS))
    if kind in ("static", "layers", "none"):
        assert len(cache) == before


def test_one_long_prompt_leaves_the_popular_experts_where_they_are() -> None:
    prompt = routes(5, [200])
    done = replay(prompt, policy_named("balanced"), MEASURED, 12, EXPERTS, ORDER)
    assert done.hits == 12


def test_what_was_used_often_replaces_what_popularity_said_wrongly() -> None:
    hot = Step(1, (((6, 1), (7, 1)),) * LAYERS)
    fast = estimated(SHAPE, cpu=Processor(20e9, 200e9), gpu=Processor(500e9, 50e12, 1e-5), pcie_rate=60e9)
    done = replay([hot] * 120, policy_named("balanced"), fast, 2 * LAYERS, EXPERTS, ORDER, warm_up=100)
    assert done.hit_rate > 0.9


def test_a_negative_number_of_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match="-1 slots"):
        ReplayedCache(CacheRule("lru", True, "layer"), -1, LAYERS, EXPERTS)
