from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text_safety import HIDDEN, Sanitizer, one_line, sanitize, visible

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


# --- what nobody can see ---------------------------------------------------------------------------------------------

JOINERS = "\u200c\u200d\ufe0e\ufe0f\u180b\U000e0100"
UNSEEN = "\u200b\u200e\u200f\u061c\u2060\u2063\ufeff\xad\u034f\u3164\U000e0041"
DISGUISED = st.text(st.sampled_from(f"{JOINERS}{UNSEEN}aی葛❤👩🏽1# \nᠠ"), max_size=30)


@given(DISGUISED)
def test_what_cannot_be_seen_is_left_only_where_it_does_something(text: str) -> None:
    shown = visible(text)
    assert not HIDDEN.search(shown)
    seen = [character for character in text if character not in JOINERS + UNSEEN]
    assert [character for character in shown if character not in JOINERS] == seen
    joined = re.sub(
        "[یᠠ][\u200c\u200d]|ᠠ\u180b|葛\U000e0100|[❤👩🏽]\ufe0f?\u200d|[1#]\ufe0f\u200d|[❤👩🏽1#葛][\ufe0e\ufe0f]",
        "",
        shown,
    )
    assert not set(joined) & set(JOINERS)
    assert visible(shown) == shown


@given(DISGUISED, st.integers(1, 9))
def test_a_text_that_is_shown_piece_by_piece_is_the_same(text: str, size: int) -> None:
    shown = ""
    for start in range(0, len(text), size):
        shown += visible(text[start : start + size], shown)
    assert shown == visible(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pass\u200bword", "password"),
        ("a\u200cb\u200dc", "abc"),
        ("\u200eabc\u200f.txt\u061c", "abc.txt"),
        ("\ufeffname\u2060", "name"),
        ("so\xadft", "soft"),
        ("user\u3164", "user"),
        ("see\U000e0068\U000e0069", "see"),
        ("a\ufe01\ufe02b", "ab"),
        ("❤\ufe0f\ufe01\ufe02", "❤\ufe0f"),
        ("ی\u200c\u200c\u200dک", "ی\u200cک"),
        ("ی\u200b\u200cک", "ی\u200cک"),
        ("\u200d\u200c", ""),
    ],
)
def test_what_disguises_a_text_is_not_shown(text: str, shown: str) -> None:
    assert visible(text) == one_line(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",  # Persian: a suffix that is not joined
        "ك\u200dه",  # Arabic: a letter in its joined form
        "क्\u200dष and क्\u200cष",  # Devanagari: half a letter, and a virama that is seen
        "ന്\u200d",  # Malayalam
        "ක්\u200dෂ",  # Sinhala
        "র\u200d্য",  # Bengali
        "👩🏽\u200d💻 🏳\ufe0f\u200d🌈 ❤\ufe0f\u200d🔥 🐻\u200d❄\ufe0f 🧑\u200d🧑\u200d🧒",
        "1\ufe0f⃣ #\ufe0f⃣ ©\ufe0f ☺\ufe0e ↔\ufe0f ‼\ufe0f ㊙\ufe0f 〰\ufe0f",
        "葛\U000e0100城 and 神\ufe00",  # forms of ideographs
        "ᠠ\u180b",  # Mongolian
        "naïve עברית 한국어 ไทย",
    ],
)
def test_joiners_and_selectors_stay_where_they_change_what_is_seen(text: str) -> None:
    assert visible(text) == one_line(text) == text
    shown = ""
    for character in text:
        shown += visible(character, shown)
    assert shown == text
