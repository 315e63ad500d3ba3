"""What ``ask`` takes from its standard input, whatever that is; and that it never waits for nothing."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.commands import question as question_module
from app.commands.root import run
from tests.app.scripted import install, make_home

Give = Callable[[int], None]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(make_home(tmp_path, monkeypatch))
    return tmp_path


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Iterator[Give]:
    """Makes a descriptor the standard input."""
    streams: list[io.TextIOWrapper] = []

    def give_descriptor(descriptor: int) -> None:
        streams.append(os.fdopen(descriptor, "r", encoding="utf-8"))
        monkeypatch.setattr(sys, "stdin", streams[-1])

    yield give_descriptor
    for stream in streams:
        stream.close()


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What the engine was asked, and what was said."""
    assert run(["ask", *arguments]) == 0
    out, err = capsys.readouterr()
    (message,) = json.loads(out)["messages"]
    return message["content"], err


def pipe_with(data: bytes) -> int:
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return read


def test_the_prompt_comes_first_and_then_what_is_piped_in(
    home: Path, give: Give, capsys: pytest.CaptureFixture[str]
) -> None:
    give(pipe_with("grüße\nzweite Zeile\n".encode()))
    question, said = asked(capsys, "echo: summarise")
    assert question == "echo: summarise\n\ngrüße\nzweite Zeile" and "stdin" not in said


def test_a_file_is_read_from_where_it_is(home: Path, give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "text").write_text("first\nrest\n")
    descriptor = os.open(home / "text", os.O_RDONLY)
    os.read(descriptor, 6)
    give(descriptor)
    assert asked(capsys, "echo:")[0] == "echo:\n\nrest"


def test_a_pipe_that_is_slow_after_its_beginning_is_read_to_its_end(
    home: Path, give: Give, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_module, "FIRST_BYTE_S", 0.01)
    read, write = os.pipe()
    os.write(write, b"a")
    give(read)

    def go_on() -> None:
        os.write(write, b"b" * 200_000)
        os.close(write)

    later = threading.Timer(0.1, go_on)
    later.start()
    assert asked(capsys, "echo:")[0] == "echo:\n\na" + "b" * 200_000
    later.join()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_an_inherited_pipe_that_nobody_writes_to_is_left_alone(
    home: Path, give: Give, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(question_module, "FIRST_BYTE_S", 0.01)
    if kind == "pipe":
        read, write = os.pipe()
    else:
        ours, theirs = socket.socketpair()
        read, write = ours.detach(), theirs.detach()
    try:
        give(read)
        question, said = asked(capsys, "echo:")
        assert question == "echo:"
        assert "nothing arrived on stdin" in said and "--stdin" in said and "--no-stdin" in said
        question, said = asked(capsys, "echo:", "--no-stdin")
        assert question == "echo:" and "stdin" not in said
    finally:
        os.close(write)


def test_stdin_waits_for_a_slow_command(
    home: Path, give: Give, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_module, "FIRST_BYTE_S", 0.01)
    read, write = os.pipe()
    give(read)
    later = threading.Timer(0.1, lambda: (os.write(write, b"late"), os.close(write)))
    later.start()
    assert asked(capsys, "echo:", "--stdin")[0] == "echo:\n\nlate"
    later.join()


@pytest.mark.parametrize("kind", ["null", "terminal", "folder", "empty pipe", "closed", "none", "no descriptor"])
def test_what_holds_no_text_adds_none(
    home: Path, give: Give, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    others: list[int] = []
    match kind:
        case "null":
            give(os.open(os.devnull, os.O_RDONLY))
        case "terminal":
            master, slave = os.openpty()
            others.append(master)
            give(slave)
        case "folder":
            descriptor = os.open(home, os.O_RDONLY)
            give(pipe_with(b""))
            os.dup2(descriptor, sys.stdin.fileno())
            os.close(descriptor)
        case "empty pipe":
            give(pipe_with(b""))
        case "closed":
            give(pipe_with(b"x"))
            sys.stdin.close()
        case "none":
            monkeypatch.setattr(sys, "stdin", None)
        case "no descriptor":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    try:
        question, said = asked(capsys, "echo:")
        assert question == "echo:" and "stdin" not in said
    finally:
        for descriptor in others:
            os.close(descriptor)


def test_bytes_that_are_no_text_are_refused(home: Path, give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    give(pipe_with(b"ab\xff"))
    assert run(["ask", "say:x"]) == 2
    assert capsys.readouterr().err == "privatellm: the question on stdin is not UTF-8 text (byte 2)\n"


def test_what_never_ends_is_refused(home: Path, give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    give(os.open("/dev/zero", os.O_RDONLY))
    assert run(["ask"]) == 2
    assert capsys.readouterr().err == "privatellm: the question on stdin is longer than 34 MB\n"


def test_no_stdin_needs_a_prompt(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "--no-stdin"]) == 2
    assert "--no-stdin needs a PROMPT" in capsys.readouterr().err
