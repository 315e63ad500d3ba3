"""What is said of files before a model gets them."""

from __future__ import annotations

import msgspec
import pytest

from app.attachments.attachment import AttachedPicture, Attachment
from app.attachments.figures import figures, texts_of, tokens_of, too_much, unseen
from engine.ipc.messages import MOST_PICTURE_BYTES
from tests.app.attachments.pictures import SEEING, picture
from tests.app.fake_engine import FACTS

TEXT = Attachment("a.py", "print(1)\n")


def test_pictures_have_the_tokens_of_the_models_grid_and_texts_are_counted_or_estimated() -> None:
    files = [TEXT, picture("a.png", 320, 128), Attachment("b", "x" * 40)]
    assert list(tokens_of(files, SEEING)) == [3, 40, 10]
    assert list(tokens_of(files, SEEING, [7, 8])) == [7, 40, 8]
    assert list(tokens_of(files, FACTS)) == [3, None, 10] == list(tokens_of(files, None))
    assert texts_of(files) == [files[0], files[2]]


def test_a_picture_has_its_pixels_and_a_text_its_bytes() -> None:
    assert figures(TEXT, 3, "~") == ["9 B", "~3 tokens"]
    shown = picture("a.png", 320, 128)
    assert figures(shown, 40, "~") == ["320×128", "40 tokens"]
    assert figures(shown) == ["320×128", f"{shown.size} B"]


def test_a_model_that_sees_nothing_is_said_with_what_to_do() -> None:
    assert unseen([TEXT], FACTS) == unseen([picture("a.png")], None) == unseen([picture("a.png")], SEEING) == ""
    assert unseen([TEXT, picture("a\x1b[2J.png")], FACTS) == (
        "starter sees no pictures: leave a.png out, or load a model that sees."
    )

    ring = msgspec.structs.replace(FACTS, way_to_see="load it on this machine alone")
    assert unseen([picture("a.png")], ring).endswith("leave a.png out, or load it on this machine alone.")


def test_a_picture_that_no_grid_takes_is_said() -> None:
    long = Attachment("long.png", picture=AttachedPicture(b"", 10_000, 10))
    assert unseen([long], SEEING).startswith("long.png: A picture of 10000 x 10 pixels")
    assert list(tokens_of([long], SEEING)) == [None]


@pytest.mark.parametrize("more", [0, 1])
def test_pictures_of_a_chat_have_a_limit(more: int) -> None:
    half = Attachment("a", picture=AttachedPicture(bytes(MOST_PICTURE_BYTES // 2), 1, 1))
    other = Attachment("b", picture=AttachedPicture(bytes(MOST_PICTURE_BYTES // 2 + more), 1, 1))
    said = too_much([half, TEXT, other])
    assert bool(said) == bool(more) and ("at most 48 MB" in said) == bool(more)
