"""Attached files: what the model gets."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from app.attachments.attachment import Attachment, question_message, with_attachments
from app.commands.root import run
from engine.ipc.messages import Message, PictureFile
from tests.app.attachments.pictures import picture, png
from tests.app.scripted import install, make_home


def test_the_question_comes_first_and_then_each_file_between_fences() -> None:
    files = [Attachment("a.py", "print(1)\n"), Attachment("b.md", "````\ncode\n````"), Attachment("c", "")]
    assert with_attachments("why?", files) == (
        "why?\n\nFile `a.py`:\n```\nprint(1)\n```\n\n"
        "File `b.md`:\n`````\n````\ncode\n````\n`````\n\nFile `c`:\n```\n```"
    )
    assert with_attachments("why?", []) == "why?"


def test_pictures_come_before_the_question_each_at_its_place() -> None:
    a, b, text = picture("a.png"), picture("b.png", colour="blue"), Attachment("c", "x")
    one = question_message("why?", [a], sees=True)
    assert one == Message("user", "why?", pictures=[PictureFile(a.data, 0)])
    several = question_message("why?", [a, text, b], sees=True)
    assert several.content == "Picture `a.png`:\n\nPicture `b.png`:\n\n\nwhy?\n\nFile `c`:\n```\nx\n```"
    assert [picture.data for picture in several.pictures] == [a.data, b.data]
    assert [several.content[: picture.place] for picture in several.pictures] == [
        "Picture `a.png`:\n", "Picture `a.png`:\n\nPicture `b.png`:\n",
    ]  # fmt: skip


def test_a_model_that_sees_nothing_gets_the_names_of_pictures() -> None:
    files = [Attachment("c", "x"), picture("a.png", 64, 32)]
    text = "why?\n\nFile `c`:\n```\nx\n```\n\n[Picture `a.png`, 64 x 32 pixels, which is not shown here]"
    assert question_message("why?", files, sees=False) == Message("user", text)
    assert with_attachments("why?", files) == text


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


def test_ask_attaches_pictures_and_says_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(make_home(tmp_path, monkeypatch))
    (tmp_path / "two").write_text("second\n")
    (tmp_path / "b.jpg").write_bytes(png(64, 32, "blue"))
    monkeypatch.setenv("SCRIPTED_SIGHT", "1")
    files = ["--file=two", "--file=b.jpg"]
    assert run(["ask", "echo: compare", "--no-stdin", *files]) == 0
    out, err = capsys.readouterr()
    (message,) = json.loads(out)["messages"]
    assert [base64.b64decode(picture["data"]) for picture in message["pictures"]] == [png(64, 32, "blue")]
    assert message["content"] == "echo: compare\n\nFile `two`:\n```\nsecond\n```"
    assert "note: b.jpg · 64×32 · 2 tokens\n" in err and "note: two" not in err
    (tmp_path / "c.png").write_bytes(png()[:40])
    assert run(["ask", "echo:", "--no-stdin", "--file", "c.png"]) == 2
    assert capsys.readouterr().err.startswith("privatellm: c.png cannot be attached, because it is ")
    monkeypatch.setattr("app.commands.question.MOST_PICTURE_BYTES", 50)
    assert run(["ask", "echo:", "--no-stdin", *files]) == 2
    assert "together; at most 50 B can be attached" in capsys.readouterr().err
