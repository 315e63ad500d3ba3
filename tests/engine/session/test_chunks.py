"""Chunks of a prompt whose pictures must not be cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.session.chunks import chunks

PARTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=4)


@given(st.integers(1, 12), PARTS, st.integers(0, 9), st.integers(0, 150))
def test_chunks_cut_no_picture(most: int, parts: list[tuple[int, int]], last: int, stop: int) -> None:
    whole, length = [], 0
    for text, tokens in parts:
        whole.append((length + text, length + text + tokens))
        length += text + tokens
    length += last
    sizes = list(chunks(0, length, most, whole, stop))
    assert sum(sizes) == length and all(size > 0 for size in sizes)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    for end, size in zip(ends, sizes, strict=True):
        assert size <= most or (end - size, end) in whole
        assert not any(first < end < behind for first, behind in whole)
    if 0 < stop < length and not any(first < stop < behind for first, behind in whole):
        assert stop in ends


@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 50))
def test_without_pictures_chunks_are_even(most: int, first: int, more: int) -> None:
    sizes = [most] * (more // most) + [more % most]
    assert list(chunks(first, first + more, most)) == [size for size in sizes if size]
