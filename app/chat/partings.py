"""Where candidates that begin alike part, and the parts of each that show it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

_WORDS_BEFORE = 3
"""Number of words shown before a parting."""
_WORDS_AFTER = 4
"""Number of words shown after a parting, if another one follows far behind."""
_LONGEST_WORD = 24
"""Characters of a word that are shown at most before a parting; scripts without spaces have no words."""


@dataclass(frozen=True)
class Stretch:
    """The characters ``start`` to ``end`` of a candidate. ``partings``: places in it where candidates part."""

    start: int
    end: int
    partings: tuple[int, ...]


def partings(texts: Sequence[str]) -> list[tuple[int, ...]]:
    """For each text the places where others part from it, in order: the beginnings of the first words that differ.

    A text that is the beginning of another one parts at its end.
    """
    order = sorted(range(len(texts)), key=lambda index: texts[index])
    # In this order the common beginning of two texts is the shortest of those of the neighbours between them.
    shared = [_shared(texts[a], texts[b]) for a, b in itertools.pairwise(order)]
    found: list[tuple[int, ...]] = [()] * len(texts)
    for place, index in enumerate(order):
        lengths: set[int] = set()
        for neighbours in (shared[place:], shared[:place][::-1]):
            least: int | None = None
            for length in neighbours:
                least = length if least is None else min(least, length)
                lengths.add(least)
        found[index] = tuple(sorted({_word_start(texts[index], length) for length in lengths}))
    return found


def stretches(text: str, places: Sequence[int], room: int) -> list[Stretch]:
    """The parts of ``text`` that show its partings at ``places``, in about ``room`` characters.

    Everything from a few words before the first parting, if there is room. Otherwise the words around each parting; the
    first and the last ones are the most important. What follows the last parting may be longer than the room.
    """
    if not places:
        return [Stretch(0, len(text), ())]
    before, after = max(4, min(24, room // 8)), max(8, min(36, room // 4))
    if len(text) - _back(text, places[0], before) <= room:
        spans = [(_back(text, places[0], before), len(text))]
    else:
        spans = []
        for place in places:
            start, end = _back(text, place, before), _forth(text, place, after)
            if spans and start <= spans[-1][1] + 1:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((start, end))
        while len(spans) > 2 and sum(end - start for start, end in spans) > room:
            del spans[len(spans) // 2 - (len(spans) % 2 == 0)]
        spans[-1] = spans[-1][0], len(text)
    return [
        Stretch(start, end, tuple(place for place in places if start <= place <= end and _is_in(place, end, spans)))
        for start, end in spans
    ]


def _is_in(place: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """A place at the end of a span belongs to it only if the text ends there."""
    return place < end or end == spans[-1][1]


def _shared(one: str, other: str) -> int:
    """Number of characters at the beginning of both."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _word_start(text: str, place: int) -> int:
    """The beginning of the word in which ``place`` is; ``place`` itself if that is far."""
    if place >= len(text) or text[place : place + 1].isspace():
        return place
    start = max(text.rfind(" ", 0, place), text.rfind("\n", 0, place)) + 1
    return start if place - start <= _LONGEST_WORD else place


def _back(text: str, place: int, most: int) -> int:
    """The beginning of the few words before ``place``, at most ``most`` characters."""
    start = place
    for _ in range(_WORDS_BEFORE):
        found = text.rfind(" ", 0, max(0, start - 1)) + 1
        if place - found > most:
            break
        start = found
        if not found:
            break
    return start if start < place or not place else max(0, place - most)


def _forth(text: str, place: int, most: int) -> int:
    """The end of the few words after ``place``, at most ``most`` characters."""
    end = place
    for _ in range(_WORDS_AFTER):
        found = text.find(" ", end + 1)
        found = len(text) if found < 0 else found
        if found - place > most:
            break
        end = found
    return end if end > place else min(len(text), place + most)
