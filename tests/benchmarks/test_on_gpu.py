"""The benchmark of policies on a GPU, run on the stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.stand_in_device import StandInDevice


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(on_gpu, "SCENARIOS", (("an answer", (4, *[1] * 4)), ("a prompt", (40,))))
    monkeypatch.setattr(on_gpu, "MEASURING_S", 0.5)
    folder = tiny_model("mixtral", dtype="bfloat16")
    monkeypatch.setattr(on_gpu, "model_named", lambda name, layers, work: ("A small model", folder, 2))


def test_every_policy_runs_and_is_told(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_gpu, "find_gpu", lambda: StandInDevice(8 << 30))
    path = tmp_path / "result.json"
    assert on_gpu.main(["--work", str(tmp_path), "--kept", "0.5", "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert len(results) == 2 * len(on_gpu.POLICIES)
    for result in results:
        assert result["tokens"] == (8 if result["scenario"] == "an answer" else 40)
        assert (result["policy"] in ("monde", "stream")) <= (result["hit_rate"] == 0.0)
        assert result["policy"] != "stream" or result["bytes_per_token"] > 0
    said = capsys.readouterr()
    assert "A small model, on the stand-in" in said.out
    assert "one expert on 1, 8" in said.err  # and more, if there was time to measure them


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_gpu, "find_gpu", lambda: None)
    assert on_gpu.main(["--work", str(tmp_path)]) == 1
    assert "No GPU that torch can use was found" in capsys.readouterr().out
