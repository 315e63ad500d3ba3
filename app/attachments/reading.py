"""Reading of files that are attached: text, and pictures, whose size a confined process finds. No Textual."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from app.attachments.attachment import AttachedPicture, Attachment
from app.text_safety import one_line
from engine.ipc.messages import LARGEST_PICTURE
from engine.planning.units import byte_size

if TYPE_CHECKING:
    from engine.pictures.decoding import PictureDecoder

LARGEST = 2_000_000
"""Maximum bytes of an attached text. It is more than most models have context for."""
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Endings of the names of pictures that can be attached."""

_BEGINNINGS = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8")
_OTHER_PICTURES = {b"ftypheic": "HEIC", b"ftypheix": "HEIC", b"ftypmif1": "HEIC", b"ftypavif": "AVIF"}
"""Formats of pictures that are not read, by their bytes 4 to 12."""
_HEAD = 16


class AttachmentError(Exception):
    """A file cannot be attached. The text is one sentence that names it."""


class FileReader:
    """Reads files to attach. A process that looks at pictures is started with the first of them, and ends with
    :meth:`close`."""

    def __init__(self) -> None:
        self._decoder: PictureDecoder | None = None

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def read(self, path: Path, name: str | None = None) -> Attachment:
        """The file at ``path``, called ``name`` (default: the path as it is written). Raises AttachmentError."""
        shown = one_line(str(path) if name is None else name)
        try:
            # A pipe without a writer must not block the opening.
            descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK)
            try:
                size = _size_of_file(descriptor, shown)
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(_HEAD)
                    seen = is_picture(data)
                    most = LARGEST_PICTURE if seen else LARGEST
                    data += file.read(most + 1 - len(data))
            finally:
                os.close(descriptor)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise AttachmentError(f"{shown} cannot be read: {reason}.") from error
        if len(data) > most:
            large = byte_size(max(size, most + 1))
            raise AttachmentError(f"{shown} is too large to attach ({large}; the limit is {byte_size(most)}).")
        if seen:
            return Attachment(shown, picture=self.picture(data, shown))
        return Attachment(shown, _text_of(data, shown))

    def picture(self, data: bytes, name: str) -> AttachedPicture:
        """The picture in the file ``data`` called ``name``. Raises AttachmentError."""
        from engine.pictures.decoding import PictureDecoder, PictureRefused

        if self._decoder is None:
            self._decoder = PictureDecoder()
        try:
            size = self._decoder.size(data)
        except PictureRefused as refused:
            raise AttachmentError(f"{name} cannot be attached, because {refused.reason}.") from refused
        return AttachedPicture(data, size.width, size.height)


def is_picture(head: bytes) -> bool:
    """Whether a file that begins with ``head``, of at least 12 bytes, has a format of pictures that are read."""
    if head.startswith(b"BM"):
        return head[6:10] == bytes(4)  # any text may begin with these letters
    return head.startswith(_BEGINNINGS) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")


def _size_of_file(descriptor: int, shown: str) -> int:
    """Bytes of a regular file. Raises AttachmentError for anything else."""
    facts = os.fstat(descriptor)
    if stat.S_ISDIR(facts.st_mode):
        raise AttachmentError(f"{shown} is a folder; name the files in it, such as {shown.rstrip('/')}/*.py.")
    if not stat.S_ISREG(facts.st_mode):
        raise AttachmentError(f"{shown} is not a file, so it cannot be attached.")
    return facts.st_size


def _text_of(data: bytes, shown: str) -> str:
    other = _OTHER_PICTURES.get(data[4:12])
    if other is not None:
        raise AttachmentError(f"{shown} is a picture in the format {other}; save it as PNG or JPEG to attach it.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AttachmentError(f"{shown} is not UTF-8 text, so it cannot be attached.") from None
    if "\0" in text:
        raise AttachmentError(f"{shown} is a binary file, so it cannot be attached.")
    return text.replace("\r\n", "\n").replace("\r", "\n")
