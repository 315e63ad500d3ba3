"""Caches against the best that knows the future, and placements by popularity."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.papers.beyond_rows import bound_table, cached, hit_rates, in_turns, placed_by, skewed_routes
from benchmarks.papers.cache_bound import RULES, best_hit_rate, decoding, hit_rate, popular, recorded
from benchmarks.papers.cluster_model import realised_placement
from benchmarks.papers.replay import Step
from benchmarks.papers.timed_ring import TimedResult
from benchmarks.papers.timed_rows import dbrx_pace
from engine.ipc.messages import Load
from engine.planning.cluster_load import expected_experts
from engine.runtimes import runtime_named
from tests.support.tiny_models import write_tiny_model


def trace_of(seed: int, steps: int, layers: int = 2, experts: int = 5, per_token: int = 2) -> list[Step]:
    chance = random.Random(seed)
    return [
        Step(1, tuple(tuple((e, 1) for e in sorted(chance.sample(range(experts), per_token))) for _ in range(layers)))
        for _ in range(steps)
    ]


def brute_force(wanted: list[tuple[int, int]], slots: int) -> int:
    """The most hits of any cache that keeps or drops an expert after each use, whatever is in it at first."""
    best = {frozenset(first): 0 for first in itertools.combinations(set(wanted), min(slots, len(set(wanted))))}
    for key in wanted:
        following: dict[frozenset[tuple[int, int]], int] = {}
        for kept, hits in best.items():
            there = kept | {key}
            options = [there] if len(there) <= slots else [there - {each} for each in there]
            for option in options:
                following[option] = max(following.get(option, 0), hits + (key in kept))
        best = following
    return max(best.values())


@pytest.mark.parametrize(("seed", "slots"), itertools.product(range(4), (1, 2, 3)))
def test_the_bound_is_the_best_of_all_caches(seed: int, slots: int) -> None:
    trace = trace_of(seed, 5)
    wanted = [(layer, expert) for step in trace for layer, routes in enumerate(step.layers) for expert, _ in routes]
    assert best_hit_rate(trace, slots) == pytest.approx(brute_force(wanted, slots) / len(wanted))


def test_no_rule_beats_the_bound_and_all_are_perfect_with_room() -> None:
    trace = trace_of(1, 60)
    order = popular(trace)
    for rule in RULES.values():
        assert hit_rate(rule, trace, 4, 2, 5, order) <= best_hit_rate(trace, 4)
        assert hit_rate(rule, trace, 10, 2, 5, order) == best_hit_rate(trace, 10) == 1.0
    assert best_hit_rate([], 4) == 0.0
    assert decoding([*trace, Step(9, (((0, 9),),))], 2) == trace


def test_the_table_has_every_rule_beside_the_bound() -> None:
    replayed = hit_rates(trace_of(2, 40), experts=5, per_token=2)
    table = bound_table(replayed)
    gains = cached(replayed)
    assert [gain.after.split(";")[0] for gain in gains] == [line[-2] for line in table.lines]
    assert len(table.lines) == 2
    for line in table.lines:
        rates = [float(cell.removesuffix(" %")) for cell in line[1:]]
        assert len(rates) == len(RULES) + 1
        assert max(rates) == rates[-1]


def test_routes_of_a_model_are_recorded_pass_by_pass(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mixtral", "mixtral")
    load = Load(id=0, model="tiny", runtime="torch", dtype="float32", keep_resident=False)
    model = runtime_named("torch").load(folder, load, lambda *_: None)
    try:
        with recorded(model) as trace:
            rows = model.start()
            rows.extend([5, 6, 7])
            rows.step([9])
            rows.step([11])
        assert not model.recorder.enabled
    finally:
        model.close()
    assert len(trace) == 3
    per_token = model.facts.experts_per_token
    assert [sum(tokens for _, tokens in step.layers[0]) for step in trace] == [3 * per_token, per_token, per_token]
    assert len(decoding(trace, per_token)) >= 2


def test_methods_take_turns_and_the_fastest_round_counts() -> None:
    class Ring:
        calls: ClassVar[list[str]] = []

        def run(self, method: str, pace: object, passes: int) -> TimedResult:
            self.calls.append(method)
            return TimedResult(1.0 / len(self.calls), 0.0, 0.0, 1.0)

    found = in_turns(Ring(), ("a", "b"), dbrx_pace())  # type: ignore[arg-type]
    assert Ring.calls == ["a", "b", "a", "b"]
    assert [result.seconds for result in found] == [pytest.approx(1 / 3), pytest.approx(1 / 4)]


def test_a_placement_by_popularity_executes_fewer_experts_of_such_routes() -> None:
    routes, popularity = skewed_routes(3, 4)
    assert len(routes) == 3 and len(routes[0]) == 4 and len(set(routes[0][0])) == 4
    by_use = expected_experts(placed_by(popularity), 4, [popularity])
    assert by_use <= expected_experts(realised_placement(4), 4, [popularity]) + 1e-9
