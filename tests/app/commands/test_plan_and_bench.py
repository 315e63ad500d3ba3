"""``privatellm plan`` and ``bench``: flags to requests, events to tables and JSON, failures to one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from app.commands.bench import as_text
from app.commands.plan import memory_line
from app.commands.root import run
from engine.ipc.messages import BenchResult, DeviceMemory, Planned
from tests.app.scripted import fork_engines, install, make_home, play, written
from tests.support.hooked_engine import hooked, measures_little

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(make_home(tmp_path, monkeypatch))
    return tmp_path


# --- plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_printed_with_its_reasons(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "starter"]) == 0
    out, _ = written(capsys)
    lines = out.splitlines()
    assert lines[0] == "starter (mixtral)"
    assert "A GPU: 3.0 GB of 8.0 GB (7.5 GB free): trunk 3.0 GB, workspace 500 B" in lines
    assert "CPU: 90.0 GB: experts 90.0 GB" in lines
    assert "Predicted: 12.3 tokens/s; prompts at 679 tokens/s (measured)" in lines
    assert "Several answers at once: 2 get 20 tokens/s in all, 4 get 31.5" in lines
    assert any(line.endswith(": as asked") for line in lines)


def test_a_plan_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "starter", "--json"]) == 0
    found = json.loads(written(capsys)[0])
    assert set(found) == set(Planned.__struct_fields__) - {"id"}
    assert found["tokens_per_s"] == 12.345 and found["memory"][0]["trunk"] == 3_000_000_000


def test_flags_come_before_the_settings(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "config").mkdir()
    (home / "config" / "settings.toml").write_text('cpu_threads = 3\npolicy = "monde"\n')
    arguments = ["--context", "777", "--partitioning", "hybrid", "--gpu-memory", "2.5", "--runtime", "torch"]
    assert run(["plan", "starter", "--json", *arguments]) == 0
    load = json.loads(json.loads(written(capsys)[0])["choices"][0]["choice"])
    assert load["context_limit"] == 777 and load["partitioning"] == "hybrid" and load["runtime"] == "torch"
    assert load["gpu_expert_bytes"] == round(2.5 * 2**30)
    assert run(["plan", "starter", "--json", "--threads", "5", "--policy", "stream", "--dtype", "float32"]) == 0
    load = json.loads(json.loads(written(capsys)[0])["choices"][0]["choice"])
    assert (load["cpu_threads"], load["policy"], load["dtype"]) == (5, "stream", "float32")


def test_a_plan_that_cannot_fit_is_printed_and_fails(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "too-large")
    assert run(["plan", "starter"]) == 1
    out, err = written(capsys)
    assert "No speed is predicted: nothing was measured" in out
    assert "privatellm: starter does not fit in memory: 3.0 GB are missing; choose" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "starter", "--context", "many"],
        ["plan", "starter", "--threads", "0"],
        ["plan", "starter", "--gpu-memory", "-1"],
        ["plan", "starter", "--policy", "best"],
        ["bench"],
        ["bench", "everything"],
        ["bench", "decode", "starter", "--rounds", "0"],
        ["bench", "decode", "starter", "--runtime", "fast"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_refused(home: Path, arguments: list[str]) -> None:
    assert run(arguments) == 2


@pytest.mark.parametrize("command", [["plan"], ["bench", "decode"]], ids=" ".join)
def test_a_model_that_is_not_here_is_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert run([*command, "no-such-model"]) == 1
    assert run([*command, "Qwen/Qwen3-30B-A3B"]) == 1
    out, err = written(capsys)
    assert out == "" and err.count("privatellm: ") == 2 and "privatellm models pull" in err


def test_memory_of_a_device_of_unknown_size() -> None:
    assert memory_line(DeviceMemory(device="CPU", total=0, free=0)) == "CPU: 0 B: nothing"


# --- bench --------------------------------------------------------------------------------------------------------


def test_a_benchmark_is_one_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "beams", "starter", "--rounds", "3"]) == 0
    out, err = written(capsys)
    assert out.splitlines() == [
        "beams of starter",
        "",
        "rows           ms/step  GPU, ms",
        "   1  10.0 (9.00–11.0)        –",
        "  12              30.0      2.5",
        "",
        "a note",
    ]
    assert "decoding: 50 %" in err


def test_the_model_of_the_settings_is_measured_if_none_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--json", "--threads", "2"]) == 0
    found = json.loads(written(capsys)[0])
    assert found["title"] == "decode of starter" and found["rounds"] == 5
    assert found["load"]["cpu_threads"] == 2 and found["seconds"] == [0.01, 0.02]
    assert found["rows"][0] == [1, "10.0 (9.00–11.0)", None]


def test_a_benchmark_that_fails_is_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "unloadable")
    assert run(["bench", "decode", "starter"]) == 1
    out, err = written(capsys)
    assert out == "" and "privatellm: The file is truncated.\n" in err


def test_nothing_in_a_table_acts_on_the_terminal() -> None:
    result = BenchResult(title="a\x1b[31m", columns=["b\n", "c"], rows=[["\x9b2J", 1.23456]], notes=["d\r\ne"])
    assert as_text(result) == "a\n\nb     c\n   1.23\n\nd e\n"
    assert as_text(msgspec.structs.replace(result, columns=[], rows=[])) == "a\n\nd e\n"


@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.soak)])
def test_ctrl_c_leaves_no_engine(home: Path, tiny_model: Callable[..., Path], kind: str) -> None:
    """A real one: it measures, is interrupted, and both processes are gone."""
    folder = tiny_model("mixtral")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "bench", kind, str(folder), "--rounds", "1000", "--threads", "1"],
        cwd=ROOT,
        env={**os.environ, "PRIVATELLM_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None and process.stdout is not None
    stages = ("decoding", "reading a prompt")
    assert any(line.startswith(stages) for line in process.stderr)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stdout.read() == ""
    process.stdout.close()
    process.stderr.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@pytest.mark.slow
def test_a_real_model_is_planned_and_measured(
    home: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_engines(monkeypatch, hooked(measures_little))

    def privatellm(*arguments: str) -> dict[str, Any]:
        assert run([*arguments, "--json", "--threads", "1"]) == 0
        found: dict[str, Any] = json.loads(written(capsys)[0])
        return found

    folder = str(tiny_model("mixtral"))
    before = privatellm("plan", folder)
    assert before["fits"] and before["tokens_per_s"] is None
    measured = privatellm("bench", "experts", folder, "--even-if-busy", "--rounds", "1")
    after = privatellm("plan", folder)
    assert after["tokens_per_s"] > 0 and measured["calibration"]["cpu"]["tokens"][0] == 1
    assert after["memory"][0]["trunk"] == before["memory"][0]["trunk"]
