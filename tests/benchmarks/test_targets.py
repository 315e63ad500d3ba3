"""Targets: which ratio is taken, which way round, and what is said when it was not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measuring import Samples
from benchmarks.targets import TARGETS, Target, judge, judge_result, kernel_verdicts, main, targets_table, verdicts
from engine.calibration.samples import Spread

SAMPLES: Samples = {
    "privatellm": {"decode": [1.0, 2.0, 3.0], "12 rows": [8.0, 9.0, 10.0]},
    "llama.cpp": {"decode": [2.0, 4.0, 3.0], "12 rows": [18.0, 18.0, 18.0]},
}


def test_a_time_is_ours_over_theirs() -> None:
    verdict = judge(SAMPLES, Target("mixtral", "12 rows", "time", 0.50))
    assert verdict.measured == Spread(0.5, 8 / 18, 10 / 18)
    assert verdict.met is True
    assert judge(SAMPLES, Target("mixtral", "12 rows", "time", 0.49)).met is False


def test_a_speed_is_theirs_over_ours() -> None:
    verdict = judge(SAMPLES, Target("starter", "decode", "speed", 1.5))
    assert verdict.measured == Spread(1.5, 1.0, 2.0)
    assert verdict.met is True
    assert judge(SAMPLES, Target("starter", "decode", "speed", 1.6)).met is False


def test_a_step_is_measured_against_our_own() -> None:
    verdict = judge({"privatellm": SAMPLES["privatellm"]}, Target("starter", "12 rows", "step", 5.0, base="decode"))
    assert verdict.measured == Spread(4.5, 10 / 3, 8.0)
    assert verdict.met is True


def test_a_total_counts_the_tokens_of_all_answers() -> None:
    samples = {"privatellm": {"decode": [1.0, 2.0, 3.0], "4 answers": [2.0, 4.0, 4.0]}}
    verdict = judge(samples, Target("mixtral-q4", "4 answers", "total", 2.0, base="decode"))
    assert verdict.measured == Spread(2.0, 2.0, 3.0)
    assert verdict.met is True


@pytest.mark.parametrize("missing", ["privatellm", "llama.cpp"])
def test_what_was_not_measured_is_neither_met_nor_missed(missing: str) -> None:
    samples = {variant: measured for variant, measured in SAMPLES.items() if variant != missing}
    verdict = judge(samples, Target("mixtral", "decode", "time", 0.95))
    assert (verdict.measured, verdict.met) == (None, None)
    assert judge(SAMPLES, Target("mixtral", "prefill 64", "time", 0.35)).met is None
    assert "| not measured | – |" in targets_table([verdict])


def test_only_the_models_that_were_measured_are_judged() -> None:
    models = [{"kind": "starter", "seconds": SAMPLES}, {"kind": "folder", "seconds": SAMPLES}]
    found = verdicts(models)
    assert {verdict.model for verdict in found} == {"Starter"}
    assert len(found) == sum(target.model == "starter" for target in TARGETS)
    text = targets_table(found)
    assert "| Starter | decode: speed relative to llama.cpp | ≥ 1.00 | 1.50 (1.00–2.00) | yes |" in text
    assert "| Starter | time of 12 rows relative to decode | ≤ 5.00 | 4.50 (3.33–8.00) | yes |" in text


def test_no_model_no_table() -> None:
    assert targets_table(verdicts([])) == ""


def test_the_targets_are_those_that_were_set() -> None:
    bounds = {(target.model, target.measure, target.ratio): target.bound for target in TARGETS}
    assert [bounds["mixtral", name, "time"] for name in ("decode", "4 rows", "8 rows", "12 rows", "prefill 64")] == [
        0.95, 0.75, 0.55, 0.50, 0.35,
    ]  # fmt: skip
    assert bounds["qwen3-moe", "decode", "speed"] == 1.10
    assert bounds["starter", "decode", "speed"] == bounds["starter", "prefill 512", "speed"] == 1.00


FIGURES = [
    {"shape": "mixtral", "kernels": "avx512f", "format": "BF16", "rows": 1, "milliseconds": 10.0, "read_shard": 0.92},
    {"shape": "mixtral", "kernels": "avx512f", "format": "BF16", "rows": 4, "milliseconds": 13.0, "read_shard": 0.7},
    {"shape": "mixtral", "kernels": "avx2", "format": "BF16", "rows": 1, "milliseconds": 12.0, "read_shard": 0.8},
    {"shape": "fine", "kernels": "avx2", "format": "BF16", "rows": 4, "milliseconds": 12.0, "read_shard": 0.8},
]


def test_every_set_of_kernels_is_judged_on_the_large_expert() -> None:
    found = kernel_verdicts(FIGURES)
    assert [(verdict.model, verdict.met) for verdict in found] == [
        ("One expert (avx512f)", True), ("One expert (avx512f)", False),
        ("One expert (avx2)", False), ("One expert (avx2)", None),
    ]  # fmt: skip
    assert "| time of 4 tokens relative to 1 | ≤ 1.25 | 1.30 | no |" in targets_table(found)


def test_results_of_several_benchmarks_make_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare, kernels, screen = (tmp_path / f"{name}.json" for name in ("compare", "kernels", "screen"))
    compare.write_text(json.dumps({"rounds": 3, "models": [{"kind": "starter", "seconds": SAMPLES}]}))
    kernels.write_text(json.dumps(FIGURES))
    screen.write_text(
        json.dumps({"model": "starter", "panel": True, "headless": [10.0], "chat": [9.0], "echo_s": [0.02]})
    )
    assert main([str(compare), str(kernels), str(screen)]) == 0
    printed = capsys.readouterr().out
    assert "| Starter |" in printed and "| One expert (avx2) |" in printed and "| ≥ 0.95 | 0.90 | no |" in printed


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither of benchmarks"):
        judge_result({"something": 1})
    with pytest.raises(SystemExit, match="holds no results"):
        main([str(tmp_path / "absent.json")])
