"""Pictures from anywhere, as a question holds them."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.attacks.campaign import Attack, Attempt, Refused
from benchmarks.attacks.mutating import spoiled

_HEIGHT, _WIDTH = 24, 40


def files() -> list[bytes]:
    """A small picture in each format that is read, and in its odd forms."""
    from PIL import Image

    draw = random.Random(0)
    image = Image.frombytes("RGB", (_WIDTH, _HEIGHT), draw.randbytes(3 * _WIDTH * _HEIGHT))
    turned, other = Image.Exif(), Image.new("RGB", image.size)
    turned[0x0112] = 6
    palette = image.convert("P")

    def saved(picture: Image.Image, form: str, **options: object) -> bytes:
        file = io.BytesIO()
        picture.save(file, form, **options)
        return file.getvalue()

    return [
        saved(image, "PNG"),
        saved(palette, "PNG", transparency=3),
        saved(image.convert("I;16"), "PNG"),
        saved(image, "PNG", save_all=True, append_images=[other], exif=turned),
        saved(image, "JPEG", exif=turned),
        saved(image, "JPEG", progressive=True),
        saved(image.convert("CMYK"), "JPEG"),
        saved(image, "MPO", save_all=True, append_images=[other]),
        saved(image, "WEBP", exif=turned),
        saved(image, "WEBP", lossless=True, save_all=True, append_images=[other]),
        saved(palette, "GIF", save_all=True, append_images=[other.convert("P")]),
        saved(image, "BMP"),
        saved(palette, "BMP"),
    ]


@contextlib.contextmanager
def decoded(home: Path) -> Iterator[Attempt]:
    """Spoiled pictures are decoded in the process for that, which must not end."""
    from engine.pictures.decoding import PictureDecoder, PictureRefused

    whole = files()
    decoder = PictureDecoder()
    begun = decoder.pid

    def attempt(draw: random.Random) -> None:
        try:
            decoder.decode(spoiled(draw.choice(whole), draw))
        except PictureRefused as refused:
            if decoder.pid != begun:
                raise AssertionError(f"the process that decodes was lost: {refused.reason}") from refused
            raise Refused from refused

    try:
        yield attempt
    finally:
        decoder.close()


ATTACKS = [Attack("pictures", 100_000, decoded)]
