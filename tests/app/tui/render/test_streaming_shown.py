"""While an answer is written, what is on the screen is the text that has arrived, whatever its Markdown."""

from __future__ import annotations

import random
import re
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from app.chat.state import Entry
from app.tui.chat import transcript as transcript_module
from app.tui.chat.message import LiveTail, MessageView
from app.tui.chat.transcript import Transcript
from app.tui.render.highlighting import Highlighter
from app.tui.render.markdown import render_markdown
from app.tui.render.streaming import LONGEST_TAIL, GrowingText, joined
from app.tui.render.thumbnails import Thumbnails
from app.tui.terminal.application import TerminalApp
from app.tui.terminal.drawn_pictures import SixelTable
from tests.support.random_examples import examples

WORD = re.compile("q[a-pr-z]{3}")
"""A word of the documents below. Each is there once, and no mark looks like one."""
LETTERS = "abcdefghijklmnoprstuvwxyz"
BLOCKS = (
    "? ? ?.\n\n", "? **? ?** ? *?* `?` ~~?~~ [?](http://?.net) ?\n\n", "# ?\n", "## ? `?` ?\n\n", "?\n===\n\n",
    "- ?\n- ? ?\n  - ?\n    ?\n\n", "* ?\n\n* ?\n\n", "1. ?\n2. ?\n   more ?\n\n", "- [ ] ?\n- [x] ?\n\n",
    "> ? ?\n> ?\n\n",
    "> - ?\n>   > ?\n\n", "```zz\n? = ?\n\n? ?\n```\n", "~~~\n?\n~~~\n", "```zz\n?\n  ?\n", "    ?\n    ?\n\n", "---\n",
    "| ? | ? |\n|---|:-:|\n| ? | ? |\n| ? | `?` ? |\n\n", "<b>?</b> <!-- ? -->\n\n", "<div>\n?\n</div>\n\n",
    "[?]: http://?.net\n\n",
    "[^1]: ?\n\n", "![?](?.png)\n\n", "<http://?.net>\n\n", "$$\n?\n$$\n\n", "\\(?\\) $?$ ?\n",
    "? \\*?\\* &amp; ?\n", "**?\n\n", "? `?\n",
    "[?](?\n", "?  \n?\\\n?\n\n", "\n\n\n", "| ? |\n", "|-|\n",
)  # fmt: skip


def filled(blocks: list[str]) -> str:
    """The blocks with a new word in the place of each question mark."""
    numbers = count()

    def word(match: re.Match[str]) -> str:
        number, letters = next(numbers), ""
        for _ in range(3):
            number, letter = divmod(number, len(LETTERS))
            letters = LETTERS[letter] + letters
        return "q" + letters

    return re.sub(r"\?", word, "".join(blocks))


def growing(text: str, cuts: list[int]) -> list[str]:
    """What has arrived after each of the pieces that end at ``cuts``."""
    return [text[:cut] for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)})]


def check(shown: str, received: str, what: str) -> None:
    """All words that have arrived are there and no others: in order, unless a table puts them beside each other."""
    # Long lines of code are broken anywhere, and each begins with its mark.
    words, wanted = WORD.findall("".join(shown.replace("▏", "").split())), WORD.findall(received)
    if "|" in received:
        words, wanted = sorted(set(words)), sorted(wanted)
    assert words == wanted, what


@settings(max_examples=examples(50))
@given(
    st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=12).map(filled),
    st.lists(st.integers(0, 600), max_size=12),
    st.sampled_from([24, 40, 76, 112]),
)
def test_everything_that_arrived_is_drawn_at_every_step(text: str, cuts: list[int], width: int) -> None:
    highlighter = Highlighter()
    entry = Entry("assistant", "", state="writing")
    view, tail = MessageView(entry, highlighter, Thumbnails(print, SixelTable())), LiveTail(highlighter)
    for received in growing(text, cuts):
        tail.growing.update(received)
        view._parts = list(tail.growing.frozen)
        check(f"{view.written(width).plain}\n{tail.written(width).plain}", received, received)
    entry.content, entry.state, view._parts = text, "complete", None
    check(view.written(width).plain, text, f"finished: {text}")


