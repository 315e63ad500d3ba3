"""Pictures in requests: their files, from the forms of each protocol, and their places in the text of a message."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from app.attachments.reading import is_picture
from app.serve.replies import Refused
from engine.ipc.messages import LARGEST_PICTURE, MOST_PICTURE_BYTES, Message, PictureFile
from engine.planning.units import byte_size

PICTURE_KINDS = ("image_url", "input_image", "image")
"""Kinds of parts that are pictures: of chat completions, responses, and messages."""
_FORM = "send the file itself, in base64 or as a data: URL"


def picture_file(given: Any, where: str) -> bytes:
    """The file of a picture. ``given``: the ``image_url`` of a part, or its ``source``. Raises Refused."""
    match given:
        case {"url": str(url)} | str(url):
            data = _of_url(url, where)
        case {"type": "base64", "data": str(text)}:
            data = _decoded(text.encode(), where)
        case _:
            raise Refused(f"The picture has no data that is known here: {_FORM}.", parameter=where)
    if len(data) > LARGEST_PICTURE:
        raise Refused(
            f"The picture has {byte_size(len(data))}, and {byte_size(LARGEST_PICTURE)} is the limit here.",
            parameter=where,
        )
    if not is_picture(data):
        raise Refused("The picture is no PNG, JPEG, WebP, GIF or BMP file.", parameter=where)
    return data


def _of_url(url: str, where: str) -> bytes:
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise Refused(
            f"Pictures are not fetched from {url[:100]!r}, as nothing is opened here that was not asked for: {_FORM}.",
            parameter=where,
        )
    head, _, body = rest.partition(",")
    text = unquote_to_bytes(body)
    return _decoded(text, where) if head.lower().endswith(";base64") else text


def _decoded(text: bytes, where: str) -> bytes:
    try:
        return b64decode(b"".join(text.split()), validate=True)
    except binascii.Error as error:
        raise Refused(f"The picture is not in base64: {error}.", parameter=where) from None


class Composed:
    """The text of a message, made of its parts. Texts beside each other are on lines of their own, and a picture stands
    where it was given."""

    def __init__(self) -> None:
        self.content = ""
        self.pictures: list[PictureFile] = []
        self._after_text = False

    def text(self, text: str) -> None:
        self.content += f"\n{text}" if self._after_text else text
        self._after_text = True

    def picture(self, data: bytes) -> None:
        self.pictures.append(PictureFile(data, len(self.content)))
        self._after_text = False

    @property
    def empty(self) -> bool:
        """Whether there was no part."""
        return not (self._after_text or self.pictures)


def check_pictures(messages: Sequence[Message]) -> None:
    """Raises Refused if the pictures of ``messages`` are too large together."""
    total = sum(len(picture.data) for message in messages for picture in message.pictures)
    if total > MOST_PICTURE_BYTES:
        raise Refused(
            f"The pictures are {byte_size(total)} together, and {byte_size(MOST_PICTURE_BYTES)} is the limit here: "
            "leave out those of old turns."
        )
