"""Positions of tokens after and in pictures are those of transformers' own model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.pictures.places import PicturePlace, seen_ends, spread_positions
from engine.pictures.sight import Grid

SIDES = st.tuples(st.integers(1, 5), st.integers(1, 5))


def laid_out(texts: list[int], sides: list[tuple[int, int]]) -> tuple[list[PicturePlace], list[int]]:
    """Places of pictures after texts of so many tokens, and for each token whether it is of a picture."""
    places, kinds = [], []
    for text, (rows, columns) in zip(texts, sides, strict=False):
        kinds += [0] * text
        places.append(PicturePlace(len(kinds), Grid(rows, columns, rows, columns)))
        kinds += [1] * (rows * columns)
    return places, [*kinds, 0, 0, 0]


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.lists(SIDES, max_size=3), st.data())
def test_positions_are_the_librarys(texts: list[int], sides: list[tuple[int, int]], data: Any) -> None:
    from types import SimpleNamespace

    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    places, kinds = laid_out(texts, sides)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **options: Qwen3_5Model.get_vision_position_ids(
        model, *args, **options
    )
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in sides]).reshape(-1, 3)
    expected, delta = Qwen3_5Model.get_rope_index(
        model, torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), grids if sides else None
    )
    np.testing.assert_array_equal(spread_positions(places, 0, len(kinds)), expected[:, 0])
    start = data.draw(st.integers(0, len(kinds) - 1))
    np.testing.assert_array_equal(spread_positions(places, start, len(kinds) - start), expected[:, 0, start:])
    np.testing.assert_array_equal(spread_positions(places, len(kinds) + 2, 1)[:, 0], len(kinds) + 2 + int(delta[0, 0]))


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.lists(SIDES, max_size=3), st.integers(0, 20))
def test_a_token_of_a_picture_sees_to_its_end(texts: list[int], sides: list[tuple[int, int]], start: int) -> None:
    places, kinds = laid_out(texts, sides)
    expected = [
        next((place.end for place in places if place.start <= token < place.end), token + 1)
        for token in range(start, len(kinds))
    ]
    if expected:
        assert seen_ends(places, start, len(kinds) - start).tolist() == expected
