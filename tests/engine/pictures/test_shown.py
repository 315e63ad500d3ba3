"""Ids of a picture's tokens depend on what it shows, and a pass gets its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import ModelError
from engine.pictures.picture import Picture
from engine.pictures.shown import KEPT_BYTES, ShownPictures
from engine.pictures.sight import Sight
from tests.support.tiny_seeing import random_picture

SPREAD = Sight("qwen3_5", 9, 4, 2, most=16, least=1, spread=True)
TOGETHER = replace(SPREAD, spread=False, together=True)
WIDE, TALL = random_picture(8, 24), random_picture(24, 16)
"""Pictures of 1 x 3 and 3 x 2 tokens."""


def shown(sight: Sight, *pictures: Picture) -> ShownPictures:
    found = ShownPictures(sight, 4)
    for number, picture in enumerate(pictures):
        tokens = sum(token < 0 for token in found.show(picture))
        found.put(picture.digest, np.arange(4 * tokens, dtype=np.float32).reshape(-1, 4) + 1000 * number)
    return found


def test_ids_depend_on_what_is_shown() -> None:
    pictures = shown(SPREAD)
    wide, tall = pictures.show(WIDE), pictures.show(TALL)
    assert (len(wide), len(tall)) == (3, 6)
    assert not {*wide} & {*tall} and all(token < 0 for token in wide + tall)
    assert pictures.show(Picture(WIDE.height, WIDE.width, bytes(WIDE.rgb))) == wide
    assert pictures.show(random_picture(8, 24, seed=1))[0] not in {*wide, *tall}
    assert pictures.ids_of(TALL.digest) == tall
    with pytest.raises(ModelError, match="times as long"):
        pictures.show(Picture(1, 300, bytes(900)))


def test_rows_of_deepstack_are_wider() -> None:
    pictures = ShownPictures(replace(SPREAD, deep=2), 4)
    tokens = pictures.show(WIDE)
    with pytest.raises(ValueError, match="rows of the shape"):
        pictures.put(WIDE.digest, np.zeros((3, 4), np.float32))
    rows = np.arange(36, dtype=np.float32).reshape(3, 12)
    pictures.put(WIDE.digest, rows)
    found = pictures.pass_over((), [5, *tokens], 0)
    assert found is not None and (found.given == rows).all()
    after = pictures.pass_over(pictures.places([5, *tokens], 0), [7], 4)
    assert after is not None and after.given.shape == (0, 12)


def test_text_stands_between_the_rows_of_a_picture() -> None:
    pictures = shown(replace(SPREAD, family="mistral3", spread=False, between=(90,)), TALL, WIDE)
    tall, wide = pictures.show(TALL), pictures.show(WIDE)
    assert [token < 0 for token in tall] == [True, True, False, True, True, False, True, True]
    assert (tall[2], tall[5], len({*tall}), len(wide)) == (90, 90, 7, 3)
    tokens = [5, *tall, 6, *wide]
    found = pictures.pass_over((), tokens, 0)
    assert found is not None and found.positions is None and found.ends is None
    assert found.ids == [5, -1, -2, 90, -3, -4, 90, -5, -6, 6, -7, -8, -9]
    # In parts, of which one begins with that text.
    for cut in range(1, len(tokens)):
        places = pictures.places(tokens[:cut], 0)
        parts = [pictures.pass_over((), tokens[:cut], 0), pictures.pass_over(places, tokens[cut:], cut)]
        given = [part.given for part in parts if part is not None]
        np.testing.assert_array_equal(np.concatenate(given), found.given)
        assert {place.start for place in [*places, *pictures.places(tokens[cut:], cut)]} <= {1, 10}


def test_a_pass_gets_rows_and_positions() -> None:
    pictures = shown(SPREAD, WIDE, TALL)
    wide, tall = pictures.show(WIDE), pictures.show(TALL)
    found = pictures.pass_over((), [5, *wide, 6, *tall], 0)
    assert found is not None and found.ends is None and found.positions is not None
    assert found.ids == [5, -1, -2, -3, 6, -4, -5, -6, -7, -8, -9]
    assert found.given[:, 0].tolist() == [0, 4, 8, 1000, 1004, 1008, 1012, 1016, 1020]
    assert found.positions[0].tolist() == [0, 1, 1, 1, 4, 5, 5, 5, 5, 5, 5]
    # In parts, also within a picture.
    first, places = pictures.pass_over((), [5, *wide[:2]], 0), pictures.places([5, *wide[:2]], 0)
    second = pictures.pass_over(places, [wide[2], 6, *tall], 3)
    assert first is not None and second is not None and first.positions is not None and second.positions is not None
    np.testing.assert_array_equal(np.concatenate([first.positions, second.positions], axis=1), found.positions)
    np.testing.assert_array_equal(np.concatenate([first.given, second.given]), found.given)
    after = pictures.pass_over(pictures.places([5, *wide, 6, *tall], 0), [7], 11)
    assert after is not None and after.positions is not None and after.positions.tolist() == [[8], [8], [8]]
    assert pictures.pass_over((), [5, 6], 0) is None


def test_what_sees_itself_is_in_one_pass() -> None:
    pictures = shown(TOGETHER, WIDE)
    wide = pictures.show(WIDE)
    assert pictures.whole([5, *wide, 6, *wide]) == [(1, 4), (5, 8)]
    found = pictures.pass_over((), [5, *wide, 6], 0)
    assert found is not None and found.positions is None and found.ends is not None
    assert found.ends.tolist() == [1, 4, 4, 4, 5]
    assert pictures.pass_over(pictures.places([5, *wide], 0), [6], 4) is None
    with pytest.raises(ValueError, match="several passes"):
        pictures.pass_over((), [5, *wide[:2]], 0)
    with pytest.raises(ValueError, match="several passes"):
        pictures.pass_over(pictures.places([5, *wide[:2]], 0), [wide[2], 6], 3)


def test_rows_are_kept_while_there_is_room() -> None:
    pictures = shown(SPREAD, WIDE)
    pictures.show(TALL)
    assert pictures.lacks(TALL.digest) and not pictures.lacks(WIDE.digest)
    with pytest.raises(ValueError, match="not looked at"):
        pictures.pass_over((), pictures.show(TALL), 0)
    with pytest.raises(ValueError, match="shape"):
        pictures.put(TALL.digest, np.zeros((5, 4), np.float32))
    big = ShownPictures(SPREAD, KEPT_BYTES // 4 // 6)
    for picture in (WIDE, TALL):
        big.put(picture.digest, np.zeros((len(big.show(picture)), KEPT_BYTES // 4 // 6), np.float32))
    big.forget_old()
    assert big.lacks(WIDE.digest) and not big.lacks(TALL.digest)
