from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from engine.runtimes.protocol import TokenRows
from engine.session.kept_rows import MOST_KEPT, CachedRow, best_row, spread, to_keep
from engine.session.origins import Origins


class Rows(TokenRows):
    """Rows of which only is known how far they can be cut back."""

    rows, length = 1, 0
    can_truncate = True
    shortest_cut = 0

    def __init__(self, can_truncate: bool, shortest_cut: int, length: int = 0) -> None:
        self.can_truncate = can_truncate
        self.shortest_cut = shortest_cut
        self.length = length

    def extend(self, tokens, want_logits=True):
        raise AssertionError

    step = truncate = fan_out = reorder = extend


TOKENS = st.lists(st.integers(0, 1), max_size=9)


@st.composite
def cached(draw: st.DrawFn) -> CachedRow:
    tokens = draw(TOKENS)
    origins = Origins()
    while origins.length < len(tokens):
        rest = len(tokens) - origins.length
        count = draw(st.integers(1, rest))
        origins = origins.read(count) if draw(st.booleans()) else origins.written(count)
    known = draw(st.sampled_from([None, len(tokens)]))
    can_truncate = draw(st.booleans())
    rows = Rows(can_truncate, draw(st.integers(0, len(tokens))) if can_truncate else len(tokens))
    lengths = st.lists(st.integers(0, len(tokens)), max_size=3, unique=True).map(sorted)
    saved = () if rows.can_truncate else tuple(Rows(False, length, length) for length in draw(lengths))
    return CachedRow(rows, tokens, origins, None if known is None else (known, None), saved)  # type: ignore[arg-type]


def by_hand(row: CachedRow, prompt: list[int], wanted: Origins | None) -> int:
    """The longest beginning of ``prompt`` that the row holds, with the wanted origins, to which it can be cut."""

    def fits(length: int, tokens: list[int], origins: Origins) -> bool:
        same = tokens[:length] == prompt[:length] and length <= min(len(tokens), len(prompt))
        made = wanted is None or (length <= wanted.length and origins.cut(length) == wanted.cut(length))
        return same and made

    at = [n for n in range(len(row.tokens) + 1) if fits(n, row.tokens, row.origins)]
    at = [n for n in at if n < len(prompt) or row.knows(n)]
    assert row.rows is not None
    if at[-1] >= row.rows.shortest_cut:
        return at[-1]
    saved = {each.length for each in row.checkpoints}
    return max((length for length in at if length in saved), default=0)


@given(st.lists(cached(), min_size=1, max_size=5), TOKENS.filter(bool), st.booleans(), st.data())
def test_the_row_with_most_to_reuse_is_taken(
    rows: list[CachedRow], prompt: list[int], repeated: bool, data: st.DataObject
) -> None:
    wanted = None
    if repeated:
        model = data.draw(cached().filter(lambda row: len(row.tokens) > 0))
        wanted = model.origins
        prompt = data.draw(st.sampled_from(rows)).tokens[: wanted.length]
        prompt += [1] * (wanted.length - len(prompt))
    row, reusable = best_row(rows, prompt, wanted)
    expected = [by_hand(each, prompt, wanted) for each in rows]
    assert reusable == max(expected)
    assert row is rows[expected.index(reusable)]


def test_nothing_is_reused_of_an_empty_row() -> None:
    assert CachedRow().reusable([1, 2], None) == 0


@given(st.lists(st.integers(1, 30), max_size=8, unique=True).map(sorted), st.integers(1, 8))
def test_checkpoints_that_stay_lie_far_apart_and_the_last_is_among_them(lengths: list[int], most: int) -> None:
    kept = spread(lengths, most)
    assert kept == sorted(set(kept)) and len(kept) == min(len(lengths), most)
    assert not lengths or kept[-1] == len(lengths) - 1
    if len(lengths) == most + 1:
        # What is read again at most, behind the checkpoint that went, is as little as it can be.
        def widest(left: list[int]) -> int:
            (gone,) = set(range(len(lengths))).difference(left)
            return lengths[gone + 1] - (lengths[gone - 1] if gone else 0)

        others = [[index for index in range(len(lengths)) if index != gone] for gone in range(len(lengths) - 1)]
        assert widest(kept) == min(map(widest, others))


@given(st.lists(st.integers(0, 12), max_size=7), st.integers(0, 30))
def test_what_is_kept_fits_and_the_latest_go_first(sizes: list[int], budget: int) -> None:
    possible = [
        list(chosen)
        for count in range(len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
        if sum(sizes[index] for index in chosen) <= budget
    ]
    assert to_keep(sizes, budget) == max(possible, key=lambda chosen: [index in chosen for index in range(len(sizes))])


def test_there_is_a_most() -> None:
    assert to_keep([0] * 99, 0) == list(range(MOST_KEPT))
