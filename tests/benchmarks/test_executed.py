"""The papers' systems, executed on the stand-in device: the executor's own counts, beside what the simulation says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import executed


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = (("an answer", (4, *[1] * 4)), ("a prompt", (64,)), ("beams", (4, *[4] * 2)))
    monkeypatch.setattr(executed, "SCENARIOS", scenarios)


def test_executed_and_simulated_agree(short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executed.main(["--markdown", "--json", str(tmp_path / "result.json")])
    results = json.loads((tmp_path / "result.json").read_text())
    assert len(results) == 2 * 3 * len(executed.POLICIES)
    for result in results:
        assert result["hit_rate"] == pytest.approx(result["predicted_hit_rate"], abs=0.03)
        # Executed, the activations' way and the waiting between layers come on top.
        assert 0.97 * result["predicted_s"] < result["seconds"] < 1.1 * result["predicted_s"]
        assert 0.0 <= result["both_share"] <= min(result["cpu_share"], result["gpu_share"]) + 1e-9
        if result["policy"] in ("lru-offload", "stream"):
            assert result["cpu_share"] == 0.0
        if result["policy"] == "layers":
            assert result["bytes_per_token"] == 0.0
        if result["policy"] == "stream":
            assert result["hit_rate"] == 0.0
    for environment in {result["environment"] for result in results}:
        for scenario in {result["scenario"] for result in results}:
            here = {
                result["policy"]: result["seconds"]
                for result in results
                if (result["environment"], result["scenario"]) == (environment, scenario)
            }
            assert min(here, key=lambda policy: here[policy]) == "balanced"
    assert capsys.readouterr().out.count("| environment") == len(results)


def test_a_policy_with_other_sums_ends_it(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = executed.execute

    def wrong(name: str, *arguments: object) -> object:
        movement, sums = execute(name, *arguments)  # type: ignore[arg-type]
        return movement, torch.nextafter(sums, sums + 1) if name == "monde" else sums

    monkeypatch.setattr(executed, "execute", wrong)
    with pytest.raises(SystemExit, match="monde gives other sums than balanced in 'an answer'"):
        executed.compare(executed.ENVIRONMENTS[0], 0)
