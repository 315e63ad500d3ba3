"""``ask --persona``, and how the chat begins by ``--continue``, ``--model`` and ``--persona``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.chat.starting import Start
from app.commands import chat as chat_command
from app.commands.root import run
from app.settings.file import open_settings
from app.settings.personas import Persona, open_personas
from tests.app.scripted import install, make_home

POET = Persona("Poet", "Answer in rhymes.", "other", {"temperature": 1.2, "seed": None, "thinking": "off"})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_home(tmp_path, monkeypatch)
    install(folder)
    install(folder, "other")
    file = open_settings()
    for key, value in {"system_prompt": "Mine.", "temperature": 0.3, "seed": 5, "beams": 4}.items():
        file.change(key, value)
    open_personas().put(POET)
    open_personas().put(Persona("Wide", values={"beams": 3}))
    return folder


def test_a_persona_comes_after_flags_and_before_the_settings(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "--no-stdin", "--persona", "poet", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["messages"][0] == {"role": "system", "content": "Answer in rhymes."}
    assert (request["sampling"]["temperature"], request["sampling"]["seed"], request["thinking"]) == (1.2, None, False)
    # A persona that samples is not asked with the settings' beams.
    assert request["beams"] == 1
    flags = ["--temperature", "0.1", "--system", "S", "--thinking", "on", "--model", "starter"]
    assert run(["ask", "--no-stdin", "--persona", "Poet", *flags, "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["messages"][0]["content"] == "S"
    assert (request["sampling"]["temperature"], request["thinking"]) == (0.1, True)
    assert run(["ask", "--no-stdin", "--persona", "Wide", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["beams"], request["messages"][0]["content"]) == (3, "Mine.")
    assert run(["ask", "--no-stdin", "--persona", "Wide", "--seed", "1", "echo:"]) == 0
    assert json.loads(capsys.readouterr().out)["beams"] == 1


def test_the_persona_names_the_model_to_load(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_personas().put(Persona("Gone", model="nowhere-to-be-found"))
    assert run(["ask", "--no-stdin", "--persona", "Gone", "echo:"]) == 1
    assert "nowhere-to-be-found" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ask", "--no-stdin", "x"], []])
def test_an_unknown_persona_is_one_sentence_with_those_that_exist(
    home: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert run([*command, "--persona", "Nobody"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "privatellm: There is no persona 'Nobody'; there are Poet, Wide\n")


def test_what_is_wrong_in_the_file_is_noted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = open_personas().path
    path.write_text(path.read_text() + "\n[Bad]\ntemperature = 99\n")
    assert run(["ask", "--no-stdin", "--persona", "Poet", "say:fine"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "fine" and "note: personas.toml: Bad: temperature cannot be 99" in err


def test_flags_say_how_the_chat_begins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Start | None, bool]] = []
    monkeypatch.setattr(chat_command, "chat", lambda start, *, plain: begun.append((start, plain)) or 0)
    assert run(["--continue", "--model", "other", "--persona", "POET", "--plain"]) == 0
    assert run(["--plain"]) == 0
    assert begun == [(Start(True, "other", POET), True), (None, True)]
    for start, model in ((Start(), "starter"), (Start(persona=POET), "other"), (Start(False, "m", POET), "m")):
        file = open_settings()
        start.choose_model(file)
        assert file.settings.model == model
    # A model of the command line is for this run.
    assert open_settings().settings.model == "starter"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--model", "nowhere-to-be-found"], 1, "nowhere-to-be-found"),
        (["--model", "owner/not-here"], 1, "privatellm models pull"),
        (["--model", ""], 2, "--model"),
        (["--persona", "Poet", "models"], 2, "it is for the chat"),
        (["--continue", "ask", "x"], 2, "it is for the chat"),
    ],
)
def test_what_cannot_be_is_told_before_the_screen_opens(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert run(arguments) == status
    out, err = capsys.readouterr()
    assert out == "" and said in err and "Traceback" not in err
