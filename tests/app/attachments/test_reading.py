"""What is read of files that are attached, and what is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from app.attachments.attachment import AttachedPicture, Attachment
from app.attachments.reading import LARGEST, AttachmentError, FileReader, is_picture
from engine.ipc.messages import LARGEST_PICTURE
from tests.app.attachments.pictures import png


def read(path: Path, name: str | None = None) -> Attachment:
    with FileReader() as reader:
        return reader.read(path, name)


def test_a_file_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "grüße.txt"
    path.write_bytes("\ufeffeins\r\nzwei\rdrei\n".encode())
    found = read(path, "grüße.txt")
    assert (found.name, found.text, found.size) == ("grüße.txt", "eins\nzwei\ndrei\n", 15)
    assert found.digest == Attachment("another name", found.text).digest


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"a\0b", "binary"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * (LARGEST + 1), "too large"),
        (None, "No such file"),
        (b"\0\0\0\x24ftypheic\0\0\0\0", r"a picture in the format HEIC; save it as PNG or JPEG"),
        (png()[:60], "cannot be attached, because it is damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(LARGEST_PICTURE), "too large"),
        (b"GIF87a and more text", "cannot be attached, because it is"),
    ],
    ids=["binary", "other encoding", "large", "missing", "heic", "cut", "large picture", "no picture"],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, data: bytes | None, reason: str) -> None:
    path = tmp_path / "odd\x1b[2Jname"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(AttachmentError, match=reason) as refused:
        read(path)
    assert "oddname" in str(refused.value) and "\x1b" not in str(refused.value) and str(refused.value).endswith(".")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AttachmentError, match="not a file"):
        read(tmp_path / "pipe")
    with pytest.raises(AttachmentError, match="is a folder"):
        read(tmp_path)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_picture_is_known_by_its_bytes_and_kept_as_it_is(tmp_path: Path, form: str) -> None:
    data = png(300, 200, form=form)
    (tmp_path / "photo").write_bytes(data)
    found = read(tmp_path / "photo", "photo")
    assert found == Attachment("photo", picture=AttachedPicture(data, 300, 200)) and found.size == len(data)


def test_the_size_is_that_of_the_upright_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "JPEG", exif=exif)
    (tmp_path / "photo.jpg").write_bytes(file.getvalue())
    shown = read(tmp_path / "photo.jpg").picture
    assert shown is not None and (shown.width, shown.height) == (200, 300)


def test_text_that_begins_like_a_picture_is_text(tmp_path: Path) -> None:
    for text in ("BMW builds cars.\n", "BM\n", "RIFF of the day, a text"):
        (tmp_path / "a").write_text(text)
        assert not is_picture(text.encode()) and read(tmp_path / "a").text == text
