"""Pictures come out of the decoding process as they were drawn, and hostile ones as a sentence."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.errors import Cancelled, ModelError
from engine.ipc.messages import LARGEST_PICTURE
from engine.pictures import decoding_sandbox
from engine.pictures.decoding import FORMATS, LARGEST_PREVIEW, PictureDecoder, PictureRefused, PictureSize
from engine.pictures.picture import MOST_PIXELS, Picture

HEIGHT, WIDTH = 24, 40
RED, GREEN, WHITE = (255, 0, 0), (0, 128, 0), (255, 255, 255)


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    made = PictureDecoder()
    yield made
    made.close()


def colours(picture: Picture) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


def drawn(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A picture of which no two corners are alike, smooth enough for JPEG."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 64], 2).astype(np.uint8)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("form", "options", "distance"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 24),
        ("JPEG", {"quality": 98, "subsampling": 0}, 8),
        ("JPEG", {"quality": 98, "subsampling": 0, "progressive": True}, 8),
    ],
)
def test_colours_are_those_that_were_drawn(
    decoder: PictureDecoder, form: str, options: dict[str, Any], distance: int
) -> None:
    data = saved(Image.fromarray(drawn()), form, **options)
    assert decoder.size(data) == PictureSize(width=WIDTH, height=HEIGHT)
    found = colours(decoder.decode(data)).astype(int)
    assert np.abs(found - drawn()).max() <= distance


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_preview_is_the_upright_picture_scaled(decoder: PictureDecoder, form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 98, "subsampling": 0} if form == "JPEG" else {}
    data = saved(Image.fromarray(drawn(600, 400)), form, exif=exif, **options)
    whole = decoder.decode(data)
    width, height = (whole.width // 20, whole.height // 20)
    found = decoder.preview(data, width, height)
    assert (found.width, found.height) == (width, height)
    blocks = colours(whole).reshape(height, 20, width, 20, 3).mean((1, 3))
    assert np.abs(colours(found)[..., :2] - blocks[..., :2]).max() <= 12
    few = decoder.preview(data, width, height, 5)
    assert 2 <= len(np.unique(colours(few).reshape(-1, 3), axis=0)) <= 5
    assert decoder.size(data) == PictureSize(whole.width, whole.height), "the process goes on"


def test_a_preview_of_a_damaged_picture_is_refused_and_no_size_is_too_large(decoder: PictureDecoder) -> None:
    data = saved(Image.fromarray(drawn()), "PNG")
    with pytest.raises(PictureRefused, match="damaged"):
        decoder.preview(data[: len(data) // 2], 10, 10)
    found = decoder.preview(data, 0, 65_535)
    assert (found.width, found.height) == (1, LARGEST_PREVIEW)


UPRIGHT: dict[int, Callable[[int, int], tuple[int, int]]] = {
    # By EXIF 2.32: where the first row and the first column of the file are when the picture stands upright.
    1: lambda row, column: (row, column),  # top, left
    2: lambda row, column: (row, WIDTH - 1 - column),  # top, right
    3: lambda row, column: (HEIGHT - 1 - row, WIDTH - 1 - column),  # bottom, right
    4: lambda row, column: (HEIGHT - 1 - row, column),  # bottom, left
    5: lambda row, column: (column, row),  # left, top
    6: lambda row, column: (column, HEIGHT - 1 - row),  # right, top
    7: lambda row, column: (WIDTH - 1 - column, HEIGHT - 1 - row),  # right, bottom
    8: lambda row, column: (WIDTH - 1 - column, row),  # left, bottom
}


def with_orientation(orientation: object, form: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if form == "WEBP" else {}
    return saved(Image.fromarray(drawn()), form, exif=exif, **lossless)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_picture_stands_upright_as_exif_says(decoder: PictureDecoder, orientation: int, form: str) -> None:
    file = drawn()
    height, width = (WIDTH, HEIGHT) if orientation > 4 else (HEIGHT, WIDTH)
    expected = np.zeros((height, width, 3), np.uint8)
    for row in range(HEIGHT):
        for column in range(WIDTH):
            expected[UPRIGHT[orientation](row, column)] = file[row, column]
    data = with_orientation(orientation, form)
    assert decoder.size(data) == PictureSize(width, height)
    assert (colours(decoder.decode(data)) == expected).all()


def test_a_jpeg_of_a_telephone_stands_upright(decoder: PictureDecoder) -> None:
    found = colours(decoder.decode(with_orientation(6, "JPEG"))).astype(int)
    assert np.abs(found - np.rot90(drawn(), -1)).mean() < 4


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_there_is_not_turns_nothing(decoder: PictureDecoder, orientation: int) -> None:
    assert (colours(decoder.decode(with_orientation(orientation))) == drawn()).all()


def test_damaged_exif_turns_nothing(decoder: PictureDecoder) -> None:
    data = saved(Image.fromarray(drawn()), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\x01\x02")
    assert (colours(decoder.decode(data)) == drawn()).all()


def test_what_is_transparent_is_white(decoder: PictureDecoder) -> None:
    alpha = np.linspace(0, 255, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint8)
    rgba = np.dstack([drawn(), alpha])
    share = alpha[:, :, None] / 255
    expected = drawn() * share + 255 * (1 - share)
    found = colours(decoder.decode(saved(Image.fromarray(rgba), "PNG")))
    assert np.abs(found - expected).max() <= 1
    grey = np.dstack([drawn()[:, :, 0], alpha])
    found = colours(decoder.decode(saved(Image.fromarray(grey, "LA"), "PNG")))
    assert np.abs(found - (grey[:, :, :1] * share + 255 * (1 - share))).max() <= 1


def test_a_transparent_colour_of_a_palette_is_white(decoder: PictureDecoder) -> None:
    image = Image.new("P", (4, 2))
    image.putpalette([*RED, *GREEN])
    image.putdata([0, 1, 0, 1, 1, 0, 1, 0])
    for form in ("GIF", "PNG"):
        found = colours(decoder.decode(saved(image, form, transparency=1)))
        assert found.tolist() == [[list(RED), list(WHITE)] * 2, [list(WHITE), list(RED)] * 2]


def test_greys_of_16_bits_are_scaled_and_other_modes_converted(decoder: PictureDecoder) -> None:
    deep = np.array([[0, 257, 32768, 65535]], np.uint16)
    found = colours(decoder.decode(saved(Image.fromarray(deep), "PNG")))
    assert found.tolist() == [[[0] * 3, [1] * 3, [127] * 3, [255] * 3]]
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert colours(decoder.decode(saved(bits, "PNG"))).tolist() == [[[0] * 3, list(WHITE)]]
    inks = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.abs(colours(decoder.decode(saved(inks, "JPEG"))).astype(int) - RED).max() <= 4


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_several_pictures_the_first_is_shown(decoder: PictureDecoder, form: str) -> None:
    first, *others = (Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, WHITE))
    lossless = {"lossless": True} if form == "WEBP" else {}
    data = saved(first, form, save_all=True, append_images=others, **lossless)
    assert np.abs(colours(decoder.decode(data)).astype(int) - RED).max() <= 4


def test_the_process_knows_the_formats_only(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    with warnings.catch_warnings():
        decoding_sandbox.set_up()
    assert sorted(Image.OPEN) == sorted(FORMATS)


# --- what is refused --------------------------------------------------------------------------------------------------


def png(width: int, height: int, data: bytes = b"", *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    others = b"".join(chunk(*each) for each in chunks)
    return b"\x89PNG\r\n\x1a\n" + head + others + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;"


def test_a_picture_at_the_limit_is_decoded_and_one_beyond_it_is_not(decoder: PictureDecoder) -> None:
    side = int(MOST_PIXELS**0.5)
    rows = zlib.compress(bytes((3 * side + 1) * side), 1)
    whole = decoder.decode(png(side, side, rows))
    assert (whole.height, whole.width) == (side, side) and not any(whole.rgb[:: 1 << 16])
    for width, height in ((side, side + 400), (100_000, 100_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)):
        with pytest.raises(PictureRefused, match=r"pixels"):
            decoder.size(png(width, height, rows))
        with pytest.raises(PictureRefused, match=r"pixels"):
            decoder.decode(png(width, height, rows))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is no PNG, JPEG, WebP, GIF or BMP file"),
        (b"just text", "it is no PNG, JPEG, WebP, GIF or BMP file"),
        (b"%PDF-1.7\n", "it is no PNG, JPEG, WebP, GIF or BMP file"),
        (b"P6 2 2 255\n" + bytes(12), "it is no PNG, JPEG, WebP, GIF or BMP file"),
        (saved(Image.new("RGB", (4, 4)), "TIFF"), "it is no PNG, JPEG, WebP, GIF or BMP file"),
        (png(0, 5), "it "),
        (png(5, 5), "it is damaged"),
        (png(500, 500, zlib.compress(b"\0" * 100)), "it is damaged"),
        (saved(Image.fromarray(drawn()), "JPEG")[:-200], "it is damaged"),
        (gif(65535, 65535), "pixels"),
        (bytes(LARGEST_PICTURE + 1), "its file has 20 MB, and at most 20 MB are read"),
    ],
    ids=range(11),
)
def test_what_is_no_picture_is_a_sentence(decoder: PictureDecoder, data: bytes, reason: str) -> None:
    with pytest.raises(PictureRefused, match=reason) as refused:
        decoder.decode(data)
    assert refused.value.kind == "bad-input" and refused.value.reason in str(refused.value)
    assert str(refused.value).startswith("The picture cannot be read, because it")


def test_bombs_beside_the_colours_cost_nothing(decoder: PictureDecoder) -> None:
    much = zlib.compress(bytes(400 << 20), 9)
    colour = zlib.compress(b"\0" + bytes(RED))
    chunks = ((b"zTXt", b"a\0\0" + much), (b"iCCP", b"a\0\0" + much), (b"iTXt", b"a\0\1\0\0\0" + much))
    for chunk in chunks:
        try:
            assert decoder.decode(png(1, 1, colour, chunk)).rgb == bytes(RED)
        except PictureRefused as refused:
            assert "damaged" in refused.reason or "memory" in refused.reason


def test_what_takes_too_long_or_is_cancelled_is_given_up(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(Image.fromarray(drawn()), "PNG")
    with monkeypatch.context() as patch:
        patch.setattr("engine.system.confined.DEADLINE_S", -1.0)
        with pytest.raises(PictureRefused, match="it does not end within"):
            decoder.decode(data)
    with pytest.raises(Cancelled):
        decoder.decode(data, lambda: True)
    assert decoder.size(data) == PictureSize(WIDTH, HEIGHT)


SEEDS = [
    saved(Image.fromarray(drawn()), "PNG"),
    with_orientation(6, "JPEG"),
    saved(Image.fromarray(drawn()), "JPEG", progressive=True),
    saved(Image.fromarray(drawn()), "WEBP", lossless=True),
    with_orientation(8, "WEBP"),
    saved(Image.fromarray(drawn()).convert("P"), "GIF", save_all=True, append_images=[Image.new("P", (9, 9))]),
    saved(Image.fromarray(drawn()).convert("P"), "PNG", transparency=3),
    saved(Image.fromarray(drawn()), "BMP"),
    saved(Image.fromarray(drawn()), "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))]),
]


@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=6),
    end=st.floats(0, 1) | st.just(1.0),
)
@settings(max_examples=300, deadline=None)
def test_cut_and_changed_files_are_pictures_or_a_sentence(
    decoder: PictureDecoder, seed: bytes, changes: list[tuple[float, bytes]], end: float
) -> None:
    data = bytearray(seed[: round(end * len(seed))])
    for place, new in changes:
        at = round(place * len(data))
        data[at : at + len(new)] = new
    size = None
    try:
        size = decoder.size(bytes(data))
        picture = decoder.decode(bytes(data))
        assert (picture.width, picture.height) == (size.width, size.height)
    except ModelError as refused:
        assert size is None, "what has a size has colours"
        assert isinstance(refused, PictureRefused) and "\n" not in str(refused)
        assert "its process ended" not in refused.reason and "something else" not in refused.reason
