"""Passes over a prompt whose pictures must not be cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.session.passes import PassSequence


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=4), st.integers(0, 9))
def test_passes_cut_no_picture(chunk: int, parts: list[tuple[int, int]], last: int) -> None:
    whole, length = [], 0
    for text, tokens in parts:
        whole.append((length + text, length + text + tokens))
        length += text + tokens
    length += last
    found = PassSequence().up_to(length, chunk, whole)
    assert found.length == length and all(run > 0 for run in found.runs)
    end = 0
    for run in found.runs:
        assert run <= chunk or (end, end + run) in whole
        end += run
        assert not any(first < end < stop for first, stop in whole)


@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 50))
def test_without_pictures_passes_are_even(chunk: int, first: int, more: int) -> None:
    found = PassSequence().up_to(first, chunk).up_to(first + more, chunk)
    sizes = [chunk] * (first // chunk) + [first % chunk] + [chunk] * (more // chunk) + [more % chunk]
    assert list(found.runs) == [size for size in sizes if size]
