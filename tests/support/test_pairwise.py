"""Pairwise matrices: every pair is there, in few rows; and rows in which every value is."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairwise import in_turn, pairwise


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_pair_of_values_occurs(sizes: list[int]) -> None:
    rows = pairwise(*[range(size) for size in sizes])
    for one, other in combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(range(sizes[one]), range(sizes[other])))
    assert all(len(row) == len(sizes) for row in rows) and len(set(rows)) == len(rows)


def test_there_are_far_fewer_rows_than_in_the_full_product() -> None:
    assert len(pairwise(range(5), range(4), range(3), range(2))) <= 22
    assert pairwise("ab", "cd", "ef") == pairwise("ab", "cd", "ef")
    assert pairwise("ab", [1]) == [("a", 1), ("b", 1)]


def test_without_a_value_of_one_there_are_no_rows() -> None:
    assert pairwise("ab", "", "cd") == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_every_value_occurs_in_as_few_rows_as_can_be(sizes: list[int]) -> None:
    rows = in_turn(*[range(size) for size in sizes])
    assert len(rows) == max(sizes)
    assert [set(column) for column in zip(*rows, strict=True)] == [set(range(size)) for size in sizes]


def test_values_meet_others_in_the_next_round() -> None:
    rows = in_turn(range(6), "abc", "pqr")
    assert rows[:3] == [(0, "a", "p"), (1, "b", "q"), (2, "c", "r")]
    assert rows[3:] == [(3, "b", "r"), (4, "c", "p"), (5, "a", "q")]
