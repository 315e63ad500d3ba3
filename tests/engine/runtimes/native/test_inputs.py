"""Pieces of a prompt, and angles of positions, without a trunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pictures.places import PicturePlace, seen_ends, spread_positions
from engine.pictures.sight import Grid
from engine.runtimes.native import inputs
from engine.runtimes.native.inputs import Angles, pieces
from engine.runtimes.native.rotary import Rotary


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=4), st.integers(0, 50))
def test_pieces_cut_no_picture(parts: list[tuple[int, int]], start: int) -> None:
    places, count = [], 0
    for text, tokens in parts:
        places.append(PicturePlace(start + count + text, Grid(1, tokens, 1, tokens)))
        count += text + tokens
    count += 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "PIECE", 8)
        found = list(pieces(start, count, seen_ends(places, start, count)))
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == count
    borders = {start + first for first, _ in found}
    for place in places:
        assert not any(place.start < border < place.end for border in borders)
    whole = {(place.start - start, place.end - start) for place in places}
    assert all(end - first <= 8 or (first, end) in whole for first, end in found)


def test_without_pictures_pieces_are_even() -> None:
    assert list(pieces(7, 2 * inputs.PIECE + 3, None)) == [
        (0, inputs.PIECE),
        (inputs.PIECE, 2 * inputs.PIECE),
        (2 * inputs.PIECE, 2 * inputs.PIECE + 3),
    ]


def test_pairs_of_a_head_turn_by_three_positions() -> None:
    frequencies = np.array([1.0, 0.5, 0.25, 0.125, 0.1], np.float32)
    angles = Angles(Rotary(frequencies, 1.0))
    positions = spread_positions([PicturePlace(2, Grid(2, 3, 1, 1))], 0, 9)
    cosine, sine = angles.of_spread(positions, (3, 1, 1))
    turned = positions[[0, 1, 2, 0, 0]].T * frequencies
    np.testing.assert_allclose(cosine, np.cos(turned), atol=1e-6)
    np.testing.assert_allclose(sine, np.sin(turned), atol=1e-6)
    assert cosine.flags.c_contiguous and sine.flags.c_contiguous
    # Text after a picture is text at another place.
    after = spread_positions([PicturePlace(2, Grid(2, 3, 1, 1))], 8, 4)
    np.testing.assert_array_equal(angles.of_spread(after, (3, 1, 1))[0], angles.of_text(5, 4)[0])
