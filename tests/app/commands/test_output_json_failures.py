"""With ``--json`` a program that reads stdout learns of a failure there, in one object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.commands.root import run
from tests.app.scripted import install, make_home, play, written


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_home(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["ask", "x", "--model", "nope"], 1, "no model called 'nope'"),
        (["ask", "fail:"], 1, "It failed."),
        (["ask", "bad:"], 2, "Token id 9 is unknown."),
        (["ask", "die:3"], 1, "exit status 3"),
        (["ask", "   "], 2, "the question is empty"),
        (["ask", "x", "--prompt-ids", "1"], 2, "not both"),
        (["ask", "x", "--top-p", "7"], 2, "--top-p"),
        (["ask", "x", "--no-such-flag"], 2, "--no-such-flag"),
        (["plan", "nope"], 1, "nope"),
        (["plan"], 2, "M"),
        (["bench", "decode", "nope"], 1, "nope"),
        (["bench", "nothing"], 2, "nothing"),
        (["doctor", "--peer", "::::"], 2, "HOST:PORT"),
        (["models", "list", "more"], 2, "more"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_a_failure_is_one_object(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    install(home)
    assert run([*arguments, "--json"]) == status
    out, err = written(capsys)
    assert out.count("\n") == 1
    found = json.loads(out)
    assert set(found) == {"error"} and said in found["error"]
    assert f"privatellm: {found['error']}\n" in err


@pytest.mark.parametrize("arguments", [["ask", "x", "--model", "nope"], ["ask", "x", "--no-such-flag"]])
def test_without_it_stdout_stays_empty(home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) in (1, 2)
    assert written(capsys)[0] == ""


def test_a_word_behind_two_dashes_is_no_flag(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "--model", "nope", "--", "--json"]) == 1
    assert written(capsys)[0] == ""


def test_a_plan_that_does_not_fit_stays_one_object(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home)
    play(monkeypatch, "too-large")
    assert run(["plan", "starter", "--json"]) == 1
    out, err = written(capsys)
    found = json.loads(out)
    assert found["fits"] is False and "does not fit" in found["error"] and found["error"] in err


def test_models_can_be_listed_as_json_without_list(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["models", "--json"]) == 0
    short = written(capsys)[0]
    assert run(["models", "list", "--json"]) == 0
    assert written(capsys)[0] == short and any(row["name"] == "starter" for row in json.loads(short))


def test_the_prepared_copy_of_a_folder_elsewhere_is_listed_and_can_be_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "local--mine--0123456789abcdef.prepared"
    prepared = install(home, name)
    (prepared / "model.safetensors").write_bytes(b"\0" * 1000)
    assert run(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(written(capsys)[0])}
    assert (
        rows[name]["state"] == "prepared copy" and rows[name]["nbytes"] > 1000 and rows[name]["path"] == str(prepared)
    )
    assert run(["models"]) == 0
    assert name in written(capsys)[0]
    assert run(["models", "remove", "--yes", name]) == 0
    assert not prepared.exists()
