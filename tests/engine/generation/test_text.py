"""Pieces of text: nothing lost, nothing split, no stop string let through."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.generation.text import REPLACEMENT, IncrementalDecoder, StopStrings, first_stop

SPECIAL = -1


def decode_bytes(table: Sequence[bytes]):  # type: ignore[no-untyped-def]
    """A byte-level tokenizer: token i is ``table[i]``; SPECIAL is skipped."""

    def decode(ids: Sequence[int]) -> str:
        return b"".join(table[token] for token in ids if token != SPECIAL).decode(errors="replace")

    return decode


def decode_sentencepiece(table: Sequence[str]):  # type: ignore[no-untyped-def]
    """Words marked by U+2581, whose mark is dropped at the beginning; ``<0xNN>`` are bytes, decoded run by run."""

    def decode(ids: Sequence[int]) -> str:
        text, run = "", b""
        for piece in [table[token] for token in ids if token != SPECIAL]:
            if piece.startswith("<0x"):
                run += bytes([int(piece[3:5], 16)])
                continue
            text, run = text + whole_run(run) + piece, b""
        return (text + whole_run(run)).replace("▁", " ").removeprefix(" ")

    def whole_run(run: bytes) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    return decode


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """``data`` in pieces of the sizes ``cuts``, repeated."""
    pieces, at, index = [], 0, 0
    while at < len(data):
        size = cuts[index % len(cuts)]
        pieces.append(data[at : at + size])
        at, index = at + size, index + 1
    return pieces


def stream(decoder: IncrementalDecoder, tokens: Sequence[int]) -> list[str]:
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


@given(st.text(max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=8))
@example("naïve 👩‍👩‍👧 日本語\u00a0", [1])
@example("�a�", [1, 2])
@settings(deadline=None)
def test_pieces_of_text_join_to_all_of_it(text: str, cuts: list[int]) -> None:
    table = cut(text.encode(errors="replace"), cuts)
    decode = decode_bytes(table)
    tokens = list(range(len(table)))
    pieces = stream(IncrementalDecoder(decode), tokens)
    assert "".join(pieces) == decode(tokens)


@given(st.binary(max_size=80), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
@settings(deadline=None)
def test_garbage_joins_too(data: bytes, cuts: list[int], draw: st.DataObject) -> None:
    table = cut(data, cuts)
    tokens = [token for index in range(len(table)) for token in draw.draw(st.sampled_from(([index], [index, SPECIAL])))]
    decode = decode_bytes(table)
    assert "".join(stream(IncrementalDecoder(decode), tokens)) == decode(tokens)


@given(st.text(min_size=1, max_size=40), st.lists(st.integers(1, 3), min_size=1, max_size=5))
@settings(deadline=None)
def test_no_piece_ends_within_a_character(text: str, cuts: list[int]) -> None:
    text = text.replace(REPLACEMENT, "").encode(errors="ignore").decode()
    table = cut(text.encode(), cuts)
    pieces = stream(IncrementalDecoder(decode_bytes(table)), range(len(table)))
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)


WORDS = ["▁", "▁Hello", "▁world", "lo", "é", "▁the", *(f"<0x{byte:02X}>" for byte in "龘🙂ß".encode())]


@given(st.lists(st.sampled_from(["▁", "▁Hello", "▁world", "lo", "é", "龘", "🙂", "ß", ""]), max_size=20))
@example(["龘", "", "", "", "", "", "🙂"])
@settings(deadline=None)
def test_sentencepiece_with_byte_fallback(words: list[str]) -> None:
    tokens: list[int] = []
    for word in words:
        if word in WORDS:
            tokens.append(WORDS.index(word))
        elif word:
            tokens += [WORDS.index(f"<0x{byte:02X}>") for byte in word.encode()]
        else:
            tokens.append(SPECIAL)
    decode = decode_sentencepiece(WORDS)
    pieces = stream(IncrementalDecoder(decode), tokens)
    assert "".join(pieces) == decode(tokens)
    assert REPLACEMENT not in "".join(pieces)


def test_a_continued_text_keeps_its_space() -> None:
    decode = decode_sentencepiece(WORDS)
    hello, world = WORDS.index("▁Hello"), WORDS.index("▁world")
    assert "".join(stream(IncrementalDecoder(decode), [world, world])) == "world world"
    assert "".join(stream(IncrementalDecoder(decode, [world, hello]), [world, world])) == " world world"


def test_text_comes_as_soon_as_it_is_certain() -> None:
    table = [b"a", " 🙂".encode()[:2], " 🙂".encode()[2:], b"b"]
    decoder = IncrementalDecoder(decode_bytes(table))
    assert [decoder.push(token) for token in range(4)] == ["a", "", " 🙂", "b"]
    assert decoder.flush() == ""


def test_a_long_answer_decodes_a_short_window() -> None:
    longest = 0
    decode = decode_bytes([b"word "])

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    decoder = IncrementalDecoder(watched)
    assert "".join(decoder.push(0) for _ in range(500)) == "word " * 500
    assert longest <= 3


TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


@given(TEXTS, STOPS, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_stopping_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    whole, pieces = StopStrings(stops), StopStrings(stops)
    expected = whole.push(text) + whole.flush()
    found = "".join(pieces.push(piece.decode()) for piece in cut(text.encode(), cuts)) + pieces.flush()
    assert found == expected
    assert pieces.stopped == whole.stopped == any(stop in text for stop in stops)
    assert text.startswith(found)
    assert not any(stop in found for stop in stops)
    if not whole.stopped:
        assert found == text


@given(TEXTS, STOPS)
def test_nothing_is_held_that_could_go(text: str, stops: list[str]) -> None:
    filtered = StopStrings(stops)
    shown = "".join(filtered.push(letter) for letter in text)
    if not filtered.stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_split_over_pieces() -> None:
    stops = StopStrings(["\nUser:", "###"])
    assert [stops.push(piece) for piece in ("Hi", "!\nUs", "er", "s\n", "User", ":more")] == [
        "Hi",
        "!",
        "",
        "\nUsers",
        "",
        "",
    ]
    assert stops.stopped
    assert stops.push("anything") == ""
    assert stops.flush() == ""


def test_first_to_be_complete_wins() -> None:
    assert first_stop("xabcd", ["abcd", "bc"]) == 2
    assert first_stop("xabc", ["c", "abc"]) == 1
    assert first_stop("x", ["y"]) is None


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ModelError, match="stop string is empty"):
        StopStrings(["a", ""])
