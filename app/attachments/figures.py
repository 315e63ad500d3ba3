"""What is said of attached files before a model gets them: sizes, tokens, and why it cannot see a picture. Pure; no
Textual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.attachments.attachment import AttachedPicture, Attachment, estimated_tokens, pictures_of
from app.text_safety import one_line
from engine.errors import ModelError
from engine.ipc.messages import MOST_PICTURE_BYTES, ModelFacts
from engine.planning.units import byte_size


def unseen(attachments: Sequence[Attachment], facts: ModelFacts | None) -> str:
    """Why the loaded model cannot see the pictures among ``attachments``, as a sentence; empty if it can, or if it is
    not known yet."""
    for attachment in attachments:
        if attachment.picture is None or facts is None:
            continue
        name = one_line(attachment.name)
        if facts.sight is None:
            return f"{facts.name} sees no pictures: leave {name} out, or {facts.way_to_see}."
        try:
            facts.sight.grid(attachment.picture.height, attachment.picture.width)
        except ModelError as error:
            return f"{name}: {error}"
    return ""


def too_much(attachments: Sequence[Attachment]) -> str:
    """Why all ``attachments`` of a chat cannot be sent to the engine, as a sentence; empty if they can."""
    total = sum(len(picture.data) for picture in pictures_of(attachments))
    if total <= MOST_PICTURE_BYTES:
        return ""
    return (
        f"The pictures of this chat are {byte_size(total)} together, and a model gets at most "
        f"{byte_size(MOST_PICTURE_BYTES)}: /new begins another chat, and /delete removes an old question."
    )


def tokens_of(
    attachments: Sequence[Attachment], facts: ModelFacts | None, counts: Sequence[int] | None = None
) -> Iterator[int | None]:
    """The tokens of each file; None for a picture if that is not known. ``counts``: those of the texts among them;
    None: they are estimated."""
    counted = iter(
        counts if counts is not None else (estimated_tokens(len(each.text)) for each in texts_of(attachments))
    )
    for attachment in attachments:
        yield next(counted) if attachment.picture is None else _picture_tokens(attachment.picture, facts)


def texts_of(attachments: Sequence[Attachment]) -> list[Attachment]:
    """The files among ``attachments`` that are text."""
    return [attachment for attachment in attachments if attachment.picture is None]


def figures(attachment: Attachment, tokens: int | None = None, about: str = "") -> list[str]:
    """``1,024×768`` or the bytes of a text, and the tokens: what they are ``about``, or the bytes if they are not
    known."""
    picture = attachment.picture
    large = byte_size(attachment.size, fine=True)
    counted = "" if tokens is None else f"{tokens:,} tokens"
    if picture is None:
        return [large, about + counted] if counted else [large]
    return [f"{picture.width}×{picture.height}", counted or large]


def _picture_tokens(picture: AttachedPicture, facts: ModelFacts | None) -> int | None:
    if facts is None or facts.sight is None:
        return None
    try:
        return facts.sight.grid(picture.height, picture.width).tokens
    except ModelError:
        return None
