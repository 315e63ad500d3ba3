"""``privatellm ask --file picture.png`` over a real engine and a tiny model that sees."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.commands.root import run
from engine.pictures.picture import Picture
from tests.app.scripted import fork_engines
from tests.engine.runtimes.native_oracle import needs_kernels
from tests.support.engine_forks import with_libraries
from tests.support.speaking_model import write_speaking_model
from tests.support.tiny_seeing import TEMPLATE, png, random_picture, write_speaking_seeing

pytestmark = pytest.mark.slow
CHOICES = ["--no-stdin", "--json", "--max-tokens", "6", "--temperature", "0", "--runtime", "native"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    fork_engines(monkeypatch, launch=with_libraries)
    return tmp_path


def turned(picture: Picture) -> bytes:
    """``picture`` as a camera stores it that was held on its side, and what EXIF says of that."""
    upright = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    upright.transpose(Image.Transpose.ROTATE_90).save(file, "WEBP", lossless=True, exif=exif)
    return file.getvalue()


@needs_kernels
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4"])
def test_the_model_sees_what_is_attached(folder: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    model = str(write_speaking_seeing(folder / "model", kind))
    for name, data in (
        ("a.png", png(random_picture(40, 24))),
        ("turned.webp", turned(random_picture(40, 24))),
        ("b.png", png(random_picture(40, 24, seed=1))),
        ("note.txt", b"a note"),
    ):
        (folder / name).write_bytes(data)

    def answer(*files: str) -> dict[str, Any]:
        attached = [option for file in files for option in ("--file", file)]
        assert run(["ask", "what?", "--model", model, *attached, *CHOICES]) == 0
        captured = capsys.readouterr()
        assert all(f"note: {file} · 24×40 · " in captured.err for file in files if file != "note.txt")
        found: dict[str, Any] = json.loads(captured.out)
        return found

    first = answer("a.png")
    assert answer("turned.webp")["token_ids"] == first["token_ids"], "a picture on its side stands upright"
    assert answer("b.png")["token_ids"] != first["token_ids"]
    both, other = answer("a.png", "note.txt", "b.png"), answer("b.png", "note.txt", "a.png")
    assert both["token_ids"] != other["token_ids"] and both["prompt_tokens"] == other["prompt_tokens"]
    assert both["prompt_tokens"] > first["prompt_tokens"]


@needs_kernels
def test_a_model_that_sees_nothing_says_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_speaking_model(folder / "blind", TEMPLATE))
    (folder / "a.png").write_bytes(png(random_picture(40, 24)))
    assert run(["ask", "what?", "--model", model, "--file", "a.png", *CHOICES]) == 2
    captured = capsys.readouterr()
    assert "The question holds a picture, and blind sees none: leave that out, or load a model that sees" in (
        captured.out + captured.err
    )
