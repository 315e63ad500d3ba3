"""What is measured how often, and what becomes of it: on sides whose speeds are given, by a clock that they move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.calibration.expert_cost import (
    FEWEST_POINTS,
    FEWEST_ROUNDS,
    LONG_S,
    MOST_ROUNDS,
    TOKENS,
    calibration_of,
    measure,
    never_falling,
    slowed_by,
)
from engine.errors import Cancelled
from engine.planning.calibration import CALIBRATION_VERSION, ExpertShape

SHAPE = ExpertShape(hidden=8, ffn=16, dtype="BF16", expert_bytes=768)


class Bench:
    """The CPU's side, and the clock of both. Seconds: an expert takes ``cpu`` + ``per_token`` * tokens.

    While copies are under way the CPU takes ``slowed`` times as long, and they ``stretched`` times while it works.
    """

    name = "a given device"
    experts_per_call = 2

    def __init__(self, cpu: float = 1e-3, per_token: float = 1e-5, slowed: float = 1.0, stretched: float = 1.0) -> None:
        self.now = 0.0
        self.cpu = cpu
        self.per_token = per_token
        self.slowed = slowed
        self.stretched = stretched
        self.copies_left = 0.0
        self.copies_end = 0.0
        self.prepared: set[int] = set()
        self.ran: list[int] = []

    def clock(self) -> float:
        return self.now

    def prepare(self, tokens: int) -> None:
        self.prepared.add(tokens)

    def run(self, tokens: int) -> None:
        assert tokens in self.prepared
        self.ran.append(tokens)
        work = self.experts_per_call * (self.cpu + self.per_token * tokens)
        both = min(work * self.slowed, self.copies_left * self.stretched)
        self.now += both + work - both / self.slowed
        if self.copies_left > 0.0:
            self.copies_left -= both / self.stretched
            self.copies_end = self.now if self.copies_left > 1e-12 else self.now - (work - both / self.slowed)

    def memory_read(self) -> float:
        self.now += 1e-4
        return 5e10


class Device:
    """The device of ``bench``: 0.1 ms an expert and 1 us a token; 2 ms a copy."""

    name = "a given device"
    experts_per_call = 4

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.copies = 0

    def run(self, tokens: int) -> None:
        self.bench.now += self.experts_per_call * (1e-4 + 1e-6 * tokens)

    def copy(self) -> None:
        self.bench.now += 2e-3

    def operations(self, count: int) -> None:
        self.bench.now += 3e-6 * count

    def activations(self, tokens: int) -> None:
        self.bench.now += 2e-5 + 1e-7 * tokens

    def start_copies(self, count: int) -> Callable[[], tuple[float, float]]:
        self.copies += count
        start = self.bench.now
        self.bench.copies_left = count * 2e-3

        def finish() -> tuple[float, float]:
            if self.bench.copies_left > 1e-12:
                self.bench.now += self.bench.copies_left
                self.bench.copies_left, self.bench.copies_end = 0.0, self.bench.now
            return start, self.bench.copies_end

        return finish


def test_the_calibration_is_what_the_sides_take() -> None:
    bench = Bench()
    device = Device(bench)
    figures = measure(bench, device, bench.memory_read, bench.clock)
    found = calibration_of(figures, "a machine", SHAPE)
    assert (found.version, found.machine, found.shape) == (CALIBRATION_VERSION, "a machine", SHAPE)
    assert found.cpu.tokens == TOKENS and found.gpu is not None and found.activation_copy is not None
    for tokens, seconds in zip(found.cpu.tokens, found.cpu.seconds, strict=True):
        assert seconds == pytest.approx(1e-3 + 1e-5 * tokens)
    assert found.gpu.at(8) == pytest.approx(1.08e-4)
    assert found.activation_copy.at(1) == pytest.approx(2.01e-5)
    assert found.weight_copy == pytest.approx(2e-3)
    assert found.gpu_operation_s == pytest.approx(3e-6)
    assert found.memory_read == 5e10
    assert all(len(seconds) == MOST_ROUNDS for seconds in figures.cpu.values())


def test_without_a_device_only_the_cpu_is_measured() -> None:
    bench = Bench()
    found = calibration_of(measure(bench, None, bench.memory_read, bench.clock), "a machine", SHAPE)
    assert found.gpu is None and found.activation_copy is None and found.weight_copy == 0.0
    assert (found.cpu_overlapped, found.copy_overlapped) == (1.0, 1.0)


@pytest.mark.parametrize(("slowed", "stretched"), [(1.0, 1.0), (1.5, 1.5), (1.1, 2.0), (2.0, 1.2), (3.0, 3.0)])
def test_both_at_once_are_told_apart(slowed: float, stretched: float) -> None:
    bench = Bench(slowed=slowed, stretched=stretched)
    device = Device(bench)
    found = calibration_of(measure(bench, device, bench.memory_read, bench.clock), "a machine", SHAPE)
    assert found.cpu_overlapped == pytest.approx(slowed, rel=0.01)
    assert found.copy_overlapped == pytest.approx(stretched, rel=0.01)
    assert device.copies >= MOST_ROUNDS


def test_what_went_undisturbed_is_left_out_of_the_factor() -> None:
    # 10 s of work: 4 s of it took 6 s beside the other side, the rest went at its own speed.
    assert slowed_by(took=12.0, both=6.0, alone=10.0) == pytest.approx(1.5)
    assert slowed_by(took=10.0, both=5.0, alone=10.0) == pytest.approx(1.0)
    assert slowed_by(took=10.0, both=0.0, alone=10.0) is None
    assert slowed_by(took=30.0, both=1.0, alone=10.0) is None


def test_a_slow_machine_gets_fewer_points_and_rounds_and_stays_near_its_time() -> None:
    bench = Bench(cpu=0.4, per_token=0.01)
    figures = measure(bench, None, bench.memory_read, bench.clock, budget_s=30.0)
    assert FEWEST_POINTS <= len(figures.cpu) < len(TOKENS)
    assert tuple(figures.cpu) == TOKENS[: len(figures.cpu)]
    assert {len(seconds) for seconds in figures.cpu.values()} == {FEWEST_ROUNDS}
    assert bench.now < 40.0


@pytest.mark.parametrize("budget_s", [1.0, 5.0, 20.0])
def test_the_time_given_is_kept(budget_s: float) -> None:
    bench = Bench(cpu=0.005, per_token=1e-4)
    figures = measure(bench, Device(bench), bench.memory_read, bench.clock, budget_s=budget_s)
    assert bench.now < 1.6 * budget_s + 1.0
    assert all(len(seconds) >= FEWEST_ROUNDS for seconds in [*figures.cpu.values(), *figures.gpu.values()])


def test_whoever_asks_to_stop_is_heard_between_two_long_measurements() -> None:
    bench = Bench(cpu=LONG_S)
    reports = 0

    def report(stage: str, done: int, total: int, unit: str) -> None:
        nonlocal reports
        reports += 1
        if reports > 15:
            raise Cancelled("Stopped.")

    with pytest.raises(Cancelled):
        measure(bench, None, bench.memory_read, bench.clock, report)
    assert len(bench.ran) <= 16


def test_nothing_is_told_between_short_measurements() -> None:
    """Drawing it would take the cores that are measured."""
    bench = Bench(cpu=LONG_S / 1000)
    told: list[int] = []
    figures = measure(bench, None, bench.memory_read, bench.clock, lambda stage, *_: told.append(len(bench.ran)))
    assert len(figures.cpu) == len(TOKENS)
    rounds = told[len(TOKENS) :]
    assert len(rounds) == MOST_ROUNDS
    assert {after - before for before, after in pairwise(rounds)} == {len(TOKENS) + 1}


def test_a_clock_that_stands_still_says_no_nonsense() -> None:
    bench = Bench()
    figures = measure(bench, Device(bench), bench.memory_read, lambda: 0.0)
    found = calibration_of(figures, "a machine", SHAPE)
    assert all(seconds > 0 for seconds in found.cpu.seconds)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=12))
def test_curves_never_fall_and_stay_as_near_as_they_can(values: list[float]) -> None:
    found = never_falling(values)
    assert len(found) == len(values)
    assert all(left <= right * (1 + 1e-12) for left, right in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    if values == sorted(values):
        assert found == pytest.approx(values)
