"""One attached file, and the form in which the model gets it. No Textual.

The model gets the question, and after it each file as its name and its text between fences::

    Why does this fail?

    File `src/main.py`:
    ```
    print(1 / 0)
    ```

The fences are longer than any in the text. All of it is text of the person's message, so control tokens that are
spelled out in a file are encoded as text. Pictures come before the question, as the models were trained, and with their
names if there are several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.ipc.messages import Message, PictureFile

CHARACTERS_PER_TOKEN = 4
"""Characters of text assumed for a token."""

_FENCES = re.compile(r"`{3,}")


@dataclass(frozen=True)
class AttachedPicture:
    """A picture: its file as it is, and the pixels of it when it stands upright."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Attachment:
    """A file as it was when it was attached: its ``text``, or a ``picture``. ``name``: what the person and the model
    call it, one line."""

    name: str
    text: str = ""
    picture: AttachedPicture | None = None

    @cached_property
    def data(self) -> bytes:
        """The text in UTF-8, or the picture's file."""
        return self.text.encode("utf-8", "replace") if self.picture is None else self.picture.data

    @property
    def size(self) -> int:
        """Bytes of :attr:`data`."""
        return len(self.data)

    @property
    def digest(self) -> str:
        """SHA-256 of :attr:`data`, in hexadecimal digits."""
        # Asking one question on the command line needs none, and importing it costs milliseconds.
        import hashlib

        return hashlib.sha256(self.data).hexdigest()


def pictures_of(attachments: Sequence[Attachment]) -> list[AttachedPicture]:
    """The pictures among ``attachments``."""
    return [attachment.picture for attachment in attachments if attachment.picture is not None]


def estimated_tokens(characters: int) -> int:
    """Estimate of the tokens of a text of that many characters."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def with_attachments(question: str, attachments: Sequence[Attachment]) -> str:
    """``question`` with ``attachments`` as text, in the form that this module describes. Pictures are only named."""
    return "\n\n".join([question, *map(_as_text, attachments)]) if attachments else question


def question_message(question: str, attachments: Sequence[Attachment], *, sees: bool) -> Message:
    """The model's input for ``question`` with ``attachments``. ``sees``: it gets pictures; otherwise their names."""
    pictures = [attachment for attachment in attachments if attachment.picture is not None] if sees else []
    texts = [attachment for attachment in attachments if attachment not in pictures]
    content, files = "", []
    for attachment in pictures:
        assert attachment.picture is not None
        content += f"Picture `{attachment.name}`:\n" if len(pictures) > 1 else ""
        files.append(PictureFile(attachment.picture.data, len(content)))
        content += "\n" if len(pictures) > 1 else ""
    content += "\n" if len(pictures) > 1 else ""
    return Message("user", content + with_attachments(question, texts), pictures=files)


def _as_text(attachment: Attachment) -> str:
    picture = attachment.picture
    if picture is not None:
        return f"[Picture `{attachment.name}`, {picture.width} x {picture.height} pixels, which is not shown here]"
    longest = max(map(len, _FENCES.findall(attachment.text)), default=2)
    fence = "`" * (longest + 1)
    text = attachment.text
    end = "" if text.endswith("\n") or not text else "\n"
    return f"File `{attachment.name}`:\n{fence}\n{text}{end}{fence}"
