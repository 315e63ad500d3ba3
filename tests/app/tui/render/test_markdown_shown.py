"""What a model wrote looks as it was meant: its line breaks, its tables, and the HTML that models use."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tui.chat.message import LiveTail
from app.tui.render.highlighting import Highlighter
from app.tui.render.markdown import COPY_MARK, copy_marks, fences, render_markdown


def lines(source: str, width: int = 60) -> list[str]:
    return [line.rstrip() for line in render_markdown(source, width).plain.splitlines()]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("Roses are red\nViolets are blue", ["Roses are red", "Violets are blue"]),
        ("**Name:** Ada\n**Age:** 36", ["Name: Ada", "Age: 36"]),
        ("- 1 Main Street\n  Springfield\n- b", ["• 1 Main Street", "  Springfield", "• b"]),
        ("> a line\n> another", ["▎ a line", "▎ another"]),
        ("*all\nof it*", ["all", "of it"]),
        ("a | b\nc | d", ["a | b", "c | d"]),
        ("one<br>two<BR/>three<br />four", ["one", "two", "three", "four"]),
        ("1. a\n   b\n   > c\n   > d", ["1. a", "   b", "   ▎ c", "   ▎ d"]),
    ],
)
def test_lines_end_where_the_model_ended_them(source: str, shown: list[str]) -> None:
    assert lines(source) == shown


def test_lines_end_there_while_an_answer_is_written_too() -> None:
    tail = LiveTail(Highlighter())
    text = "A poem:\n\nRoses are red\nViolets are blue\nSugar"
    for end in range(1, len(text) + 1):
        tail.growing.update(text[:end])
        above = ["A poem:", ""] if "R" in text[:end] else []
        assert [*above, *tail.written(60).plain.rstrip("▍").splitlines()] == text[:end].rstrip().splitlines()


HEAD = "| cmd | does |\n|---|---|\n"


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ("| `ls | wc` | counts |", ["ls | wc  counts"]),
        ("| `a || b` | either |", ["a || b  either"]),
        ("| ``x`|`y`` | z |\n| `a \\| b` | c |", ["x`|`y  z", "a | b  c"]),
        ("| a | b | c |", ["a    b | c"]),
        ("a | b | c", ["a    b | c"]),
        ("| `a` | `b | c` | d |", ["a    b | c | d"]),
        ("| `open | b | c |", ["`open  b | c"]),
        ("| a |", ["a"]),
    ],
)
def test_a_table_stays_a_table_and_loses_nothing(rows: str, shown: list[str]) -> None:
    table = lines(HEAD + rows)
    assert table[0].split() == ["cmd", "does"] and set(table[1]) == {"─", " "}
    cells = [[re.split(" {2,}", line.strip()) for line in some] for some in (table[2:], shown)]
    assert cells[0] == cells[1]


def test_a_pipe_in_the_code_of_a_head_is_no_column() -> None:
    assert lines("| `a|b` | c |\n|---|---|\n| x | y |") == ["a|b  c", "───  ─", "x    y"]
    assert lines("| a | b | c |\n|---|---|\n| x | y |")[0] == "| a | b | c |"


def test_a_long_heading_is_whole_before_its_first_field_only() -> None:
    head, row = f"| {'name ' * 400}| b | c |\n|---|---|---|\n", "| x | y | z |\n"
    assert sum(line.count("name") for line in lines(head + row, width=8)) == 400
    shown = lines(head + row * 200, width=8)
    assert sum(line.count("name") for line in shown) < 400 + 200 * 13 and shown.count("b: y") == 200


def test_a_table_stands_at_every_moment_in_which_it_is_written() -> None:
    text = HEAD + "| `ls | wc` | counts |\n| `a || b` | either |\n"
    for end in range(len(HEAD), len(text) + 1):
        shown = lines(text[:end])
        assert shown[0].split() == ["cmd", "does"] and set(shown[1]) == {"─", " "}, text[:end]


CELLS = st.lists(st.sampled_from(["a", "`", "``", "|", "\\|", " ", "\\", "$", "b c", "<br>"]), max_size=10).map("".join)


@given(st.lists(CELLS, min_size=1, max_size=4))
def test_whatever_is_in_its_rows_the_letters_of_a_table_are_all_there(rows: list[str]) -> None:
    source = HEAD + "".join(f"| {row} |\n" for row in rows)
    shown = render_markdown(source, 200).plain
    # The letters of a line break are there only where it is quoted.
    assert sorted(re.findall("[ac]", shown)) == sorted(re.findall("[ac]", source))
    assert "\0" not in shown


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("| a | b |\n|---|---|\n| x<br>y | <kbd>Ctrl</kbd>+C |", ["a  b", "─  ──────", "x  Ctrl+C", "y"]),
        ("H<sub>2</sub>O, x<sup>n+1</sup>, y<sup>!?</sup>", ["H₂O, xⁿ⁺¹, y^(!?)"]),
        (
            "<details>\n<summary>More **here**</summary>\n\ninside\n\n</details>\nafter",
            ["▾ More here", "", "inside", "", "after"],
        ),
        ("<details open><summary>S</summary>\ninside</details>", ["▾ S", "", "inside"]),
        ("<details><summary>S</summary>in **side**</details>\nafter", ["▾ S", "", "in side", "", "after"]),
        ("<details>in **side**</details>\nafter", ["in side", "", "after"]),
        ("<details> is a tag, <summary>S</summary> too", ["<details> is a tag, <summary>S</summary> too"]),
        ("<b>x</b> <div>y</div> <!-- z --> <script>", ["<b>x</b> <div>y</div> <!-- z --> <script>"]),
        ("<kbd>never closed, <br", ["<kbd>never closed, <br"]),
        ("`<br>` and\n\n    <details>", ["<br> and", "", "▏<details>"]),
    ],
)
def test_the_html_that_models_use_means_what_it_means(source: str, shown: list[str]) -> None:
    assert lines(source) == shown


FENCES = """\
```python
one
```

    two

