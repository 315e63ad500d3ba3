"""The balanced policy against brute force and, for large layers, a bound; the cost model against a simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning import balancing
from engine.planning.balancing import (
    ActiveExpert,
    LayerLoad,
    Place,
    cpu_seconds,
    gpu_seconds,
    layer_sides,
    sides,
)
from engine.planning.calibration import CALIBRATION_VERSION, Calibration, Curve, ExpertShape
from engine.planning.policy import Balanced
from tests.support.random_examples import examples

POINTS = (1, 2, 4, 8, 16, 64, 256, 1024)


def curve(base: float, knee: float, slope: float) -> Curve:
    """Flat up to ``knee`` tokens, then rising."""
    return Curve(POINTS, tuple(base * max(1.0, n / knee) + slope * n for n in POINTS))


def calibration(
    *,
    cpu: Curve,
    gpu: Curve,
    weight_copy: float,
    activation_copy: Curve | None = None,
    cpu_overlapped: float = 1.0,
    copy_overlapped: float = 1.0,
) -> Calibration:
    return Calibration(
        version=CALIBRATION_VERSION,
        machine="a machine of the tests",
        shape=ExpertShape(hidden=64, ffn=128, dtype="BF16", expert_bytes=3 * 64 * 128 * 2),
        cpu=cpu,
        memory_read=20e9,
        gpu=gpu,
        weight_copy=weight_copy,
        activation_copy=activation_copy,
        cpu_overlapped=cpu_overlapped,
        copy_overlapped=copy_overlapped,
    )


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    cpu = 10.0 ** draw(st.floats(-4, -1))
    gpu = cpu * 10.0 ** draw(st.floats(-2, 0.5))
    return calibration(
        cpu=curve(cpu, draw(st.sampled_from([1, 2, 4, 8])), cpu * draw(st.sampled_from([0.0, 0.01, 0.3]))),
        gpu=curve(gpu, draw(st.sampled_from([8, 64, 512])), gpu * draw(st.sampled_from([0.0, 0.001, 0.3]))),
        weight_copy=draw(st.sampled_from([0.0, cpu * 10.0 ** draw(st.floats(-2, 1))])),
        activation_copy=draw(st.sampled_from([None, Curve((1, 100), (cpu * 0.01, cpu * 0.2))])),
        cpu_overlapped=draw(st.sampled_from([1.0, 1.2, 2.0])),
        copy_overlapped=draw(st.sampled_from([1.0, 1.3, 1.8])),
    )


def actives(most: int, tokens: int) -> st.SearchStrategy[list[ActiveExpert]]:
    pair = st.tuples(st.integers(1, tokens), st.booleans())
    return st.lists(pair, min_size=1, max_size=most).map(
        lambda pairs: [ActiveExpert(expert, *pair) for expert, pair in enumerate(pairs)]
    )


def assignments(active: Sequence[ActiveExpert]) -> list[tuple[Place, ...]]:
    on_gpu: list[Place] = ["gpu" if each.resident else "pmove" for each in active]
    return [
        tuple("amove" if cpu else place for cpu, place in zip(choice, on_gpu, strict=True))
        for choice in itertools.product((False, True), repeat=len(active))
    ]


@settings(max_examples=examples(20), deadline=None)
@given(calibrations(), st.one_of(actives(8, 4), actives(8, 500)))
def test_is_as_good_as_the_best_of_all_assignments(measured: Calibration, active: list[ActiveExpert]) -> None:
    decision = Balanced().decide(0, active, measured)
    best = min(max(layer_sides(active, places, measured)) for places in assignments(active))
    assert max(decision.cpu_s, decision.gpu_s) <= best * (1 + 1e-9)
    assert (decision.cpu_s, decision.gpu_s) == layer_sides(active, decision.places, measured)


@settings(max_examples=examples(20), deadline=None)
@given(calibrations(), actives(40, 200))
def test_every_place_suits_its_expert_and_the_answer_is_always_the_same(
    measured: Calibration, active: list[ActiveExpert]
) -> None:
    decision = Balanced().decide(0, active, measured)
    for each, place in zip(active, decision.places, strict=True):
        assert place in (("gpu", "amove") if each.resident else ("pmove", "amove"))
    assert decision == Balanced().decide(7, active, measured)
    everything_there = [ActiveExpert(each.expert, each.tokens, True) for each in active]
    better = Balanced().decide(0, everything_there, measured)
    assert max(better.cpu_s, better.gpu_s) <= max(decision.cpu_s, decision.gpu_s) * 1.05


def no_assignment_is_below(active: Sequence[ActiveExpert], measured: Calibration, known: float) -> float:
    """A time that no assignment undercuts: the best over (CPU's seconds, copies) of the GPU's least computing.

    CPU seconds are rounded down, by less than a 32nd of ``known`` for all experts together, and the last copied
    expert's computing is left out.
    """
    buckets = 32 * len(active)
    width = known / buckets
    missing = sum(not each.resident for each in active)
    least = np.full((missing + 1, buckets + 1), math.inf)
    least[0, 0] = 0.0
    for each in active:
        cost = int(cpu_seconds(each.tokens, measured) / width)
        gpu = gpu_seconds(each.tokens, measured)
        chosen = np.full_like(least, math.inf)
        if cost <= buckets:
            chosen[:, cost:] = least[:, : buckets + 1 - cost]
        if each.resident:
            chosen = np.minimum(chosen, least + gpu)
        else:
            chosen[1:] = np.minimum(chosen[1:], least[:-1] + gpu)
        least = chosen
    best = math.inf
    for copies in range(missing + 1):
        falling = math.inf
        for place in np.nonzero(np.isfinite(least[copies]))[0]:
            if least[copies, place] < falling:
                falling = float(least[copies, place])
                load = LayerLoad(cpu=place * width, resident=falling, copies=copies)
                best = min(best, max(sides(load, measured)))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["one each", "even", "few hot", "geometric"])
@pytest.mark.parametrize("resident", [0.0, 0.25, 0.6])
@pytest.mark.parametrize("experts", [48, pytest.param(128, marks=pytest.mark.soak)])
def test_many_experts_are_within_5_percent_of_any_assignment(tokens: str, resident: float, experts: int) -> None:
    chance = random.Random(f"{tokens} {resident}")
    for _ in range(2):
        counts = {
            "one each": lambda place: 1,
            "even": lambda place: chance.randint(1, 64),
            "few hot": lambda place: max(1, int(800 / (place + 1) ** 1.2)),
            "geometric": lambda place: max(1, int(chance.expovariate(1 / 20))),
        }[tokens]
        active = [ActiveExpert(place, counts(place), chance.random() < resident) for place in range(experts)]
        cpu = 10.0 ** chance.uniform(-4, -2)
        measured = calibration(
            cpu=curve(cpu, chance.choice([1, 4, 8]), cpu * chance.choice([0.0, 0.05])),
            gpu=curve(cpu * 10.0 ** chance.uniform(-2, 0), 64, 0.0),
            weight_copy=cpu * 10.0 ** chance.uniform(-1, 1),
            cpu_overlapped=chance.choice([1.0, 1.4]),
            copy_overlapped=chance.choice([1.0, 1.4]),
        )
        decision = Balanced().decide(0, active, measured)
        taken = max(decision.cpu_s, decision.gpu_s)
        assert taken <= 1.05 * no_assignment_is_below(active, measured, taken)


def test_a_resident_expert_helps_out_on_the_cpu_only_where_that_is_sooner() -> None:
    level = calibration(cpu=curve(1e-3, 1024, 0.0), gpu=curve(1e-3, 1024, 0.0), weight_copy=1.0)
    two = [ActiveExpert(0, 1, True), ActiveExpert(1, 1, True)]
    assert sorted(Balanced().decide(0, two, level).places) == ["amove", "gpu"]
    fast = calibration(cpu=curve(1e-3, 1024, 0.0), gpu=curve(1e-4, 1024, 0.0), weight_copy=1.0)
    assert Balanced().decide(0, two, fast).places == ("gpu", "gpu")


def test_copies_fill_the_time_in_which_the_cpu_works() -> None:
    measured = calibration(cpu=curve(3e-3, 1024, 0.0), gpu=curve(1e-4, 1024, 0.0), weight_copy=2.9e-3)
    active = [ActiveExpert(0, 1, False), ActiveExpert(1, 1, False)]
    decision = Balanced().decide(0, active, measured)
    assert sorted(decision.places) == ["amove", "pmove"]
    assert decision.cpu_s == pytest.approx(3e-3)
    assert decision.gpu_s == pytest.approx(3e-3)


def test_nothing_active_takes_no_time() -> None:
    measured = calibration(cpu=curve(1e-3, 8, 0.0), gpu=curve(1e-4, 8, 0.0), weight_copy=1e-3)
    decision = Balanced().decide(0, [], measured)
    assert (decision.places, decision.cpu_s, decision.gpu_s) == ((), 0.0, 0.0)


def simulated_gpu(resident: Sequence[float], moved: Sequence[float], copy: float) -> float:
    """When the GPU is done if copies follow one another and moved experts run in this order, after the residents."""
    done, arrived = sum(resident), 0.0
    for computing in moved:
        arrived += copy
        done = max(done, arrived) + computing
    return done


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.floats(0.01, 5.0), max_size=4),
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5),
    st.floats(0.01, 5.0),
)
def test_the_gpus_time_is_that_of_the_best_order(resident: list[float], moved: list[float], copy: float) -> None:
    measured = calibration(cpu=curve(1.0, 8, 0.0), gpu=curve(1.0, 8, 0.0), weight_copy=copy)
    load = LayerLoad(resident=sum(resident), moved=sum(moved), smallest_moved=min(moved), copies=len(moved))
    best = min(simulated_gpu(resident, order, copy) for order in itertools.permutations(moved))
    assert sides(load, measured)[1] == pytest.approx(best)


@settings(max_examples=examples(40), deadline=None)
@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(1, 3), st.floats(1, 3))
def test_both_sides_slow_each_other_only_while_both_work(
    cpu: float, copy: float, slow_cpu: float, slow_copy: float
) -> None:
    tiny = 1e-12
    measured = calibration(
        cpu=curve(1.0, 8, 0.0),
        gpu=curve(tiny, 8, 0.0),
        weight_copy=copy,
        cpu_overlapped=slow_cpu,
        copy_overlapped=slow_copy,
    )
    took_cpu, took_gpu = sides(LayerLoad(cpu=cpu, moved=tiny, smallest_moved=tiny, copies=1), measured)
    both = min(took_cpu, took_gpu)
    assert both / slow_cpu + max(0.0, took_cpu - both) == pytest.approx(cpu, rel=1e-6)
    assert both / slow_copy + max(0.0, took_gpu - both) == pytest.approx(copy, rel=1e-6)


# --- many experts: the cut ------------------------------------------------------------------------------------------


def soonest_cut(active: Sequence[ActiveExpert], measured: Calibration) -> float:
    """Of all cuts in both orders, with every number of residents that may follow, the soonest."""

    def seconds(each: ActiveExpert) -> tuple[float, float]:
        return cpu_seconds(each.tokens, measured), gpu_seconds(each.tokens, measured)

    def gain(each: ActiveExpert) -> float:
        cpu, gpu = seconds(each)
        return cpu / max(gpu, 1e-12)

    residents = sorted((each for each in active if each.resident), key=gain)
    found = []
    for order in (lambda each: seconds(each)[0], gain):
        missing = sorted((each for each in active if not each.resident), key=order)
        for left in range(len(missing) + 1):
            moved = [seconds(each)[1] for each in missing[left:]]
            there = sum(seconds(each)[0] for each in missing[:left])
            for followed in range(len(residents) + 1):
                load = LayerLoad(
                    cpu=there + sum(seconds(each)[0] for each in residents[:followed]),
                    resident=sum(seconds(each)[1] for each in residents[followed:]),
                    moved=sum(moved),
                    smallest_moved=min(moved, default=0.0),
                    copies=len(moved),
                )
                found.append(max(sides(load, measured)))
    return min(found)


@settings(max_examples=examples(12), deadline=None)
@given(active=actives(40, 60), measured=calibrations())
def test_no_cut_is_sooner_than_the_decision(active: list[ActiveExpert], measured: Calibration) -> None:
    decision = Balanced().decide(0, active, measured)
    assert max(decision.cpu_s, decision.gpu_s) <= soonest_cut(active, measured) * (1 + 1e-9)


def test_deciding_for_128_experts_looks_at_few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a hundred and more in each order, each with up to as many residents that follow; less than three times
    as many sums as experts are made of them."""
    made = 0

    def counted(load: LayerLoad, measured: Calibration) -> tuple[float, float]:
        nonlocal made
        made += 1
        return sides(load, measured)

    monkeypatch.setattr(balancing, "sides", counted)
    draw = random.Random(1)
    experts, layers = 128, 60
    for _ in range(layers):
        cpu = 10.0 ** draw.uniform(-4, -2)
        gpu = cpu * 10.0 ** draw.uniform(-2, 0.3)
        measured = calibration(
            cpu=curve(cpu, draw.choice([1, 4, 8]), cpu * draw.choice([0.0, 0.01, 0.3])),
            gpu=curve(gpu, draw.choice([8, 64, 512]), 0.0),
            weight_copy=cpu * 10.0 ** draw.uniform(-2, 1),
            cpu_overlapped=draw.choice([1.0, 1.2, 2.0]),
            copy_overlapped=draw.choice([1.0, 1.3, 1.8]),
        )
        most, resident = draw.choice([4, 200, 2000]), draw.choice([0.0, 0.2, 0.5, 0.8])
        Balanced().decide(
            0, [ActiveExpert(e, draw.randint(1, most), draw.random() < resident) for e in range(experts)], measured
        )
    assert made < 3 * experts * layers
