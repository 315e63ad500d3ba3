"""Few rows of parameters in place of their full product: every two values of two parameters meet at least once, or
every value occurs at least once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each of ``parameters``, in which all pairs of values of different parameters occur.

    The rows are always the same ones: each is the first of the full product that covers the most pairs still missing.
    With one or two parameters, or without any value of one, that is the full product.
    """
    columns = [range(len(values)) for values in parameters]
    if len(columns) <= 2 or not all(columns):
        return list(product(*parameters))
    missing = {
        (one, first, other, second)
        for one, other in combinations(range(len(columns)), 2)
        for first, second in product(columns[one], columns[other])
    }
    covered = {row: pairs_of(row) for row in product(*columns)}
    rows: list[tuple[Any, ...]] = []
    while missing:
        best = max(covered, key=lambda row: len(missing & covered[row]))
        missing -= covered[best]
        rows.append(tuple(values[place] for values, place in zip(parameters, best, strict=True)))
    return rows


def in_turn(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every value of ``parameters`` occurs, as many as the longest of them has values.

    The others' values come round and round: the second one's begin one later in each round, the third one's two later.
    """

    def at(number: int, place: int, values: Sequence[Any]) -> Any:
        return values[(number + place * (number // len(values))) % len(values)]

    longest = max(map(len, parameters))
    return [tuple(at(number, *column) for column in enumerate(parameters)) for number in range(longest)]


def pairs_of(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(one, row[one], other, row[other]) for one, other in combinations(range(len(row)), 2)}