- three:
  1. ~~~
     four
     ~~~
  > ```
  > five
  > ```
  >
  > > ```sh
  > > six
| a |
|---|
| `seven` |

$$
```
eight
```
"""


def test_each_code_has_a_mark_at_the_end_of_its_first_line() -> None:
    content = render_markdown(FENCES, 30, marked=True)
    codes = fences(FENCES)
    firsts = ["▏python", "▏two", "1. ▏four", "▎ ▏five", "▎ ▎ ▏sh"]
    shown = [line for line in content.plain.splitlines() if COPY_MARK in line]
    assert len(shown) == len(codes) == len(copy_marks(content)) and codes[:5] == ["one", "two", "four", "five", "six"]
    assert all(
        first in line and line.rstrip().endswith(COPY_MARK) and len(line) == 30
        for first, line in zip(firsts, shown, strict=False)
    )
    plain = render_markdown(FENCES, 30).plain
    assert COPY_MARK not in plain and content.plain.replace(COPY_MARK, " ") == plain
    full = render_markdown("    " + "a" * 30, 30, marked=True).plain.splitlines()
    assert full == [f"▏{'a' * 28}{COPY_MARK}", f"▏{'a' * 2}{' ' * 27}"]


BLOCKS = st.sampled_from(
    ["```\n", "~~~\n", "    ", "- ", "> ", "1. ", "a", "\n", "\n\n", "$$\n", "| a |\n|---|\n", "<details>\n"]
)


@given(st.lists(BLOCKS, max_size=30), st.integers(1, 40))
def test_the_marks_of_code_are_as_many_as_the_codes(pieces: list[str], width: int) -> None:
    source = "".join(pieces)
    content = render_markdown(source, width, marked=True)
    numbers = [
        span.style.meta["fence"]
        for span in content.spans
        if span.start in copy_marks(content) and hasattr(span.style, "meta")
    ]
    assert numbers == list(range(len(fences(source))))
    assert all(content.plain[place] == COPY_MARK for place in copy_marks(content))
