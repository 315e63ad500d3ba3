"""The command line against an engine that plays a script: what goes where, and with which exit status."""

from __future__ import annotations

import io
import json
import signal
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from app.commands import ask, engine_work
from app.commands.output import ProgressLine, answer, as_json, describe, notify
from app.commands.root import run
from app.settings.file import open_settings
from engine.ipc.messages import Progress, Sampling
from tests.app.scripted import install, make_home, play


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_home(tmp_path, monkeypatch)


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- ask ----------------------------------------------------------------------------------------------------------


def test_stdout_carries_the_answer_and_nothing_else(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "say:one two"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two \n"
    assert "note: no native kernel\n" in err and "\x1b" not in err


def test_the_question_may_come_from_stdin(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home)
    give_stdin(monkeypatch, "say:grüße\n".encode())
    assert run(["ask"]) == 0
    assert capsys.readouterr().out == "grüße \n"


@pytest.mark.parametrize("data", [b"", b"  \n", b"\xff\xfe"])
def test_no_question_is_a_bad_argument(home: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    give_stdin(monkeypatch, data)
    assert run(["ask"]) == 2


def test_a_closed_stdin_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["ask"]) == 2
    assert capsys.readouterr().err == "privatellm: there is no question: stdin is closed, so pass it as an argument\n"


def test_what_acts_on_a_terminal_is_taken_out(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "raw:"]) == 0
    assert capsys.readouterr().out == "ared end\n"


def test_json_is_exact_and_yet_safe(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "--json", "raw:"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.isascii() and "\x1b" not in out
    answer = json.loads(out)
    assert answer["text"] == "a\x1b[31mred\x1b]0;title\x07\x9b2J end\r"
    assert (answer["model"], answer["runtime"], answer["executor"]) == ("starter", "torch", "local (torch, cpu)")
    assert (answer["finish_reason"], answer["load_s"], answer["beams"]) == ("stop", 0.5, [])
    assert {"token_ids", "prompt_tokens", "prefilled_tokens", "completion_tokens", "ttft_s", "tokens_per_s"} < set(
        answer
    )
    assert {"layers", "per_token_ms"} < set(answer["timing"])
    assert (answer["trunk"], answer["policy"], answer["movement"]) == ("", None, None)


def test_beams_are_shown_when_they_are_done(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "--beams", "2", "beams:"]) == 0
    assert capsys.readouterr().out == "best one\n"
    assert run(["ask", "--beams", "2", "--json", "beams:"]) == 0
    (beam,) = json.loads(capsys.readouterr().out)["beams"]
    assert (beam["text"], beam["token_ids"], beam["score"]) == ("best \x1b[1mone", [4, 5], -0.5)


