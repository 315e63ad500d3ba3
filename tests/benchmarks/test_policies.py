"""The simulations of the papers' comparisons: routes have the printed statistics, the tables their rows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import policies
from benchmarks.routes import mixtral_popularity, popular_order, skewed_layers, steps
from engine.planning.calibration import Processor, estimated


def test_the_popularity_is_that_of_the_papers_appendix() -> None:
    shares = mixtral_popularity(np.random.default_rng(0))
    assert shares.shape == (32, 8)
    assert shares.max() == 1.0
    assert shares.min() >= 0.22
    assert shares.mean() == pytest.approx(0.71, abs=0.02)
    assert shares.std() == pytest.approx(0.08, abs=0.015)
    order = popular_order(shares)
    hit_rate = sum(shares[place] for place in order[:125]) / shares.sum()
    assert hit_rate == pytest.approx(0.530, abs=0.02)
    assert sum(shares[place] for place in order[:56]) / shares.sum() == pytest.approx(0.252, abs=0.015)


def test_routes_are_of_different_experts_and_repeat_as_told() -> None:
    popularity = mixtral_popularity(np.random.default_rng(0), layers=3)
    for repeat in (0.0, 1.0):
        made = steps(np.random.default_rng(1), popularity, [9, 1, 1, 1], 2, repeat)
        for step in made:
            for layer in step.layers:
                assert sum(tokens for _, tokens in layer) == 2 * step.rows
                assert max(tokens for _, tokens in layer) <= step.rows
        assert (made[1].layers == made[2].layers == made[3].layers) == (repeat == 1.0)


def test_most_experts_get_few_tokens_as_in_the_papers_figure() -> None:
    layers = skewed_layers(np.random.default_rng(0), 128, 512, 2, 4, 1.5)
    for layer in layers:
        assert sum(layer) == 1024
        assert sum(1 for tokens in layer if tokens < 8) + 128 - len(layer) > 64


def test_balanced_beats_every_other_policy_and_the_tables_say_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (
        policies.Scenario("one answer", (("short", (16, *[1] * 6)),)),
        policies.Scenario("long prompt", (("short", (64,)),)),
        policies.Scenario("beams", (("short", (8, *[4] * 4)),)),
    )
    monkeypatch.setattr(policies, "SCENARIOS", short)
    policies.main(["--markdown", "--json", str(tmp_path / "result.json")])
    found = json.loads((tmp_path / "result.json").read_text())
    assert len(found) == 2 * 3 * len(policies.POLICIES)
    for result in found:
        assert result["seconds"] > 0
        assert result["to_balanced"] >= 0.97
        assert result["to_balanced"] == 1.0 or result["policy"] != "balanced"
    printed = capsys.readouterr().out
    assert printed.count("\n| environment") == 6


def test_a_measured_calibration_takes_the_place_of_the_papers_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "SCENARIOS", (policies.Scenario("one answer", (("short", (4, 1)),)),))
    cpu, gpu = Processor(20e9, 2e11), Processor(5e11, 5e13)
    made = estimated(policies.MIXTRAL_SHAPE, cpu=cpu, gpu=gpu, pcie_rate=2e10, machine="this one")
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(made))
    policies.main(["--calibration", str(path), "--slots", "32"])
    assert "this one" in capsys.readouterr().out
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(made, gpu=None)))
    with pytest.raises(SystemExit, match="no GPU"):
        policies.main(["--calibration", str(path)])