def streamed(text: GrowingText, width: int) -> list[str]:
    """The lines of a growing answer, above the tail and in it."""
    # An empty tail is the cursor alone.
    parts = [part for part in (*text.frozen, text.tail) if part.source.strip()]
    shown = joined(parts, lambda source: render_markdown(source, width)).plain
    return [line.rstrip() for line in shown.rstrip().split("\n")]


ENDED = [
    f"{block}? ?\n\n" if re.match(r"[-*1] ?|    ", block) else block
    for block in BLOCKS
    if block not in ("? `?\n", "[?](?\n")
]
"""The blocks, but that nothing follows that changes what was read before: an item apart from a list, the end of a mark
that began many lines above."""


@pytest.mark.soak
@settings(max_examples=examples(100))
@given(
    st.lists(st.sampled_from(ENDED), min_size=1, max_size=12).map(filled),
    st.lists(st.integers(0, 600), max_size=12),
    st.sampled_from([24, 76]),
    st.sampled_from([40, 150, LONGEST_TAIL]),
)
def test_it_looks_at_every_step_as_it_will_when_it_is_complete(
    text: str, cuts: list[int], width: int, longest: int
) -> None:
    tail = GrowingText(longest)
    for received in growing(text, cuts):
        tail.update(received)
        final = [line.rstrip() for line in render_markdown(received, width).plain.rstrip().split("\n")]
        assert streamed(tail, width) == final, (received, tail.frozen)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "line",
    ["a line of **words** and so on\n", "- an item\n", "> said\n", "```py\nx = 1\n```\n"],
)
def test_a_long_text_without_empty_lines_is_cut_and_looks_the_same(line: str) -> None:
    text, tail = "", GrowingText()
    while len(text) < 4 * LONGEST_TAIL:
        text += line * 20
        tail.update(text + "and")
        assert len(tail.tail.source) <= LONGEST_TAIL + len(line) * 20 + 3
    assert streamed(tail, 76) == [line.rstrip() for line in render_markdown(text + "and", 76).plain.split("\n")]


class Screen(TerminalApp):
    """A transcript alone, on a screen that is higher than any of the answers."""

    CSS = "Transcript { height: 1fr; layout: stream; } .message, .tail { height: auto; }"

    def compose(self) -> ComposeResult:
        yield Transcript(Highlighter(), Thumbnails(self._write_sequences, self.sixels), id="transcript")

    async def keep(self) -> None:
        """There is nothing to save."""


@pytest.mark.sampled
@pytest.mark.parametrize("texts", [5, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("width", [40, 100])
async def test_no_line_is_invisible_on_the_screen_at_any_step(
    width: int, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript_module, "UPDATE_S", 0.0)
    monkeypatch.setattr(transcript_module, "SLOWEST_S", 0.0)
    draw = random.Random(width)
    app = Screen()
    async with app.run_test(size=(width, 120)) as pilot:
        transcript = app.query_one(Transcript)
        for _ in range(texts):
            text = filled(draw.choices(BLOCKS, k=8))
            entry = Entry("assistant", "", state="writing", tokens_per_s=draw.choice([3.0, 400.0]))
            await transcript.show_path([Entry("user", "go"), entry])
            for received in growing(text, [draw.randrange(len(text)) for _ in range(8)]):
                entry.content = received
                transcript.change(entry, live=True)
                await pilot.pause()
                check(_drawn(app), received, received)
            entry.state = "complete"
            transcript.change(entry, live=False)
            await pilot.pause()
            check(_drawn(app), text, f"finished: {text}")


def _drawn(app: App[int]) -> str:
    """The lines on the screen."""
    return "\n".join("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())
