"""The program that decodes pictures, in a separate process that may be killed at any moment.

A request is ``s`` for the size of the decoded picture, ``p`` for its colours, too, or ``t`` and a
:data:`~engine.pictures.decoding.PREVIEW`, and the bytes of its file. An answer is a
:class:`engine.pictures.decoding.Header` as a line of JSON, and the red, green and blue of each pixel.
"""

from __future__ import annotations

import codecs
import io
import warnings

import msgspec
from PIL import (
    Image,
    ImageFile,
    JpegImagePlugin,
    MpoImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from engine.pictures.decoding import (
    FORMATS,
    LARGEST_PREVIEW,
    MEMORY_BYTES,
    MOST_COLOURS,
    NAMED_FORMATS,
    PREVIEW,
    Header,
)
from engine.pictures.picture import MOST_PIXELS
from engine.system.confined import answer_requests, too_much_memory

_ORIENTATION = 0x0112
"""EXIF's tag for how a picture is to be turned."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What puts a picture upright, by its orientation."""
_LYING = (5, 6, 7, 8)
"""Orientations in which width and height change places."""


def set_up() -> None:
    """Import all that the decoders need, and keep only those of :data:`FORMATS`."""
    Image.preinit()
    # JPEGs of telephones hold several pictures (MPO), and EXIF is in the form of TIFF. Both are imported late.
    assert JpegImagePlugin and MpoImagePlugin and TiffImagePlugin and WebPImagePlugin
    for name in set(Image.OPEN) - set(FORMATS):
        del Image.OPEN[name]
    for encoding in ("ascii", "latin-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be"):
        codecs.lookup(encoding)
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    # A frame that is larger than the limit is a warning below twice as much.
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def answer(request: bytes) -> bytes:
    """The answer to one request. Nothing is raised."""
    try:
        if request[:1] == b"t":
            start = 1 + PREVIEW.size
            return _answer(request[start:], with_colours=True, preview=PREVIEW.unpack(request[1:start]))
        return _answer(request[1:], with_colours=request[:1] == b"p")
    except MemoryError:
        problem = too_much_memory(MEMORY_BYTES)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        problem = f"it has more than {MOST_PIXELS:,} pixels"
    except UnidentifiedImageError:
        problem = f"it is no {NAMED_FORMATS} file that can be read"
    except Exception as error:  # decoders raise anything
        problem = f"it is damaged ({' '.join(str(error).split())[:100] or type(error).__name__})"
    return _head(Header(problem=problem))


def _answer(data: bytes, with_colours: bool, preview: tuple[int, int, int] | None = None) -> bytes:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if not 0 < width * height <= MOST_PIXELS:
            return _head(Header(problem=f"it has {width:,} x {height:,} pixels, and 1 to {MOST_PIXELS:,} are possible"))
        orientation = _orientation(image)
        if orientation in _LYING:
            width, height = height, width
        head = _head(Header(width, height))
        if not with_colours:
            image.load()
            return head
        if preview is not None:
            # The decoder of JPEGs can leave out what the preview does not show.
            side = 2 * max(preview[:2])
            image.draft(None, (side, side))
        coloured = _on_white(image)
    if orientation in _TURNS:
        coloured = coloured.transpose(_TURNS[orientation])
    if preview is None:
        return head + coloured.tobytes()
    width, height = (min(max(1, pixels), LARGEST_PREVIEW) for pixels in preview[:2])
    scaled = coloured.resize((width, height), reducing_gap=2.0)
    if preview[2]:
        scaled = scaled.quantize(min(preview[2], MOST_COLOURS)).convert("RGB")
    return _head(Header(width, height)) + scaled.tobytes()


def _orientation(image: Image.Image) -> int:
    """How the picture is to be turned, 1 to 8; 1 if it does not say."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF costs no more than the turn
        return 1
    return found if isinstance(found, int) else 1


def _on_white(image: Image.Image) -> Image.Image:
    """The colours of ``image`` in red, green and blue."""
    if image.mode.startswith("I;16") or image.mode == "I":
        # Greys of 16 bits, which Pillow would cut at 255.
        image = image.convert("I").point(lambda grey: grey / 257).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def _head(header: Header) -> bytes:
    return msgspec.json.encode(header) + b"\n"


if __name__ == "__main__":
    set_up()
    answer_requests(answer, opens_files=False)
