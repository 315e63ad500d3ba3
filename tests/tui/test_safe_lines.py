"""Whatever text a widget has, a line that is drawn does not act on the terminal: also one that no engine said."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Region
from textual.widgets import Static

from app.text_safety import HIDDEN, UNSAFE
from app.tui.terminal.application import TerminalApp

HOSTILE = "a\x1b]0;title\x07b\x9b31mc\u202ed\u200ee\u200bf\xadg\u200dh می\u200cخواهم 👩\u200d💻"


class HostileApp(TerminalApp):
    def compose(self) -> ComposeResult:
        yield Static(Content(HOSTILE))


async def test_no_line_that_is_drawn_acts_and_widths_stay() -> None:
    app = HostileApp()
    async with app.run_test(size=(40, 3)):
        widget = app.query_one(Static)
        lines = widget.render_lines(Region(0, 0, *widget.size))
        assert [line.cell_length for line in lines] == [widget.size.width] * len(lines)
        drawn = "".join(line.text for line in lines)
    assert not UNSAFE.search(drawn) and not HIDDEN.search(drawn) and "efgh" in drawn.replace("-", "")
    assert "می\u200cخواهم" in drawn and "👩\u200d💻" in drawn
    assert [character in drawn for character in "abcd"] == [True] * 4
