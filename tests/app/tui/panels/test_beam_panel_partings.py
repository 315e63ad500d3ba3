"""Candidates of a beam search that begin alike are told apart at every width."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tui.panels.beam_panel import PARTING, Candidates, partings, stretches
from engine.ipc.messages import Beam
from tests.support.random_examples import examples

SAME = "The city that you ask about is, as most people would tell you at once, the city of "


def _rows(texts: list[str], width: int) -> list[str]:
    """The drawn text of each candidate, without its title."""
    panel = Candidates(lambda index: None)
    panel._beams = [Beam(text, [index], -float(index)) for index, text in enumerate(texts)]
    lines = panel.make(width).plain.split("\n")
    assert all(len(line) <= width for line in lines)
    found = [""] * len(texts)
    for line, owner in zip(lines, panel._rows, strict=True):
        if owner >= 0 and f"{owner + 1:>2} " not in line[:4]:
            found[owner] += " " + line.strip()
    return found


def test_where_candidates_part() -> None:
    texts = [SAME + "Paris, which lies", SAME + "Paris, in the north", SAME + "Lyon.", "A"]
    first, second = len(SAME), len(SAME + "Paris, ")
    assert partings(texts) == [(0, first, second), (0, first, second), (0, first), (0,)]
    assert partings(["only one"]) == [()] and partings([]) == []
    assert partings(["the end", "the end"]) == [(7,), (7,)]
    assert partings(["the end", "the ending"]) == [(7,), (4,)]


def test_what_fits_is_shown_whole_from_the_first_parting() -> None:
    text = SAME + "Paris, which lies on the Seine."
    (stretch,) = stretches(text, (len(SAME),), 100)
    assert text[stretch.start :] == "the city of Paris, which lies on the Seine." and stretch.partings == (len(SAME),)
    long = SAME + "Paris" + " and so on" * 40 + " until its end."
    found = stretches(long, (len(SAME), len(long) - 4), 100)
    assert [long[each.start : each.end] for each in found] == ["the city of Paris and so on", "until its end."]


@pytest.mark.parametrize("width", [32, 50, 76, 112])
def test_candidates_that_part_late_do_not_look_alike(width: int) -> None:
    middle = "with a great many words in between, " * 20
    texts = [
        SAME + "Paris " + middle + "and it is old.",
        SAME + "Paris " + middle + "and it is new.",
        SAME + "Lyon " + middle + "and it is new.",
        SAME + "Lyon " + middle + "and it is old.",
    ]
    rows = _rows(texts, width)
    assert len(set(rows)) == 4
    for row, city, age in zip(rows, ("Paris", "Paris", "Lyon", "Lyon"), ("old", "new", "new", "old"), strict=True):
        assert f"{PARTING}{city}" in row and f"{PARTING}{age}." in row and row.count(PARTING) == 2


_words = st.lists(st.sampled_from(["a", "the", "city", "of", "Paris", "Lyon,", "which", "is", "very"]), max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(_words, _words, st.sets(_words.map(" ".join), min_size=2, max_size=2), st.booleans(), st.integers(30, 120))
def test_two_candidates_never_look_alike(
    start: list[str], rest: list[str], ends: set[str], spaced: bool, width: int
) -> None:
    separator = " " if spaced else ""
    texts = [separator.join([*start, end, *rest]) for end in sorted(ends)]
    texts = [" ".join(text.split()) for text in texts]
    if texts[0] == texts[1]:
        return
    rows = _rows(texts, width)
    assert rows[0] != rows[1] and all(PARTING in row or row == " (empty)" for row in rows)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(_words.map(" ".join), min_size=1, max_size=6))
def test_partings_are_where_pairs_differ(texts: list[str]) -> None:
    places = partings(texts)
    for a, b in combinations(range(len(texts)), 2):
        if texts[a] == texts[b]:
            continue
        shared = next((i for i, (x, y) in enumerate(zip(texts[a], texts[b], strict=False)) if x != y), None)
        shared = min(len(texts[a]), len(texts[b])) if shared is None else shared
        for index in (a, b):
            assert any(place <= shared and " " not in texts[index][place:shared] for place in places[index])
