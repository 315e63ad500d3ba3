"""One attached file: how it is read, and the form in which the model gets it. No Textual.

The model gets the question, and after it each file as its name and its text between fences::

    Why does this fail?

    File `src/main.py`:
    ```
    print(1 / 0)
    ```

The fences are longer than any in the text. All of it is text of the person's message, so control tokens that are
spelled out in a file are encoded as text.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from app.text_safety import one_line
from engine.planning.units import byte_size

LARGEST = 2_000_000
"""Maximum bytes of an attached file. It is more text than most models have context for."""
CHARACTERS_PER_TOKEN = 4
"""Characters of text assumed for a token."""

_FENCES = re.compile(r"`{3,}")


class AttachmentError(Exception):
    """A file cannot be attached. The text is one sentence that names it."""


@dataclass(frozen=True)
class Attachment:
    """A file's ``text`` as it was when it was attached. ``name``: what the person and the model call it, one line."""

    name: str
    text: str

    @cached_property
    def data(self) -> bytes:
        """The text in UTF-8."""
        return self.text.encode("utf-8", "replace")

    @property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.data)

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal digits."""
        # Asking one question on the command line needs none, and importing it costs milliseconds.
        import hashlib

        return hashlib.sha256(self.data).hexdigest()


def estimated_tokens(characters: int) -> int:
    """Estimate of the tokens of a text of that many characters."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def read_file(path: Path, name: str | None = None) -> Attachment:
    """The text file at ``path``, called ``name`` (default: the path as it is written). Raises AttachmentError."""
    shown = one_line(str(path) if name is None else name)
    try:
        # A pipe without a writer must not block the opening.
        descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK)
        try:
            facts = os.fstat(descriptor)
            if stat.S_ISDIR(facts.st_mode):
                raise AttachmentError(f"{shown} is a folder; name the files in it, such as {shown.rstrip('/')}/*.py.")
            if not stat.S_ISREG(facts.st_mode):
                raise AttachmentError(f"{shown} is not a file, so it cannot be attached.")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(LARGEST + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise AttachmentError(f"{shown} cannot be read: {reason}.") from error
    if len(data) > LARGEST:
        size = byte_size(max(facts.st_size, LARGEST + 1))
        raise AttachmentError(f"{shown} is too large to attach ({size}; the limit is {byte_size(LARGEST)}).")
    return Attachment(shown, _text_of(data, shown))


def with_attachments(question: str, attachments: Sequence[Attachment]) -> str:
    """The model's input for ``question`` with ``attachments``, in the form that this module describes."""
    return "\n\n".join([question, *map(_fenced, attachments)]) if attachments else question


def _text_of(data: bytes, shown: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AttachmentError(f"{shown} is not UTF-8 text, so it cannot be attached.") from None
    if "\0" in text:
        raise AttachmentError(f"{shown} is a binary file, so it cannot be attached.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _fenced(attachment: Attachment) -> str:
    longest = max(map(len, _FENCES.findall(attachment.text)), default=2)
    fence = "`" * (longest + 1)
    text = attachment.text
    end = "" if text.endswith("\n") or not text else "\n"
    return f"File `{attachment.name}`:\n{fence}\n{text}{end}{fence}"
