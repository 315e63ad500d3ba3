"""Attached files: what is read and what is refused, and what the model gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.attachments.attachment import LARGEST, Attachment, AttachmentError, read_file, with_attachments
from app.commands.root import run
from tests.app.scripted import install, make_home


def test_the_question_comes_first_and_then_each_file_between_fences() -> None:
    files = [Attachment("a.py", "print(1)\n"), Attachment("b.md", "````\ncode\n````"), Attachment("c", "")]
    assert with_attachments("why?", files) == (
        "why?\n\nFile `a.py`:\n```\nprint(1)\n```\n\n"
        "File `b.md`:\n`````\n````\ncode\n````\n`````\n\nFile `c`:\n```\n```"
    )
    assert with_attachments("why?", []) == "why?"


def test_a_file_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "grüße.txt"
    path.write_bytes("\ufeffeins\r\nzwei\rdrei\n".encode())
    read = read_file(path, "grüße.txt")
    assert (read.name, read.text, read.size) == ("grüße.txt", "eins\nzwei\ndrei\n", 15)
    assert read.digest == Attachment("another name", read.text).digest


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"a\0b", "binary"), (b"\xff\xfe", "not UTF-8"), (b"x" * (LARGEST + 1), "too large"), (None, "No such file")],
    ids=["binary", "other encoding", "large", "missing"],
)
def test_what_is_no_text_is_refused_in_one_sentence(tmp_path: Path, data: bytes | None, reason: str) -> None:
    path = tmp_path / "odd\x1b[2Jname"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(AttachmentError, match=reason) as refused:
        read_file(path)
    assert "oddname" in str(refused.value) and "\x1b" not in str(refused.value) and str(refused.value).endswith(".")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AttachmentError, match="not a file"):
        read_file(tmp_path / "pipe")
    with pytest.raises(AttachmentError, match="is a folder"):
        read_file(tmp_path)


def test_ask_attaches_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(make_home(tmp_path, monkeypatch))
    (tmp_path / "one").write_text("first")
    (tmp_path / "two").write_text("second\n")
    assert run(["ask", "echo: compare", "--no-stdin", "--file", "one", "--file", "two"]) == 0
    (message,) = json.loads(capsys.readouterr().out)["messages"]
    assert message["content"] == "echo: compare\n\nFile `one`:\n```\nfirst\n```\n\nFile `two`:\n```\nsecond\n```"
    assert run(["ask", "echo:", "--no-stdin", "--file", "three"]) == 2
    assert capsys.readouterr().err == "privatellm: three cannot be read: No such file or directory\n"
    assert run(["ask", "--prompt-ids", "1,2", "--file", "one"]) == 2
    assert "--prompt-ids" in capsys.readouterr().err
