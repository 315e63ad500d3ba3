"""The Twiddler paper's rows: what is exact, what lies inside its band, and the baselines as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.papers.findings import Row
from benchmarks.papers.replay import Step, replay
from benchmarks.papers.twiddler_machines import COPY_OVER_GPU, MACHINES, LlamaCpp, system_s, trunk_s
from benchmarks.papers.twiddler_rows import arithmetic, beams, popularity_rows, prompts
from benchmarks.policies import MIXTRAL
from benchmarks.routes import mixtral_popularity, popular_order, steps
from engine.planning.policy import ActiveExpert, policy_named

POPULARITY = mixtral_popularity(np.random.default_rng(0))
ORDER = popular_order(POPULARITY)


def test_exact_rows_are_equal() -> None:
    assert all(row.equal for row in arithmetic() if row.printed is not None)


def test_popularity_follows_from_its_mean_and_deviation_but_for_one_percentile_and_the_least() -> None:
    rows = popularity_rows()
    assert [row.what for row in rows if row.fitted_on] == ["mean", "deviation"]
    assert [row.what for row in rows if not row.covered] == ["25th percentile", "minimum"]


def test_the_page_is_current(not_on_the_page: Callable[[Sequence[Row]], list[str]]) -> None:
    assert not_on_the_page([*arithmetic(), *popularity_rows()]) == []


def test_long_prompts_with_the_papers_own_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.papers.twiddler_rows.PROMPTS", (512,))
    deepspeed, offloading = prompts(np.random.default_rng(0), POPULARITY, ORDER)
    assert deepspeed.covered
    assert abs(deepspeed.deviation or 1.0) < 0.15
    assert abs(offloading.deviation or 1.0) < 0.15


def test_beams_that_are_decoded_again_are_many_times_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.papers.twiddler_rows.NEW", 2)
    monkeypatch.setattr("benchmarks.papers.twiddler_rows.SHORT", 2)
    monkeypatch.setattr("benchmarks.papers.twiddler_rows.SUFFIX", {4: (8, 10, 12)})
    row = beams(np.random.default_rng(0), POPULARITY, ORDER)
    assert row.ours is not None and row.low is not None and row.high is not None
    assert 2.0 < row.low < row.ours < row.high


def test_llama_cpp_moves_passes_of_many_rows_and_nothing_else() -> None:
    costs = MACHINES[0].calibration(2.0, linear=False)
    few = LlamaCpp().decide(0, [ActiveExpert(0, 31, False), ActiveExpert(1, 31, True)], costs)
    many = LlamaCpp().decide(0, [ActiveExpert(0, 32, False), ActiveExpert(1, 32, True)], costs)
    assert few.places == ("amove", "gpu")
    assert many.places == ("pmove", "gpu")
    assert LlamaCpp().observe(0, few, 1.0, 1.0) == LlamaCpp()
    assert (
        trunk_s(MACHINES[0], [1], 24, 50e9) > trunk_s(MACHINES[0], [1], 0, 50e9) == trunk_s(MACHINES[0], [32], 24, 50e9)
    )


@pytest.mark.parametrize("ratio", COPY_OVER_GPU)
def test_a_copy_takes_as_many_times_the_computing(ratio: float) -> None:
    for machine in MACHINES:
        costs = machine.calibration(ratio, linear=True)
        assert costs.gpu is not None
        assert costs.weight_copy / costs.gpu.at(128) == pytest.approx(ratio)
        assert costs.gpu.at(5000) == pytest.approx(costs.gpu.at(32))
        assert costs.cpu.at(10) == pytest.approx(10 * costs.cpu.at(1))


def test_without_overlap_a_layer_takes_the_sum() -> None:
    trace = steps(np.random.default_rng(1), POPULARITY, (40, 1), MIXTRAL.experts_per_token)
    costs = MACHINES[0].calibration(2.0, linear=True)
    for name in ("twiddler", "stream", "lru-offload"):
        policy = policy_named(name, MIXTRAL.experts)
        both = [
            replay(trace, policy, costs, 32, MIXTRAL.experts, ORDER, overlap=each).total_s for each in (True, False)
        ]
        assert both[1] > both[0]
    one = [Step(1, (((0, 1),),))]
    alone = replay(one, policy_named("stream", 8), costs, 0, 8, overlap=False)
    assert costs.gpu is not None
    assert alone.total_s == pytest.approx(8 * costs.weight_copy + costs.gpu.at(1))
    with pytest.raises(KeyError):
        system_s("nobody", MACHINES[0], costs, trace, ORDER)
