"""The end of a growing answer has the height that its text needs, however the speed changes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll

from app.chat.state import Entry
from app.tui.chat.message import FAST, LiveTail
from app.tui.render.highlighting import Highlighter

WORDS = ["Rain", "falls", "upon", "the", "roof", "and", "nobody", "minds", "it", "very", "much", "at", "all.", ""][:-1]


class TailApp(App[int]):
    CSS = "LiveTail { height: auto; }"

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield LiveTail(Highlighter())


@pytest.mark.sampled
@pytest.mark.parametrize(
    "speeds",
    [
        [3.0],
        [FAST - 1],
        [FAST],
        [400.0],
        [0.0, FAST - 1, FAST + 1],
        [FAST + 1, FAST - 1],
        [0.0, 0.0, 0.0, FAST, 3.0, 400.0, 1.0],
    ],
)
@pytest.mark.parametrize("width", [24, 60])
async def test_the_tail_is_as_high_as_its_text_at_every_moment(speeds: Sequence[float], width: int) -> None:
    app = TailApp()
    async with app.run_test(size=(width, 30)) as pilot:
        tail = app.query_one(LiveTail)
        tail.begin()
        entry = Entry("assistant", "", state="writing")
        for count in range(2 * len(WORDS)):
            entry.content += WORDS[count % len(WORDS)] + " "
            entry.tokens_per_s = speeds[count * len(speeds) // (2 * len(WORDS))]
            tail.show(entry)
            await pilot.pause()
            content = tail.render()
            lines = content.get_height({}, tail.size.width)
            assert tail.size.height == tail.height_of(content, tail.size.width) >= lines
            assert lines > 1 or len(entry.content) < width
