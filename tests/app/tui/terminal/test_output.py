"""Whatever text a widget has, a line that is drawn does not act on the terminal: also one that no engine said."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from textual.app import ComposeResult
from textual.content import Content, Span
from textual.geometry import Region
from textual.style import Style
from textual.widgets import Static

from app.text_safety import HIDDEN, UNSAFE
from app.tui.terminal.application import TerminalApp
from app.tui.terminal.links import linked
from app.tui.terminal.output import kept_in_place

HOSTILE = "a\x1b]0;title\x07b\x9b31mc\u202ed\u200ee\u200bf\xadg\u200dh می\u200cخواهم 👩\u200d💻"


ADDRESS = "https://example.org/a-long-path/to-something"
BANK = Content("bank.com", [Span(0, 8, Style(link="https://evil.org"))])


class HostileApp(TerminalApp):
    def __init__(self, text: Content) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(self._text)


async def test_no_line_that_is_drawn_acts_and_widths_stay() -> None:
    app = HostileApp(Content(HOSTILE))
    async with app.run_test(size=(40, 3)):
        widget = app.query_one(Static)
        lines = widget.render_lines(Region(0, 0, *widget.size))
        assert [line.cell_length for line in lines] == [widget.size.width] * len(lines)
        drawn = "".join(line.text for line in lines)
    assert not UNSAFE.search(drawn) and not HIDDEN.search(drawn) and "efgh" in drawn.replace("-", "")
    assert "می\u200cخواهم" in drawn and "👩\u200d💻" in drawn
    assert [character in drawn for character in "abcd"] == [True] * 4


@pytest.mark.parametrize("no_color", ["", "1"])
async def test_links_that_are_drawn_open_what_is_shown(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    app = HostileApp(Content(" ").join([linked(Content(ADDRESS)), BANK]))
    async with app.run_test(size=(30, 5)):
        widget = app.query_one(Static)
        rows = [line.render(app.console) for line in widget.render_lines(Region(0, 0, *widget.size))]
    sent = re.findall("\x1b]8;id=(\\w+);(.*?)\x1b\\\\(?:\x1b\\[[0-9;]*m)?(.*?)\x1b", "".join(rows))
    # One link, whose parts are known to belong together.
    assert len(rows) > 1 and len(sent) == 2 and len({number for number, _, _ in sent}) == 1
    assert {target for _, target, _ in sent} == {ADDRESS} and "".join(part for _, _, part in sent) == ADDRESS
    assert "bank.com" in "".join(rows)


EMOJI = [
    "👨\u200d👩\u200d👧\u200d👦",
    "👍🏽",
    "☝🏽",
    "❤\ufe0f",
    "❤\u200d🔥",
    "1\ufe0f\u20e3",
    "🏳\ufe0f\u200d🌈",
    "🇩🇪",
    "🫩",
    "\u00a9\ufe0f",
]
EMOJI.append("🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f")


def on_a_terminal(sent: str, cells: Callable[[str], int]) -> dict[int, str]:
    """The ASCII that ``sent`` leaves in a row, by column, where ``cells`` says how far a terminal moves for others."""
    row: dict[int, str] = {}
    column = kept = 0
    for piece in re.findall("\x1b\\].*?\x07|\x1b[78]|\x1b\\[[0-9]*[A-Za-z]|(?s:.)", sent):
        if piece == "\x1b7":
            kept = column
        elif piece == "\x1b8":
            column = kept
        elif piece.endswith("C") and piece.startswith("\x1b"):
            column += int(piece[2:-1])
        elif not piece.startswith("\x1b"):
            if piece.isascii():
                row[column] = piece
            column += 1 if piece.isascii() else cells(piece)
    return row


@pytest.mark.parametrize("emoji", EMOJI)
@pytest.mark.parametrize("cells", [lambda _: 0, lambda _: 1, lambda _: 2, cell_len])
def test_what_follows_an_emoji_is_where_the_layout_has_it(emoji: str, cells: Callable[[str], int]) -> None:
    row = on_a_terminal(kept_in_place(f"\x1b[1ma{emoji}b{emoji}{emoji}c\x1b[0md"), cells)
    wide = cell_len(emoji)
    places = {1 + wide: "b", 2 + 3 * wide: "c", 3 + 3 * wide: "d"}
    assert {place: row.get(place) for place in (0, *places)} == {0: "a", **places}
    # What an emoji leaves of its cells is blank.
    assert {row[place] for place in row if place not in (0, *places) and place < max(places)} <= {" ", *emoji}


@pytest.mark.parametrize("text", ["plain \x1b[1m│ ─ é 語 ▏", "\x1b]2;a ❤\ufe0f 👍🏽\x07", "क्\u200dष นิ", "⧉ • ✓ ℹ"])
def test_what_terminals_agree_on_is_sent_as_it_is(text: str) -> None:
    assert kept_in_place(text) == text