@pytest.mark.soak
def test_thoughts_are_no_part_of_the_answer(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home)
    assert run(["ask", "think:Four."]) == 0
    assert capsys.readouterr().out == "Four.\n"
    assert run(["ask", "--json", "think:Four."]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["reasoning"]) == ("Four.", "Hm.")
    assert (found["reasoning_tokens"], found["reasoning_s"]) == (1, 0.5)
    assert run(["ask", "late:"]) == 0
    assert capsys.readouterr().out == "Hm.\nFour.\n"
    monkeypatch.setenv("SCRIPTED_REASONING", "think")
    assert run(["ask", "late:"]) == 0
    assert capsys.readouterr().out == "Four.\n"
    assert run(["ask", "think:"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "" and "raise --max-tokens" in err


def test_flags_reach_the_engine(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    flags = "--system S --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --repetition-penalty 1.1 --seed 3"
    flags += " --max-tokens 11 --stop A --stop B"
    assert run(["ask", *flags.split(), "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "echo:"}]
    assert request["sampling"] == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {},
    }  # fmt: skip
    assert (request["max_tokens"], request["stop"], request["beams"]) == (11, ["A", "B"], 1)
    assert run(["ask", "--beams", "16", "--length-penalty", "-0.5", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["beams"], request["length_penalty"], request["with_timing"]) == (16, -0.5, False)


def test_a_schema_reaches_the_engine(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    path = tmp_path / "form.json"
    path.write_text('{"type": "object"}')
    assert run(["ask", "--schema", str(path), "echo:"]) == 0
    assert json.loads(capsys.readouterr().out)["constraint"] == {"kind": "schema", "text": '{"type": "object"}'}
    for content, said in ((b"{", "is no JSON"), (b"[]", "is no JSON object"), (b"\xff", "is no JSON"), (None, "read")):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert run(["ask", "--schema", str(path), "echo:"]) == 2
        assert said in capsys.readouterr().err
    path.write_bytes(b" " * (128 * 1024 + 1))
    assert run(["ask", "--schema", str(path), "echo:"]) == 2
    assert "has more than" in capsys.readouterr().err


def test_how_to_think_reaches_the_engine(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "--thinking", "off", "--effort", "high", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["thinking"], request["effort"]) == (False, "high")
    assert run(["ask", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["thinking"], request["effort"]) == (None, "")


def test_without_flags_nothing_is_added(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["messages"] == [{"role": "user", "content": "echo:"}]
    assert request["sampling"] == msgspec.structs.asdict(Sampling()) and request["max_tokens"] is None


def test_settings_come_after_flags_and_before_the_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    file = open_settings()
    for key, value in {"system_prompt": "Mine.", "temperature": 0.3, "seed": 5, "beams": 4, "max_tokens": 9}.items():
        file.change(key, value)
    assert run(["ask", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["beams"], request["max_tokens"], request["sampling"]["temperature"]) == (4, 9, None)
    assert request["messages"][0] == {"role": "system", "content": "Mine."}
    # Asking for sampling is asking for no beam search.
    assert run(["ask", "--temperature", "1", "--system", "", "echo:"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["beams"], request["sampling"]["temperature"], request["sampling"]["seed"]) == (1, 1.0, 5)
    assert [message["role"] for message in request["messages"]] == ["user"]


def test_prompt_ids_go_as_they_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    assert run(["ask", "--prompt-ids", "5, 6,7"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert (request["prompt_ids"], request["messages"]) == ([5, 6, 7], None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--beams", "0", "x"],
        ["--beams", "17", "x"],
        ["--beams", "two", "x"],
        ["--temperature", "-1", "x"],
        ["--temperature", "nan", "x"],
        ["--top-p", "2", "x"],
        ["--max-tokens", "0", "x"],
        ["--runtime", "cuda", "x"],
        ["--dtype", "int8", "x"],
        ["--stop", "", "x"],
        ["--model", " ", "x"],
        ["--prompt-ids", "1,x"],
        ["--prompt-ids", ""],
        ["--prompt-ids", "-1"],
        ["--prompt-ids", "99999999999999999999"],
        ["--prompt-ids", "1", "x"],
        ["--prompt-ids", "1", "--system", "x"],
        ["--unknown", "x"],
        ["one", "two"],
        [""],
    ],
)
def test_bad_arguments_have_status_2(home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    install(home)
    assert run(["ask", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err and "Traceback" not in err


@pytest.mark.parametrize(
    ("question", "script", "status", "said"),
    [
        ("fail:", "", 1, "privatellm: It failed.\n"),
        ("bad:", "", 2, "privatellm: Token id 9 is unknown.\n"),
        ("die:-9", "", 1, "memory ran out"),
        ("x", "unloadable", 1, "privatellm: The file is truncated.\n"),
        ("x", "no-hello", 1, "exit status 1"),
    ],
)
def test_failures(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    question: str,
    script: str,
    status: int,
    said: str,
) -> None:
    install(home)
    play(monkeypatch, script)
    assert run(["ask", question]) == status
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err
    assert out == ("last words\n" if question.startswith("die") else "")


def test_the_starter_is_made_when_it_is_missing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "say:x"]) == 0
    out, err = capsys.readouterr()
    assert out == "x \n" and "made once" in err and "fetching: 50 % (1 B of 2 B)" in err


def test_no_network_for_the_starter_is_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "unreachable")
    assert run(["ask", "say:x"]) == 1
    assert capsys.readouterr().err.endswith("privatellm: There is no network.\n")


@pytest.mark.parametrize(
    ("model", "said"),
    [("owner/name", "privatellm models pull owner/name"), ("nope", "no model called 'nope'"), ("./gone", "./gone")],
)
def test_a_model_that_is_not_here(home: Path, capsys: pytest.CaptureFixture[str], model: str, said: str) -> None:
    assert run(["ask", "--model", model, "x"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and said.removeprefix("./") in err and err.count("\n") == 1


def test_damaged_settings_are_said_and_the_answer_comes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    (home / "config").mkdir()
    (home / "config" / "settings.toml").write_text("= broken")
    assert run(["ask", "say:x"]) == 0
    out, err = capsys.readouterr()
    assert out == "x \n" and "settings.damaged-" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["ask", "say:x"], ["locate", "data"], ["models"], ["--help"], ["doctor"]])
def test_a_full_disk_behind_stdout(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    install(home)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(arguments) == 1
        monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().err


# --- ctrl-c -------------------------------------------------------------------------------------------------------


def _ctrl_c_at_the_first_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    show = ask._Shown.piece

    def piece(self: ask._Shown, text: str, withdrawn: bool = False) -> None:
        show(self, text)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ask._Shown, "piece", piece)


def test_ctrl_c_keeps_the_answer_so_far(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home)
    before = signal.getsignal(signal.SIGINT)
    _ctrl_c_at_the_first_piece(monkeypatch)
    assert run(["ask", "wait:"]) == 130
    assert capsys.readouterr().out == "unended\n"
    assert run(["ask", "--json", "wait:"]) == 130
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("unended", "cancelled")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_does_not_wait_for_ever(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    install(home)
    play(monkeypatch, "stubborn")
    monkeypatch.setattr(engine_work, "_ORDERLY_END_WAIT_S", 0.05)
    _ctrl_c_at_the_first_piece(monkeypatch)
    assert run(["ask", "wait:"]) == 130
    assert capsys.readouterr().out == "unended\n"
    assert set(psutil.Process().children()) <= set(before)


def test_ctrl_c_while_pulling(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "show", lambda self, progress: signal.raise_signal(signal.SIGINT))
    assert run(["models", "pull", "starter"]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err


# --- models, locate, doctor ---------------------------------------------------------------------------------------


def test_models_list(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(home)
    install(home, "owner--name")
    assert run(["models"]) == 0
    listed = capsys.readouterr().out
    assert run(["models", "list"]) == 0
    assert capsys.readouterr().out == listed
    assert listed.splitlines()[0].split()[:2] == ["owner/name", "ready"] and "can be pulled" in listed
    assert run(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["starter"]["state"] == "ready" and rows["starter"]["path"] == str(home / "models" / "starter")


@pytest.mark.parametrize(
    "config",
    [b"[" * 200_000, b'{"a":' * 200_000, b" " * 21_000_000, b"\xff", b"[]"],
    ids=("lists", "tables", "size", "no text", "no table"),
)
def test_models_list_with_a_configuration_that_is_none(
    home: Path, capsys: pytest.CaptureFixture[str], config: bytes
) -> None:
    folder = home / "models" / "someone--odd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").touch()
    assert run(["models", "list"]) == 0
    out, error = capsys.readouterr()
    assert "someone/odd" in out and "Traceback" not in error


def test_models_of_other_programs_are_listed_apart(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(home / "cache"))
    assert run(["models"]) == 0
    alone = capsys.readouterr().out
    file = home / "cache" / "M-Q4_K_M.gguf"
    file.parent.mkdir()
    header = struct.pack("<4sIQQQ20sIQ6s", b"GGUF", 3, 0, 1, 20, b"general.architecture", 8, 6, b"gemma9")
    file.write_bytes(header + bytes(2_000_000))
    assert run(["models"]) == 0
    listed = capsys.readouterr().out
    heading, row = listed.removeprefix(alone).strip().splitlines()
    assert heading == "Held by other programs, and used where they lie:"
    assert row.split()[:5] == ["llama.cpp:M-Q4_K_M", "2", "MB", "llama.cpp,", str(file)]
    assert row.endswith("(the architecture gemma9 is not supported)")
    links = install(home, "gguf--M-Q4_K_M--0123456789abcdef")
    (links / "M-Q4_K_M.gguf").symlink_to(file)
    assert run(["models"]) == 0
    assert capsys.readouterr().out == listed, "the links to it are no further model"
    own = home / "own.gguf"
    (links / "M-Q4_K_M.gguf").unlink()
    (links / "M-Q4_K_M.gguf").symlink_to(own)
    assert run(["models"]) == 0
    assert f"Links to {own}." in capsys.readouterr().out
    assert run(["models", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)[-1]
    assert (last["state"], last["program"], last["path"]) == ("elsewhere", "llama.cpp", str(file))


@pytest.mark.parametrize(("action", "asked"), [("pull", "Pull"), ("prepare", "Prepare")])
def test_models_pull_and_prepare(home: Path, capsys: pytest.CaptureFixture[str], action: str, asked: str) -> None:
    assert run(["models", action, "starter"]) == 0
    out, err = capsys.readouterr()
    assert out == "/there\n" and f"{asked} of starter" in err
    assert run(["models", action, "no such model"]) == 1
    assert run(["models", action]) == 2


def test_models_remove(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install(home)
    give_stdin(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert run(["models", "remove", "starter"]) == 1 and folder.exists()
    assert "Nothing was deleted" in capsys.readouterr().err
    assert run(["models", "remove", "--yes", "starter"]) == 0 and not folder.exists()
    assert run(["models", "remove", "--yes", "starter"]) == 1


@pytest.mark.parametrize("kind", ["config", "data", "models", "logs"])
def test_locate(home: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert run(["locate", kind]) == 0
    assert capsys.readouterr().out == f"{home / kind}\n"
    assert run(["locate", "nowhere"]) == 2


@pytest.mark.parametrize(("what", "file"), [("db", "data/conversations.sqlite"), ("keymap", "config/keymap.toml")])
def test_locate_a_file(home: Path, capsys: pytest.CaptureFixture[str], what: str, file: str) -> None:
    assert run(["locate", what]) == 0
    assert capsys.readouterr().out == f"{home / file}\n"


@pytest.mark.soak
def test_doctor(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["doctor", "--json"]) == 0
    findings = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["engine"]["text"] == "starts and answers"
    assert "torch 2.13" in findings["libraries"]["text"]
    assert findings["models"]["way_out"] == "privatellm models pull starter"
    assert findings["runtime"]["text"].startswith("auto is ")
    play(monkeypatch, "no-hello")
    (home / "config").mkdir()
    (home / "config" / "settings.toml").write_text("[answer]\nbeams = 99\n")
    (home / "data").mkdir(exist_ok=True)
    (home / "data" / "conversations.sqlite").write_text("no database, " * 100)
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✗ engine" in out and "✗ conversations" in out and "fix: " in out and "1 to 16" in out
    assert not list(home.rglob("*damaged*"))


def test_a_flag_is_not_said_to_take_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "say:x", "--temperature", "11"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "a number from 0 to 10" in said and "empty" not in said


def test_doctor_tells_of_a_place_that_is_no_folder(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / "file"
    file.write_text("")
    monkeypatch.setenv("PRIVATELLM_HOME", str(file))
    assert run(["doctor", "--json"]) == 1
    findings = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
    for kind in ("config", "data", "models", "logs"):
        found = findings[f"{kind} folder"]
        assert found["mark"] == "problem" and f"{file} is not a folder" in found["text"] and found["way_out"]


def test_a_command_without_its_arguments_or_unknown_is_refused(home: Path) -> None:
    for name in ("plan", "bench", "nothing-like-it"):
        assert run([name]) == 2


def test_version_and_help(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("privatellm ")
    assert run(["ask", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("model", "system", "beams", "length-penalty", "temperature", "top-p", "top-k", "min-p", "seed",
                 "max-tokens", "stop", "runtime", "dtype", "json", "prompt-ids"):  # fmt: skip
        assert f"--{flag}" in shown


# --- output -------------------------------------------------------------------------------------------------------


def test_json_escapes_what_acts() -> None:
    text = "\x1b\x9b\x7f\u202e\u2028\ud800 é 日本 👩"
    line = as_json({"text": text})
    assert json.loads(line)["text"] == text
    assert "é 日本 👩" in line and not any(character in line for character in "\x1b\x9b\x7f\u202e\u2028\ud800")
    with pytest.raises(ValueError, match="JSON"):
        as_json(float("nan"))


def test_progress_in_words() -> None:
    assert describe(Progress(stage="loading")) == "loading"
    assert describe(Progress(stage="loading", done=3, unit="tensors")) == "loading: 3 tensors"
    assert describe(Progress(stage="x\x1b[2J", done=5, total=4, unit="layers")) == "x: 100 % (5 of 4 layers)"
    assert describe(Progress(stage="got", done=5_000_000, unit="bytes")) == "got: 5 MB"


def test_a_terminal_gets_one_changing_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    terminal = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: True, closed=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    line = ProgressLine()
    for done in (1, 1, 2):
        line.show(Progress(stage="s", done=done, total=2, unit="layers"))
    line.clear()
    line.clear()
    assert written == ["\r\x1b[Ks: 50 % (1 of 2 layers)", "\r\x1b[Ks: 100 % (2 of 2 layers)", "\r\x1b[K"]


def test_a_note_has_a_line_of_its_own_beside_progress_and_an_unfinished_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    terminal = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: True, closed=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    line, connecting = ProgressLine(), Progress(stage="connecting", done=0, total=0)
    line.show(connecting)
    notify("note: one")
    line.show(connecting)
    line.clear()
    answer("half")
    notify("note: two")
    answer("an")
    line.show(connecting)
    notify("note: three")
    answer("answer\n")
    notify("note: four")
    shown = "\r\x1b[Kconnecting\r\x1b[K"
    assert "".join(written) == (
        f"{shown}note: one\n{shown}half\nnote: two\nan\n{shown}note: three\nanswer\nnote: four\n"
    )


def test_a_bad_argument_is_told_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the name of what the library checks with."""
    assert run(["locate", "base"]) == 2
    said = capsys.readouterr()
    assert (
        "Invalid value for 'WHAT': 'base' is not one of 'config', 'data', 'db', 'models', 'logs', 'keymap'." in said.err
    )
    assert said.out == ""
