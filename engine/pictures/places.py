"""Places of pictures among the tokens of a row, and the positions that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.pictures.sight import Grid

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class PicturePlace:
    """A picture whose first token is number ``start`` of a row. The row may end within it."""

    start: int
    grid: Grid

    @property
    def end(self) -> int:
        return self.start + self.grid.tokens

    @property
    def saved(self) -> int:
        """Positions by which the picture is shorter than its tokens: it takes as many as its longer side has."""
        return self.grid.tokens - max(self.grid.rows, self.grid.columns)


def spread_positions(places: Sequence[PicturePlace], start: int, count: int) -> Positions:
    """Positions [3, count] of the tokens from ``start`` on: in time, from above, and from the left (mrope).

    All three are alike for text. Tokens of a picture have one time, and their row and column after it.
    """
    tokens = np.arange(start, start + count, dtype=np.int64)
    positions = np.repeat(tokens[None], 3, axis=0)
    saved = 0
    for place in places:
        within = (tokens >= place.start) & (tokens < place.end)
        index = tokens[within] - place.start
        first = place.start - saved
        positions[:, within] = first
        positions[1, within] += index // place.grid.columns
        positions[2, within] += index % place.grid.columns
        saved += place.saved
        positions[:, tokens >= place.end] = tokens[tokens >= place.end] - saved
    return positions


def axis_of_pairs(sections: tuple[int, int, int], pairs: int) -> Positions:
    """Which of the three positions turns each of a head's ``pairs`` of numbers: they take turns, as many of each as
    ``sections`` says, and time has the rest."""
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def seen_ends(places: Sequence[PicturePlace], start: int, count: int) -> Positions:
    """For each of the tokens from ``start`` on, the place before which it sees, [count]: the end of its picture, or its
    own if it is text."""
    ends = np.arange(start + 1, start + count + 1, dtype=np.int64)
    for place in places:
        ends[max(place.start - start, 0) : max(place.end - start, 0)] = place.end
    return ends
