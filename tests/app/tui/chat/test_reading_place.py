"""The reader's text stays at the top of the screen, whatever opens, closes or becomes wider."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot

from app.chat.state import Entry
from app.conversations.records import Thoughts
from app.conversations.store import ConversationStore
from app.tui.application import ChatApp
from app.tui.chat.reading_place import Drawn, Place
from app.tui.render.markdown import render_markdown
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, shown, wait_until

PARAGRAPHS = [f"Paragraph {number} says that " + f"word{number} " * (9 + 7 * number % 40) for number in range(40)]
TABLE = "| name | of | what |\n|---|---|---|\n" + "\n".join(
    f"| row{number} | a longer cell for {number} | and what it is about in some words |" for number in range(12)
)
CODE = (
    "```python\n"
    + "\n".join(f"value_{number} = compute({number}, {number * 3})  # why" for number in range(12))
    + "\n```"
)
ANSWER = "\n\n".join([*PARAGRAPHS[:8], TABLE, *PARAGRAPHS[8:16], CODE, "> " + PARAGRAPHS[16], *PARAGRAPHS[17:24]])
ENTRY = Entry("assistant", "")


def _drawn(source: str, width: int) -> Drawn:
    return Drawn(((0, render_markdown(source, width).plain),), width)


def _words(drawn: Drawn, row: int) -> str:
    """The first letters from the line on."""
    return "".join(letters for line, letters in drawn.lines() if line >= row)


@pytest.mark.sampled
@pytest.mark.parametrize("other", [24, 60, 200])
def test_each_line_is_found_at_another_width(other: int) -> None:
    before, now = _drawn(ANSWER, 100), _drawn(ANSWER, other)
    rows = [line for line, letters in before.lines() if letters]
    table = [line for line, letters in before.lines() if letters.startswith("row")]
    there_too = [line for line, letters in now.lines() if "row" in letters or letters.startswith(("of:", "what:"))]
    assert len(table) == 12
    for row in rows[:: 1 + len(rows) // 40]:
        there = Place(ENTRY, row, before).row_in(now)
        found = next(letters for line, letters in now.lines() if line == there)
        wanted = _words(before, row)
        if row in table:
            assert there_too[0] <= there <= there_too[-1]
        else:
            assert any(wanted.startswith(found[start:][:12]) for start in range(len(found))), (row, there)


def test_a_line_is_the_same_where_nothing_changed_and_below_the_last() -> None:
    drawn = _drawn(ANSWER, 80)
    last = drawn.lines()[-1][0]
    assert [Place(ENTRY, row, drawn).row_in(drawn) for row in (-2, 0, 7, last, last + 1)] == [-2, 0, 7, last, last + 1]
    narrow = _drawn(ANSWER, 40)
    assert Place(ENTRY, last + 1, drawn).row_in(narrow) == narrow.lines()[-1][0] + 1
    assert Place(ENTRY, -1, drawn).row_in(narrow) == -1
    assert Place(ENTRY, 3, drawn).row_in(Drawn(((0, ""),), 80)) == 0


def test_what_comes_before_or_after_moves_it_by_its_lines() -> None:
    before = _drawn(ANSWER, 80)
    for row in (0, 5, 11, 30):
        for source, offset in ((f"{PARAGRAPHS[30]}\n\n{ANSWER}", None), (f"{ANSWER}\n\nmore of it", 0)):
            now = _drawn(source, 80)
            moved = now.lines()[-1][0] - before.lines()[-1][0] if offset is None else offset
            assert Place(ENTRY, row, before).row_in(now) == row + moved


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.text(max_size=300), st.integers(-2, 40), st.integers(1, 60), st.integers(1, 60))
def test_whatever_is_drawn_there_is_a_line(old: str, new: str, row: int, width: int, other: int) -> None:
    """Nothing is known of where it is if the text is another one, but it is one of its lines, or near them."""
    before, now = Drawn(((0, old),), width), Drawn(((0, new),), other)
    found = Place(ENTRY, row, before).row_in(now)
    assert found == row if row < 0 else found >= 0
    if any(letters for line, letters in before.lines() if line >= row >= 0) and any(text for _, text in now.lines()):
        assert found <= now.lines()[-1][0]


# --- on the screen ----------------------------------------------------------------------------------------------


def _top(app: ChatApp) -> str:
    """The line at the top of the transcript that has letters, as it is drawn."""
    assert app.chat is not None
    transcript = app.chat.transcript
    x, y, width, height = transcript.scrollable_content_region
    lines = app.screen._compositor.render_strips()[y : y + height]
    return next(text for strip in lines if (text := strip.crop(x, x + width).text.strip(" ▎│┃▌▊")))


async def _read(pilot: Pilot[int], app: ChatApp, words: str) -> None:
    """Scroll until the line that begins with ``words`` is at the top."""
    assert app.chat is not None
    transcript = app.chat.transcript
    transcript.scroll_to(y=0, animate=False, immediate=True)
    await pilot.pause()
    for _ in range(400):
        if _top(app).startswith(words):
            assert not transcript.following
            return
        transcript.scroll_down(animate=False, immediate=True)
        await pilot.pause()
    raise AssertionError(f"{words} is nowhere")


async def _resized(pilot: Pilot[int], app: ChatApp, columns: int) -> None:
    assert app.chat is not None
    transcript = app.chat.transcript
    before = transcript.size.width - app.size.width
    await pilot.resize_terminal(columns, app.size.height)
    await wait_until(pilot, lambda: transcript.size.width - columns == before, "the new width")


@pytest.mark.soak
async def test_the_text_stays_whatever_opens_and_resizes(make_app: MakeApp, store: ConversationStore) -> None:
    conversation = store.create(model="starter")
    parent: int | None = None
    for role, text in (("user", "Tell me"), ("assistant", ANSWER), ("user", "And?"), ("assistant", ANSWER)):
        parent = store.add(conversation.id, role, text, parent=parent).id  # type: ignore[arg-type]
        if role == "assistant":
            store.update(parent, thoughts=Thoughts("I think\n" * 9, 30, 1.0))
    app = make_app()
    async with app.run_test(size=(140, 30)) as pilot:
        await ready(pilot, app)
        controller(app).open_conversation(conversation.id)
        await wait_until(pilot, lambda: len(shown(app)) == 4)
        assert app.chat is not None
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: transcript.following and transcript.scroll_y > 0)
        await _read(pilot, app, "Paragraph 12")
        before, wide = transcript.scroll_y, transcript.size.width

        async def same(words: str = "Paragraph 12") -> None:
            await pilot.pause()
            assert _top(app).startswith(words) and not transcript.following

        for columns in (60, 100, 48, 140):
            await _resized(pilot, app, columns)
            await same()
        assert transcript.scroll_y == before, "the same line as before"
        for opens, closes in (("f5", ["f5", "f5"]), ("f2", ["f2"])):
            await pilot.press(opens)
            await wait_until(pilot, lambda: transcript.size.width < wide)
            await same()
            await pilot.press(*closes)
            await wait_until(pilot, lambda: transcript.size.width == wide)
            await same()
        assert transcript.scroll_y == before
        # Where all of it is on the screen there is no newer text to go to.
        assert "newest text" in str(app.chat.prompt.border_subtitle)
        await pilot.resize_terminal(140, 400)
        await wait_until(pilot, lambda: app.chat and not app.chat.prompt.border_subtitle)
        await pilot.resize_terminal(140, 30)
        await wait_until(pilot, lambda: transcript.scroll_y == before)
        await same()
        assert "newest text" in str(app.chat.prompt.border_subtitle)
        assert transcript.toggle_thoughts()
        await same()
        assert transcript.scroll_y > before
        transcript.toggle_thoughts()
        await same()
        assert transcript.scroll_y == before
        await _resized(pilot, app, 60)
        await same()
        transcript.scroll_to(y=transcript.scroll_y + 3, animate=False, immediate=True)
        await pilot.pause()
        words = _top(app)[:20]
        assert not words.startswith("Paragraph 12")
        await _resized(pilot, app, 140)
        await pilot.pause()
        assert words in _top(app), "the reader went on, and the place with them"
        await pilot.press("ctrl+end")
        for columns in (60, 140):
            await _resized(pilot, app, columns)
            await wait_until(pilot, lambda: transcript.following and transcript.scroll_y == transcript.max_scroll_y)


@pytest.mark.soak
async def test_the_text_stays_while_an_answer_is_written(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    tail = "Tail " + "of many words " * 120
    engine.answer = lambda request: ["\n\n".join([*PARAGRAPHS[:12], tail]), "the end\n\n", ANSWER]
    app = make_app()
    async with app.run_test(size=(120, 14)) as pilot:
        await ready(pilot, app)
        await pilot.press(*"go", "enter")
        assert app.chat is not None
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y > 20)
        for words in ("Paragraph 5", "Tail of many words"):
            await _read(pilot, app, words)
            for columns in (50, 120):
                await _resized(pilot, app, columns)
                await pilot.pause()
                assert _top(app).startswith(words)
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        await pilot.pause()
        assert _top(app).startswith("Tail of many words") and not transcript.following
