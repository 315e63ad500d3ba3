"""Markdown as text with styles: whatever a model writes is shown, and nothing of it acts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.thread import code_blocks
from app.tui.render.markdown import column_widths, render_markdown


def test_markdown_is_laid_out() -> None:
    text = render_markdown("# Title\n\n- one\n- two\n  1. deep\n\n> said\n\n`code` and **bold**", 40).plain
    assert text.splitlines() == [
        "Title", "", "• one", "• two", "  1. deep", "", "▎ said", "", "code and bold",
    ]  # fmt: skip


def test_long_items_are_indented() -> None:
    lines = render_markdown("- " + "word " * 12, 20).plain.splitlines()
    assert lines[0].startswith("• word")
    assert all(line.startswith("  word") and len(line) <= 20 for line in lines[1:])


def test_a_table_fits_its_width() -> None:
    source = "| a | b |\n|---|--:|\n| " + "long " * 20 + "| 7 |"
    for width in (12, 20, 40, 80):
        assert all(len(line) <= width for line in render_markdown(source, width).plain.splitlines())


@pytest.mark.parametrize("source", ["[bold]x[/]", "[@click=app.quit]x[/]", "<b>x</b>", "[/]", "\\[red]"])
def test_markup_of_a_model_is_text(source: str) -> None:
    content = render_markdown(source, 40)
    assert "x" in content.plain or content.plain in ("[/]", "[red]")
    assert not any("click" in str(span.style) for span in content.spans)


def test_escape_sequences_are_gone() -> None:
    assert render_markdown("a\x1b[31mb\x1b]0;t\x07c\x9b1md", 40).plain == "abcd"


@given(st.text(max_size=300), st.integers(1, 120))
def test_any_text_can_be_rendered(source: str, width: int) -> None:
    content = render_markdown(source, width)
    assert not any(ord(character) < 32 and character not in "\n\t" for character in content.plain)


@pytest.mark.sampled
@pytest.mark.parametrize("mark", ["*", "_", "["])
def test_marks_within_marks_without_end_are_shown_all_the_same(mark: str) -> None:
    source = mark * 6000 + "the words" + mark * 6000
    assert "the words" in render_markdown(source, 80).plain
    assert code_blocks(source) == []


def test_code_blocks_are_found_in_order() -> None:
    assert code_blocks("```py\na\n```\ntext\n\n~~~\nb\nc\n~~~") == ["a", "b\nc"]


@given(st.lists(st.integers(0, 80), min_size=1, max_size=8), st.integers(1, 120))
def test_columns_fit_or_are_given_up(wanted: list[int], available: int) -> None:
    widths = column_widths(wanted, available)
    if widths is None:
        assert sum(min(max(1, column), 5) for column in wanted) > available
    else:
        assert sum(widths) <= available
        assert all(width >= 1 for width in widths)


def test_footnotes_stay_as_they_are() -> None:
    shown = render_markdown("Term[^1] and \\*no\\* \\( alone.\n\n[^1]: note", 80).plain
    assert "Term[^1] and *no* ( alone." in shown
    assert "[^1]: note" in shown
    assert render_markdown("[a link][1]\n\n[1]: https://example.org", 80).plain.startswith(
        "a link (https://example.org"
    )
