"""Decoding of pictures in a separate process that may open no file and no socket.

Decoders are old C code, and a picture may come from anywhere. What comes back is a size and colours, whatever happened
in there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from engine.errors import ModelError, shown
from engine.ipc.messages import LARGEST_PICTURE
from engine.pictures.picture import Picture
from engine.planning.units import byte_size
from engine.system.confined import ConfinedProcess, GaveUp, StopCheck

CPU_S = 15.0
"""Maximum seconds of CPU time for a picture."""
MEMORY_BYTES = 1 << 30
"""Maximum bytes that decoding may add to the process."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of pictures, by Pillow's names."""
NAMED_FORMATS = "PNG, JPEG, WebP, GIF or BMP"

LARGEST_PREVIEW = 4096
"""Maximum pixels of a preview's side."""
MOST_COLOURS = 256
"""Maximum colours of a preview whose colours are limited."""
PREVIEW = struct.Struct(">HHH")
"""Width, height and colours of a preview in a request; 0 colours: all."""


class Header(msgspec.Struct, frozen=True):
    """What the process says before the colours, as one line of JSON."""

    width: int = 0
    height: int = 0
    problem: str = ""
    """Why there is no picture; empty if there is one."""


class PictureRefused(ModelError):
    """A picture cannot be shown to a model. ``reason``: why, with *it* for the picture's file."""

    def __init__(self, reason: str) -> None:
        self.reason = shown(reason, 200)
        super().__init__(
            f"The picture cannot be read, because {self.reason}: leave it out, or save it anew.", "bad-input"
        )


@dataclass(frozen=True)
class PictureSize:
    """Pixels of a picture that stands upright."""

    width: int
    height: int


class PictureDecoder:
    """A process that decodes pictures. It is started at once, and ends with this object, and with this process.

    The formats are :data:`NAMED_FORMATS`. Pictures are turned as their EXIF orientation says, stand on white where they
    are transparent, and are the first one where there are several. From any thread, one picture at a time.
    """

    def __init__(self) -> None:
        self._process = ConfinedProcess("engine.pictures.decoding_sandbox", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)

    def close(self) -> None:
        self._process.close()

    @property
    def pid(self) -> int:
        """Id of the process. It is another one after a picture that ended it."""
        return self._process.process.pid

    def size(self, data: bytes, should_stop: StopCheck = lambda: False) -> PictureSize:
        """The size of the picture in the file ``data``, which is decoded, so that a damaged one is refused here.

        Raises PictureRefused (bad-input); Cancelled as soon as ``should_stop()``.
        """
        header, _ = self._ask(b"s", data, should_stop)
        return PictureSize(header.width, header.height)

    def decode(self, data: bytes, should_stop: StopCheck = lambda: False) -> Picture:
        """The picture in the file ``data``. Raises as :meth:`size`."""
        return _picture(*self._ask(b"p", data, should_stop))

    def preview(self, data: bytes, width: int, height: int, colours: int = 0) -> Picture:
        """The picture in the file ``data``, scaled to ``width`` x ``height`` pixels, each at most
        :data:`LARGEST_PREVIEW`.

        ``colours``: how many different ones it has at most, up to :data:`MOST_COLOURS`; 0: any number. Raises
        PictureRefused (bad-input).
        """
        return _picture(*self._ask(b"t" + PREVIEW.pack(width, height, colours), data, lambda: False))

    def _ask(self, what: bytes, data: bytes, should_stop: StopCheck) -> tuple[Header, bytes]:
        if len(data) > LARGEST_PICTURE:
            raise PictureRefused(
                f"its file has {byte_size(len(data))}, and at most {byte_size(LARGEST_PICTURE)} are read"
            )
        try:
            answer = self._process.ask(what + data, should_stop)
            end = answer.index(b"\n")
            header = msgspec.json.decode(answer[:end], type=Header)
        except GaveUp as gave_up:
            raise PictureRefused(str(gave_up)) from gave_up
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise PictureRefused("its decoder gave something else") from error
        if header.problem:
            raise PictureRefused(header.problem)
        return header, bytes(memoryview(answer)[end + 1 :])


def _picture(header: Header, colours: bytes) -> Picture:
    try:
        return Picture(header.height, header.width, colours)
    except ValueError as error:
        raise PictureRefused("its decoder gave something else") from error
