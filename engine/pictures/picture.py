"""A decoded picture."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

MOST_PIXELS = 64_000_000
"""Maximum pixels of a picture: 192 MB in memory, twice what cameras of telephones usually give."""


@dataclass(frozen=True)
class Picture:
    """A picture of ``height`` x ``width`` pixels. ``rgb``: their red, green and blue, a byte each, row by row from the
    top left corner.

    Raises ValueError if there are no pixels, more than :data:`MOST_PIXELS`, or another number of bytes.
    """

    height: int
    width: int
    rgb: bytes

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.height * self.width > MOST_PIXELS:
            raise ValueError(f"a picture of {self.height} x {self.width} pixels; 1 to {MOST_PIXELS} are possible")
        if len(self.rgb) != 3 * self.height * self.width:
            raise ValueError(f"{len(self.rgb)} bytes for {self.height} x {self.width} pixels")

    @cached_property
    def digest(self) -> bytes:
        """A fingerprint of all that can be seen."""
        return hashlib.sha256(b"%d %d " % (self.height, self.width) + self.rgb).digest()
