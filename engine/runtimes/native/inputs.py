"""What a pass of the native trunk reads of its tokens: ids, angles of their positions, rows of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.pictures.places import Positions, axis_of_pairs
from engine.pictures.shown import PicturePass, Rows, ShownPictures
from engine.runtimes.native.rotary import Rotary
from engine.runtimes.native.shape import Shape

PIECE = 512
"""Maximum positions of one pass. A longer prefill runs in pieces, so that its buffers stay small."""

_ANGLES = 512
"""Number of positions whose cosines and sines are computed together."""


class Angles:
    """Cosines and sines of all positions needed so far, [positions, width / 2], float32."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        half = len(rotary.inverse_frequencies)
        self.cosine: NDArray[np.float32] = np.empty((0, half), np.float32)
        self.sine: NDArray[np.float32] = np.empty((0, half), np.float32)

    def need(self, positions: int) -> None:
        have = len(self.cosine)
        if positions <= have:
            return
        wanted = max(-(-positions // _ANGLES) * _ANGLES, have + have // 4)
        angles = np.arange(have, wanted, dtype=np.float32)[:, None] * self._rotary.inverse_frequencies[None]
        factor = np.float32(self._rotary.factor)
        # Computed in float64 and rounded, as numpy's float32 routines differ by CPU, and nodes of a ring must not.
        exact = angles.astype(np.float64)
        self.cosine = np.concatenate([self.cosine, np.cos(exact).astype(np.float32) * factor])
        self.sine = np.concatenate([self.sine, np.sin(exact).astype(np.float32) * factor])

    def of_text(self, start: int, count: int) -> tuple[Rows, Rows]:
        """Cosines and sines [count, width / 2] of the positions from ``start`` on."""
        self.need(start + count)
        return self.cosine[start : start + count], self.sine[start : start + count]

    def of_spread(self, positions: Positions, sections: tuple[int, int, int]) -> tuple[Rows, Rows]:
        """Cosines and sines [count, width / 2] of ``positions`` [3, count], of which each turns some of the values."""
        first, count = int(positions[0, 0]), positions.shape[1]
        if (positions == np.arange(first, first + count)).all():
            return self.of_text(first, count)
        self.need(int(positions.max()) + 1)
        pairs = np.arange(self.cosine.shape[1])
        places = np.ascontiguousarray(positions[axis_of_pairs(sections, len(pairs))].T)
        return self.cosine[places, pairs], self.sine[places, pairs]


def query_scales(shape: Shape, start: int, count: int) -> NDArray[np.float32] | None:
    """Further factors [count] of the queries of positions from ``start`` on; None if there are none."""
    growth = shape.query_growth
    if growth is None:
        return None
    positions = np.arange(start, start + count, dtype=np.float64) + growth.ahead
    return np.asarray(1 + growth.by * np.log(1 + np.floor(positions / growth.step)), np.float32)


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a pass, in arrays that C reads: they are contiguous."""

    ids: NDArray[np.int32]
    """[rows, tokens]; -1 - i for row i of ``given``."""
    cosine: tuple[Rows, ...]
    """For each kind of heads, [tokens, width / 2]."""
    sine: tuple[Rows, ...]
    given: Rows | None = None
    """[.., (1 + given_layers) * hidden]; None without tokens of pictures."""
    ends: Positions | None = None
    """The position before which each token sees where that is not its own, [tokens]; None: it is."""
    ends_in_full: bool = False
    """Whether ``ends`` hold in layers without a window, too."""
    given_id: int = 0
    """Id of the token whose own embeddings given rows have."""
    given_layers: int = 0
    """First layers behind which parts of given rows are added."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        start: int,
        angles: Sequence[Angles],
        pictures: PicturePass | None,
        shown: ShownPictures | None,
    ) -> PassInputs:
        """The inputs of ``tokens`` [rows][tokens] at positions from ``start`` on. ``pictures``: what those that were
        ``shown`` change."""
        spread = None if pictures is None else pictures.positions
        if pictures is None or shown is None or spread is None:
            turned = [each.of_text(start, len(tokens[0])) for each in angles]
        else:
            turned = [each.of_spread(spread, shown.sight.sections) for each in angles]
        plain = cls(
            np.array(tokens, dtype=np.int32), tuple(each[0] for each in turned), tuple(each[1] for each in turned)
        )
        if pictures is None or shown is None or not len(pictures.given):
            return plain
        ids = np.array([pictures.ids], dtype=np.int32)
        sight = shown.sight
        return replace(
            plain,
            ids=ids,
            given=pictures.given,
            ends=pictures.ends,
            ends_in_full=sight.together_in_full,
            given_id=sight.given,
            given_layers=sight.deep,
        )

    @classmethod
    def joined(cls, inputs: Sequence[PassInputs]) -> PassInputs:
        """The inputs of a step of several caches, with the angles of each one's position; those of one as they are."""
        if len(inputs) == 1:
            return inputs[0]
        kinds = range(len(inputs[0].cosine))
        return cls(
            np.concatenate([each.ids for each in inputs]),
            tuple(np.concatenate([each.cosine[kind] for each in inputs]) for kind in kinds),
            tuple(np.concatenate([each.sine[kind] for each in inputs]) for kind in kinds),
        )

    def part(self, first: int, end: int) -> PassInputs:
        """The inputs of some of the tokens."""
        if (first, end) == (0, self.ids.shape[1]):
            return self
        return replace(
            self,
            ids=np.ascontiguousarray(self.ids[:, first:end]),
            cosine=tuple(each[first:end] for each in self.cosine),
            sine=tuple(each[first:end] for each in self.sine),
            ends=None if self.ends is None else self.ends[first:end],
        )


def pieces(start: int, count: int, ends: Positions | None) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the pieces in which ``count`` tokens from position ``start`` on are run: of :data:`PIECE`
    tokens at most, unless one sees more of what comes after it, by ``ends``."""
    first = 0
    while first < count:
        end = min(first + PIECE, count)
        if ends is not None and ends[end - 1] > start + end:
            seen = int(ends[end - 1])
            begun = int(np.argmax(ends[first:end] == seen))
            end = first + begun if begun else seen - start
        yield first, end
        first = end
