"""What a terminal opens is what is shown: an address in a model's text is a link to itself, and nothing else is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style

from app.tui.render.markdown import render_markdown
from app.tui.terminal.links import LONGEST_ADDRESS, checked, opens


def opened(source: str, width: int = 200) -> list[tuple[str, str]]:
    """The links in ``source`` as it is drawn: each target with what is shown of it, row by row."""
    found = []
    for row in render_markdown(source, width).wrap(width):
        links = [(str(span.style.link), span) for span in row.spans if getattr(span.style, "link", None)]
        found += [(target, row.plain[span.start : span.end]) for target, span in links]
    return found


@pytest.mark.parametrize(
    ("source", "addresses"),
    [
        ("[here](https://example.org/x)", ["https://example.org/x"]),
        ("[https://bank.com](https://evil.org)", ["https://bank.com", "https://evil.org"]),
        ("<https://example.org> and `http://localhost:8000/v1`", ["https://example.org", "http://localhost:8000/v1"]),
        ("See https://example.org/a_(b), or (https://example.org/c).", ["https://example.org/a_(b)", "https://example.org/c"]),
        ("“https://example.org/?a=1&amp;b=2#c”, https://a.org。", ["https://example.org/?a=1&b=2#c", "https://a.org"]),
        ("https://bank.com/**a**/@me", ["https://bank.com/a/@me"]),
        ("# https://example.org\n\n- https://a.org\n\n> https://b.org", ["https://example.org", "https://a.org", "https://b.org"]),
        ("```py\nget('https://example.org/a', {1})\n```\n\n    https://b.org", ["https://example.org/a", "https://b.org"]),
        ("| https://a.org | b |\n|---|---|\n| c | https://d.org |", ["https://a.org", "https://d.org"]),
        # Lines of their own, and what was removed: what is left is what is shown.
        ("https://bank.com/\n.evil.org", ["https://bank.com/"]),
        ("| a |\n|---|\n| https://bank.com<br>.evil.org |", ["https://bank.com"]),
        ("https://a.org/\x1b]8;;https://evil.org\x07b\u202ec\x00", ["https://a.org/bc"]),
        ("[x](https://b\u0430nk.com)", ["https://xn--bnk-6cd.com"]),
    ],
)  # fmt: skip
def test_an_address_opens_exactly_what_is_shown(source: str, addresses: list[str]) -> None:
    assert opened(source) == [(address, address) for address in addresses]
    assert all(address in render_markdown(source, 200).plain for address in addresses)


@pytest.mark.parametrize(
    "source",
    [
        "javascript:alert(1) [x](javascript:alert(1)) data:text/html,x [y](data:text/html,x)",
        "file:///etc/passwd [x](file:///etc/passwd) ftp://example.org ssh://example.org HTTPS://example.org",
        "https://bank.com@evil.org https://bank.com:443@evil.org/ https://bank.com?@evil.org https://bank.com#@evil.org",
        "[x](https://bank.com@evil.org)",
        "`https://bank.com\\@evil.org`",
        "https://b\u0430nk.com https://bank.com\u3002evil.org https://bank\uff0ecom https://bank.com\u0338/x",
        "https://bank.com\u200b.evil.org https://bank.com\u200e.evil.org https://bank\xad.com",
        "`https://evil.org/https://bank.com`",
        "https://bank.com… https:// https://. https://-/ https://bank..com https://bank.com:123456 https://[::1]/",
        "git+https://example.org xhttps://example.org",
        "https://example.org/" + "a" * LONGEST_ADDRESS,
        "https://example.org/" + ")" * 20_000,
    ],
)
def test_what_is_no_plain_address_does_not_open(source: str) -> None:
    assert opened(source) == []


def test_a_shortened_heading_does_not_open() -> None:
    address = "https://example.org/" + "a" * 60
    head, row = f"| {address} | b |\n|---|---|\n", "| x | y |\n"
    shown = opened(head + row * 3, width=10)
    assert {target for target, _ in shown} == {address}
    assert "".join(part for _, part in shown) == address


MARKS = (
    "- ", "> ", "| ", "|", "\n", "\n\n", " ", "a", ")", "(", "*", "`", "```\n", "[x](", "<", ">", "é",
    "|---|---|\n", "# ",
)  # fmt: skip
PIECES = st.lists(st.sampled_from([*["{}"] * 4, *MARKS]), min_size=1, max_size=25)


@given(PIECES, st.integers(1, 60))
def test_rows_that_break_an_address_show_all_of_it(pieces: list[str], width: int) -> None:
    source = "".join(pieces)
    for number in range(source.count("{}")):
        source = source.replace("{}", f"https://example.org/{number}/{'x-' * number}end", 1)
    shown: dict[str, str] = {}
    for target, part in opened(source, width):
        assert checked([Segment(part, Style(link=target))])[0].style.link == target
        shown[target] = shown.get(target, "") + part
    assert all(opens(target) and part == target for target, part in shown.items())


def test_a_link_to_something_else_is_removed_at_last() -> None:
    here, there = Style(link="https://example.org/", bold=True), Style(link="javascript:alert(1)", meta={"a": 1})
    line = [
        Segment("https://", here),
        Segment("example.org/", here),
        Segment("javascript:alert(1)", there),
        Segment("x", None),
    ]
    safe = checked(line)
    assert [segment.text for segment in safe] == [segment.text for segment in line]
    assert [segment.style and segment.style.link for segment in safe] == ["https://example.org/"] * 2 + [None] * 2
    assert safe[0].style.bold and safe[2].style.meta == {"a": 1}
    assert safe[0].style.link_id == safe[1].style.link_id == checked(line[:1])[0].style.link_id
    other = [Segment("https://bank.com", Style(link="https://evil.org/")), Segment("bank", here)]
    assert [segment.style.link for segment in checked(other)] == [None, None]
    # Between two parts of what is shown stands something else: together they are not what opens.
    split = [Segment("https://example.org", here), Segment(".evil", here)]
    assert [segment.style.link for segment in checked(split)] == [None, None]
