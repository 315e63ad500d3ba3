"""The chunks in which a prompt is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def chunks(begin: int, end: int, most: int, whole: Sequence[tuple[int, int]] = (), stop: int = 0) -> Iterator[int]:
    """Sizes of the chunks of the tokens from ``begin`` to ``end``, of at most ``most`` tokens.

    ``whole``: beginnings and ends of tokens that have to be in one chunk, which may be longer; neither ``begin`` nor
    ``end`` is between them. A chunk ends at ``stop``, if that is not between them either.
    """
    while begin < end:
        last = min(begin + most, end)
        if begin < stop < last:
            last = stop
        cut = next(((first, behind) for first, behind in whole if first < last < behind), None)
        if cut is not None:
            last = cut[0] if cut[0] > begin else cut[1]
        yield last - begin
        begin = last
