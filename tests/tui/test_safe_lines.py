"""Whatever text a widget has, a line that is drawn does not act on the terminal: also one that no engine said."""

from __future__ import annotations

import re

import pytest
from textual.app import ComposeResult
from textual.content import Content, Span
from textual.geometry import Region
from textual.style import Style
from textual.widgets import Static

from app.text_safety import HIDDEN, UNSAFE
from app.tui.terminal.application import TerminalApp
from app.tui.terminal.links import linked

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
