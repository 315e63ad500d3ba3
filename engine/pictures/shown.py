"""The pictures that a loaded model is shown, and the ids of their tokens.

A picture's tokens have ids of their own below zero, which depend on what it shows. Whatever compares tokens, such as
the prefix cache, therefore takes two pictures for the same only if they look the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.pictures.picture import Picture
from engine.pictures.places import PicturePlace, Positions, seen_ends, spread_positions
from engine.pictures.sight import Grid, Sight

Rows = NDArray[np.float32]

KEPT_BYTES = 256 * 1024 * 1024
"""Bytes of rows of earlier pictures that are kept, so that a question about them again does not need the tower."""
_MOST = 1 << 16
"""Tokens of a picture, at most, as ids are given."""
_MOST_PICTURES = (1 << 31) // _MOST - 1
"""Pictures with different ids."""


@dataclass(frozen=True)
class PicturePass:
    """What pictures change in a pass over some tokens of one row, or of rows that are alike."""

    given: Rows
    """Rows [tokens of pictures in the pass, (1 + sight.deep) * hidden], in order: what stands in place of their
    embeddings, then what is added to their hidden states behind each of the first ``sight.deep`` layers."""
    ids: list[int]
    """Ids of all tokens, with -1 - i for row i of ``given``."""
    positions: Positions | None
    """Positions [3, tokens] as of :func:`spread_positions`; None: those of text."""
    ends: Positions | None
    """What each token sees, as of :func:`seen_ends`; None: what text sees."""


class ShownPictures:
    """The pictures that a model with ``sight`` is shown. Not thread-safe."""

    def __init__(self, sight: Sight, hidden: int) -> None:
        self.sight = sight
        self._width = hidden * (1 + sight.deep)
        self._numbers: dict[bytes, int] = {}
        self._grids: list[Grid] = []
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    def show(self, picture: Picture) -> list[int]:
        """The ids of the picture's tokens, the same for the same picture.

        Raises ModelError (bad-input) if it is too long and narrow.
        """
        if picture.digest not in self._numbers:
            if len(self._grids) == _MOST_PICTURES:
                raise ModelError(f"More than {_MOST_PICTURES} pictures were shown; load the model again.", "bad-input")
            self._grids.append(self.sight.grid(picture.height, picture.width))
            self._numbers[picture.digest] = len(self._grids) - 1
        return self.ids_of(picture.digest)

    def ids_of(self, digest: bytes) -> list[int]:
        """The ids of the tokens of a picture that was shown, by its digest."""
        number = self._numbers[digest]
        grid, first = self._grids[number], -1 - number * _MOST
        rows = (range(first - row * grid.columns, first - (row + 1) * grid.columns, -1) for row in range(grid.rows))
        tokens = [token for row in rows for token in (*row, *self.sight.between)]
        return tokens[: grid.tokens]

    def whole(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Beginnings and ends in ``tokens`` of what has to be in one pass: pictures whose tokens see each other."""
        if not self.sight.together:
            return []
        return [(place.start, place.end) for place in self.places(tokens, 0)]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def lacks(self, digest: bytes) -> bool:
        """Whether the rows of a picture that was shown are not here."""
        return self._numbers[digest] not in self._rows

    def put(self, digest: bytes, rows: Rows) -> None:
        """Keep the tower's ``rows`` of a picture that was shown, each as wide as those of :class:`PicturePass`."""
        number = self._numbers[digest]
        if rows.shape != (self._grids[number].seen, self._width):
            raise ValueError(f"rows of the shape {rows.shape} for {self._grids[number]}")
        self._rows[number] = rows

    def forget_old(self) -> None:
        """Forget the rows of the oldest pictures, as far as they take more than :data:`KEPT_BYTES`."""
        while sum(rows.nbytes for rows in self._rows.values()) > KEPT_BYTES:
            self._rows.popitem(last=False)

    # --- passes -------------------------------------------------------------------------------------------------------

    def places(self, tokens: Sequence[int], start: int) -> list[PicturePlace]:
        """The pictures in ``tokens``, of which the first is number ``start`` of a row; it may be within a picture."""
        places: list[PicturePlace] = []
        index = 0
        while index < len(tokens):
            if tokens[index] >= 0:
                index += 1
                continue
            number, seen = divmod(-1 - tokens[index], _MOST)
            place = PicturePlace(start + index - self._grids[number].place(seen), self._grids[number])
            places.append(place)
            index = place.end - start
        return places

    def pass_over(self, before: Sequence[PicturePlace], tokens: Sequence[int], start: int) -> PicturePass | None:
        """What pictures change in a pass over ``tokens``, of which the first is number ``start`` of a row whose earlier
        tokens have pictures at the places ``before``; None if nothing.

        Raises ValueError if rows of a picture are not here, or a picture that has to be in one pass is not.
        """
        places = joined(before, self.places(tokens, start))
        if not places:
            return None
        end, spread = start + len(tokens), self.sight.spread
        new = [place for place in places if place.end > start]
        if self.sight.together and any(place.start < start or place.end > end for place in new):
            raise ValueError("a picture whose tokens see each other is in several passes")
        given, ids = [], []
        for token in tokens:
            if token < 0:
                number, within = divmod(-1 - token, _MOST)
                if number not in self._rows:
                    raise ValueError("a picture was not looked at before a pass over its tokens")
                given.append(self._rows[number][within])
            ids.append(-len(given) if token < 0 else token)
        if not given and not spread:
            return None
        return PicturePass(
            np.stack(given) if given else np.empty((0, self._width), np.float32),
            ids,
            spread_positions(places, start, len(tokens)) if spread else None,
            seen_ends(new, start, len(tokens)) if self.sight.together else None,
        )


def joined(before: Sequence[PicturePlace], new: Sequence[PicturePlace]) -> list[PicturePlace]:
    """Both, with a picture once that the earlier tokens end in."""
    return [*before, *(place for place in new if not before or place.start > before[-1].start)]
