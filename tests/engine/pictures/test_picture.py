"""A decoded picture refuses what is none, and its digest tells pictures apart."""

from __future__ import annotations

import pytest

from engine.pictures.picture import MOST_PIXELS, Picture


@pytest.mark.parametrize(
    ("height", "width", "count"), [(0, 2, 0), (2, -1, 6), (2, 2, 11), (2, 2, 13), (MOST_PIXELS, 2, 6)]
)
def test_impossible_pictures_are_refused(height: int, width: int, count: int) -> None:
    with pytest.raises(ValueError):
        Picture(height, width, bytes(count))


def test_a_digest_depends_on_sides_and_colours() -> None:
    pictures = [Picture(2, 3, bytes(18)), Picture(3, 2, bytes(18)), Picture(2, 3, bytes(17) + b"\1")]
    assert len({picture.digest for picture in pictures}) == 3
    assert Picture(2, 3, bytes(18)).digest == pictures[0].digest
