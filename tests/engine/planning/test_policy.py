"""The papers' policies and baselines: their decisions by hand, and what all policies have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc.messages import ExpertPolicy
from engine.planning.balancing import layer_sides
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve, ExpertShape
from engine.planning.policy import (
    ActiveExpert,
    Balanced,
    Monde,
    Policy,
    Twiddler,
    hot_experts,
    policy_named,
)
from tests.support.random_examples import examples

NAMES = get_args(ExpertPolicy)
MEASURED = Calibration(
    version=CALIBRATION_VERSION,
    machine="a machine of the tests",
    shape=ExpertShape(hidden=64, ffn=128, dtype="BF16", expert_bytes=32_000_000),
    cpu=Curve((1, 4, 8, 16), (2e-3, 2.2e-3, 4e-3, 8e-3)),
    memory_read=16e9,
    gpu=Curve((1, 16), (1e-4, 1e-4)),
    weight_copy=5e-3,
    activation_copy=Curve((1, 16), (1e-5, 2e-5)),
)


def active(*tokens: int, resident: tuple[int, ...] = ()) -> list[ActiveExpert]:
    return [ActiveExpert(expert, count, expert in resident) for expert, count in enumerate(tokens)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(10), deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=20))
def test_every_policy_gives_each_expert_a_place_that_it_can_have(
    name: ExpertPolicy, pairs: list[tuple[int, bool]]
) -> None:
    policy = policy_named(name)
    assert policy.name == name
    experts = [ActiveExpert(expert, *pair) for expert, pair in enumerate(pairs)]
    decision = policy.decide(3, experts, MEASURED)
    for each, place in zip(experts, decision.places, strict=True):
        assert place in (("gpu", "amove") if each.resident else ("pmove", "amove"))
    assert (decision.cpu_s, decision.gpu_s) == layer_sides(experts, decision.places, MEASURED)
    best = Balanced().decide(3, experts, MEASURED)
    assert max(best.cpu_s, best.gpu_s) <= max(decision.cpu_s, decision.gpu_s) * 1.01


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_nothing_can_be_decided(name: ExpertPolicy) -> None:
    alone = msgspec.structs.replace(MEASURED, gpu=None)
    with pytest.raises(ValueError, match="no GPU"):
        policy_named(name).decide(0, active(1, resident=(0,)), alone)


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        policy_named("fastest")  # type: ignore[arg-type]


def test_twiddler_compares_a_line_through_zero_with_copy_and_gpu() -> None:
    # Fitted, 0.507 ms a token against 5.1 ms: up to ten tokens stay on the CPU, though eleven would take it no longer.
    decision = Twiddler().decide(0, active(1, 10, 11, 50, 1, resident=(3, 4)), MEASURED)
    assert decision.places == ("amove", "amove", "pmove", "gpu", "gpu")


def test_equation_6() -> None:
    assert hot_experts(1000, 32e9, 512e9) == pytest.approx(58.8, abs=0.05)
    assert hot_experts(1, 32e9, 512e9) == pytest.approx(0.0588, abs=5e-5)
    assert hot_experts(100, 32e9, 512e9, alpha=2.0) == pytest.approx(11.76, abs=0.01)


def test_monde_sends_the_hottest_to_the_gpu() -> None:
    # 6.4 GB/s of copies beside 16 GB/s of streaming: 2 of 7.
    decision = Monde().decide(0, active(3, 9, 1, 9, 2, 1, 1), MEASURED)
    assert decision.places == ("amove", "pmove", "amove", "pmove", "amove", "amove", "amove")


def test_monde_counts_only_what_is_not_there_already() -> None:
    decision = Monde().decide(0, active(3, 9, 1, 9, resident=(1, 3)), MEASURED)
    assert decision.places == ("pmove", "gpu", "amove", "gpu")


@pytest.mark.parametrize(("cpu_factor", "grows"), [(6.0, True), (0.2, False)])
def test_mondes_alpha_follows_what_is_measured(cpu_factor: float, grows: bool) -> None:
    policy: Policy = Monde(period=8)
    layer = active(*range(1, 33))
    for _ in range(32):
        decision = policy.decide(0, layer, MEASURED)
        policy = policy.observe(0, decision, decision.cpu_s * cpu_factor, decision.gpu_s)
    assert isinstance(policy, Monde)
    assert (policy.alpha > 1.0) == grows
    tuned = policy.decide(0, layer, MEASURED)
    mine = max(tuned.cpu_s * cpu_factor, tuned.gpu_s)
    share = 6.4 / (6.4 + 16.0) * len(layer)
    for step in (-1, 1, 2):
        near = replace(policy, alpha=policy.alpha + step / share).decide(0, layer, MEASURED)
        assert mine <= max(near.cpu_s * cpu_factor, near.gpu_s) * (1 + 1e-9)


def test_monde_learns_nothing_between_its_periods_nor_from_empty_layers() -> None:
    policy: Policy = Monde(period=4)
    for _ in range(3):
        policy = policy.observe(0, policy.decide(0, active(5, 5), MEASURED), 100.0, 1e-9)
    assert isinstance(policy, Monde)
    assert policy.alpha == 1.0
    resident_only: Policy = Monde(period=1)
    resident_only = resident_only.observe(0, resident_only.decide(0, active(5, resident=(0,)), MEASURED), 1.0, 1.0)
    assert isinstance(resident_only, Monde)
    assert resident_only.alpha == 1.0


def test_the_baselines_never_change_sides() -> None:
    experts = active(1, 400, 1, resident=(2,))
    assert policy_named("layers").decide(0, experts, MEASURED).places == ("amove", "amove", "gpu")
    assert policy_named("lru-offload").decide(0, experts, MEASURED).places == ("pmove", "pmove", "gpu")
    for name in ("stream", "on-demand"):
        assert policy_named(name).decide(0, experts, MEASURED).places == ("pmove", "pmove", "gpu")


def test_streaming_copies_what_is_not_active_too() -> None:
    experts = active(1, 1)
    whole = policy_named("stream", experts_per_layer=8).decide(0, experts, MEASURED)
    on_demand = policy_named("on-demand", experts_per_layer=8).decide(0, experts, MEASURED)
    assert whole.gpu_s == pytest.approx(on_demand.gpu_s + 6 * MEASURED.weight_copy)
    assert policy_named("stream").cache.copies_whole_layer
    assert not policy_named("on-demand").cache.copies_whole_layer


def test_what_the_gpu_keeps() -> None:
    kept = {name: policy_named(name).cache for name in NAMES}
    assert {name: rule.kind for name, rule in kept.items()} == {
        "balanced": "lfru",
        "twiddler": "static",
        "monde": "none",
        "layers": "layers",
        "lru-offload": "lru",
        "stream": "none",
        "on-demand": "none",
    }
    assert {name for name, rule in kept.items() if rule.admits_moved} == {"balanced", "lru-offload"}
