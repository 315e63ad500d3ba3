"""A growing answer in parts: what is finished is rendered once, and nothing is lost between the parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.chat.thread import code_blocks
from app.tui.render.streaming import LONGEST_TAIL, AnswerPart, GrowingText


@given(st.lists(st.sampled_from(["word ", "\n", "\n\n", "```\n", "```py\n", "- item\n", "1. x\n", "    code\n"])))
def test_cutting_a_growing_text_loses_nothing(pieces: list[str]) -> None:
    growing = GrowingText()
    text = ""
    for piece in pieces:
        text += piece
        growing.update(text)
        assert "".join(part.source for part in (*growing.frozen, growing.tail)) == text


def test_paragraphs_are_frozen_and_lists_are_kept_whole() -> None:
    growing = GrowingText()
    growing.update("one\n\ntwo\n\n- a\n\n- b\n")
    assert growing.frozen == [AnswerPart("one\n\n")]
    assert growing.tail.source == "two\n\n- a\n\n- b\n"
    growing.update("one\n\ntwo\n\n- a\n\n- b\n\nthree ")
    assert growing.tail.source == "three "


def test_a_closed_fence_is_frozen() -> None:
    growing = GrowingText()
    growing.update("```py\nx\n\ny\n")
    assert growing.frozen == []
    growing.update("```py\nx\n\ny\n```\nafter")
    assert growing.frozen == [AnswerPart("```py\nx\n\ny\n```\n")]


def test_a_long_fence_is_cut_and_stays_code() -> None:
    growing = GrowingText()
    growing.update("```py\n" + "line = 1\n" * 600)
    assert len(growing.tail.source) <= LONGEST_TAIL + 20
    blocks = [*(part.source for part in growing.frozen), growing.tail.source + "```\n"]
    assert all(block.startswith("```py\n") and block.endswith("```\n") for block in blocks)
    code = "".join(code_blocks(block)[0] + "\n" for block in blocks)
    assert code == "line = 1\n" * 600


def test_another_text_begins_anew() -> None:
    growing = GrowingText()
    growing.update("one\n\ntwo")
    growing.update("three")
    assert (growing.frozen, growing.tail) == ([], AnswerPart("three"))
