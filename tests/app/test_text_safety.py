from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text_safety import Sanitizer, one_line, sanitize

# Texts in which escape sequences are likely, not one in a million.
_SPICY = st.text(
    alphabet=st.one_of(
        st.sampled_from("\x1b[]P^_X0;?m\x07\\\x9b\x9d\x90\x9c\x18\r\n\t\x7f\u202e\u2066\u2028 aé"),
        st.characters(),
    ),
    max_size=60,
)
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@given(_SPICY)
def test_nothing_that_acts_is_left(text: str) -> None:
    assert not _FORBIDDEN.search(sanitize(text))


@given(_SPICY)
def test_sanitising_twice_changes_nothing(text: str) -> None:
    assert sanitize(sanitize(text)) == sanitize(text)


@given(st.lists(_SPICY, max_size=6))
def test_pieces_give_what_the_whole_gives(pieces: list[str]) -> None:
    sanitizer = Sanitizer()
    assert "".join(sanitizer.feed(piece) for piece in pieces) == sanitize("".join(pieces))


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cf"]), max_size=80))
def test_plain_text_stays(text: str) -> None:
    assert sanitize(text) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[?1049hfull", "full"),
        ("\x9b2Jgone", "gone"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9d52;c;c3RlYWw=\x9cok", "ok"),
        ("\x1bP+q544e\x1b\\dcs", "dcs"),
        ("\x1b(0lqk", "lqk"),
        ("\x1bcreset", "reset"),
        ("\x1b]unfinished\nnext line", "\nnext line"),
        ("\x1b[31\nm", "\nm"),
        ("over\rwrite", "overwrite"),
        ("line\r\nend", "line\nend"),
        ("\x1b\x1b[1mx", "x"),
        ("abc\u202etxt.exe", "abctxt.exe"),
        ("two\u2028lines", "two\nlines"),
        ("half \ud83d", "half \ufffd"),
        ("family 👩‍👩‍👧 and عربي", "family 👩‍👩‍👧 and عربي"),
    ],
)
def test_examples(text: str, safe: str) -> None:
    assert sanitize(text) == safe


def test_a_sequence_cut_in_two_is_still_removed() -> None:
    sanitizer = Sanitizer()
    assert [sanitizer.feed(piece) for piece in ("say\x1b", "[", "31", "mhi")] == ["say", "", "", "hi"]


def test_one_line() -> None:
    assert one_line(" a\n\x1b[2Jb\t c ") == "a b c"
