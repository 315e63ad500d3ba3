"""What ``doctor`` says of the engine's side, and the flags that say how a model is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import msgspec
import pytest

from app.commands import doctor
from app.commands.ask import result_object
from app.commands.question import Flags, question_from
from app.commands.root import run
from app.settings.file import open_settings
from app.settings.schema import setting_named
from engine.ipc.messages import (
    DoctorFacts,
    ExpertMovement,
    Finished,
    Load,
    ModelFacts,
    PhaseTimes,
    Timing,
)
from tests.app.scripted import fork_engines

FACTS_OF_DOCTOR = DoctorFacts(
    built=True, instruction_sets=["avx2", "scalar"], threads=2, kernels="avx2", kernels_reason="the CPU has it",
    runtime="torch", runtime_reason="it is too odd", calibrated=False, calibration="none for this machine",
    memory_total=2_000_000_000, memory_free=1_800_000_000, memory_of_machine=24_000_000_000,
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fork_engines(monkeypatch)
    return tmp_path


def test_json_tells_who_shared_the_experts_and_what_that_moved() -> None:
    facts = ModelFacts(
        name="m", family="mixtral", runtime="torch", executor="hybrid", device="cuda", dtype="bfloat16", layers=1,
        experts=4, experts_per_token=2, moe_layers=[0], vocabulary=9, hidden=8, context_limit=64, trunk_bytes=1,
        expert_bytes=1, key_value_bytes_per_token=1, parameters=2, trunk="transformers (torch, cuda)",
        policy="balanced", gpu_expert_bytes=7,
    )  # fmt: skip
    moved = ExpertMovement(tokens=3, weight_bytes=5, hits=2, misses=1)
    timing = Timing(prefill=PhaseTimes(), decode=PhaseTimes(), movement=moved)
    finished = Finished(
        text="x", token_ids=[1], finish_reason="stop", prompt_tokens=1, prefilled_tokens=1, completion_tokens=1,
        ttft_s=0.1, tokens_per_s=1.0, timing=timing,
    )  # fmt: skip
    found = result_object(finished, facts)
    assert (found["trunk"], found["policy"], found["gpu_expert_bytes"]) == ("transformers (torch, cuda)", "balanced", 7)
    assert found["movement"] == msgspec.to_builtins(moved)
    assert result_object(msgspec.structs.replace(finished, timing=None), facts)["movement"] is None


@pytest.mark.soak
def test_doctor_says_which_kernels_run_and_why(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels() -> dict[str, str]:
        run(["doctor", "--json"])
        found = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
        return cast(dict[str, str], found["kernels"])

    monkeypatch.delenv("PRIVATELLM_KERNELS", raising=False)
    assert kernels()["mark"] in ("ok", "note")
    monkeypatch.setenv("PRIVATELLM_KERNELS", "off")
    off = kernels()
    assert off["mark"] == "note" and "switched off by PRIVATELLM_KERNELS=off" in off["text"] and off["way_out"]
    monkeypatch.setenv("PRIVATELLM_KERNELS", "nosuch")
    refused = kernels()
    assert refused["mark"] == "problem" and "nosuch" in refused["text"]


def test_doctor_repeats_how_to_have_native_kernels(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = msgspec.structs.replace(
        FACTS_OF_DOCTOR,
        built=False,
        kernels="none",
        kernels_reason="they were not built; alas",
        kernels_way_out="do so",
    )
    monkeypatch.setattr(doctor, "engine_facts", lambda load: missing)
    run(["doctor", "--json"])
    found = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["kernels"]["text"].endswith("they were not built; alas")
    assert found["kernels"]["way_out"] == "do so"


def test_doctor_says_what_runs_the_model(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "engine_facts", lambda load: FACTS_OF_DOCTOR)
    assert run(["doctor", "--json"]) == 0
    found = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["trunk"]["text"] == "torch for starter (it is too odd)"
    assert (
        found["calibration"]["mark"] == "note" and found["calibration"]["way_out"] == "privatellm bench experts starter"
    )
    assert found["memory"]["text"] == (
        "1.8 GB available of 2.0 GB, the limit of this container or control group; the machine has 24.0 GB"
    )
    monkeypatch.setattr(doctor, "engine_facts", lambda load: "it was ended by signal 4")
    assert run(["doctor"]) == 1
    assert "✗ kernels        it was ended by signal 4" in capsys.readouterr().out


@pytest.mark.soak
def test_a_damaged_model_is_a_problem_and_a_missing_one_is_not(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "own"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"nothing of the kind")
    (home / "config").mkdir(parents=True)
    for name, mark in (("starter", "note"), (str(model), "problem")):
        (home / "config" / "settings.toml").write_text(f'[model]\nmodel = "{name}"\n')
        run(["doctor", "--json"])
        found = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert found["trunk"]["mark"] == mark and f"unknown for {name}: " in found["trunk"]["text"]


def test_what_a_model_without_a_home_would_run_on_is_not_known(home: Path) -> None:
    facts = doctor.engine_facts(Load(id=0, model="starter"))
    assert isinstance(facts, DoctorFacts)
    assert facts.runtime == "auto" and "pull starter" in facts.model_problem and facts.threads > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--runtime", "native"], {"runtime": "native", "policy": "balanced", "gpu_expert_bytes": None}),
        (["--policy", "monde", "--gpu-memory", "1.5"], {"policy": "monde", "gpu_expert_bytes": 3 * 2**29}),
        (["--threads", "3"], {"cpu_threads": 3, "runtime": "auto"}),
        ([], {"cpu_threads": 5, "policy": "balanced"}),
    ],
)
def test_flags_come_before_the_settings(home: Path, arguments: list[str], expected: dict[str, object]) -> None:
    open_settings().change("cpu_threads", 5)
    keys = {"--gpu-memory": "gpu_expert_memory", "--threads": "cpu_threads"}
    given = {keys.get(flag, flag[2:]): value for flag, value in zip(arguments[::2], arguments[1::2], strict=True)}
    flags = Flags(prompt="x", settings={key: setting_named(key).parse(value) for key, value in given.items()})
    load = question_from(flags).load
    assert {key: getattr(load, key) for key in expected} == expected


@pytest.mark.parametrize("flag", [["--threads", "0"], ["--gpu-memory", "-1"], ["--policy", "none"]])
def test_flags_of_sharing_have_limits(home: Path, capsys: pytest.CaptureFixture[str], flag: list[str]) -> None:
    assert run(["ask", "say:x", *flag]) == 2
    said = capsys.readouterr().err
    assert flag[0] in said
    assert "cpu_threads" not in said and "gpu_expert_memory" not in said  # a setting's name means nothing here
