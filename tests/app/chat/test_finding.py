"""A text is found in the shown conversation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot
from textual.widgets import Static

from app.chat.finding import Hits, about, pattern_of
from app.chat.state import Entry
from app.conversations.store import ConversationStore
from app.tui.application import ChatApp
from app.tui.chat.message import CURRENT_HIT, HIT, MessageView
from tests.app.tui.screen_helpers import MakeApp, controller, ready, shown, wait_until
from tests.support.random_examples import examples


def test_case_white_space_and_marks_do_not_matter() -> None:
    pattern = pattern_of("  bold\tWords ")
    assert pattern is not None and pattern_of(" \n") is None
    assert about(Entry("assistant", "Some **bold** words, and `bold\n words`."), pattern) == 2
    assert about(Entry("user", "Some **bold** words."), pattern) == 0, "what was typed is drawn as it is"
    assert about(Entry("assistant", "bold words", state="writing"), pattern) == 0
    dots = pattern_of("a.b(")
    assert dots is not None and about(Entry("user", "a.b( axb("), dots) == 1


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 11), st.integers(0, 11))
def test_all_hits_come_in_turn_both_ways(counts: list[int], first: int, last: int) -> None:
    hits = Hits(counts)
    hits.begin(min(first, last), max(first, last))
    assert (hits.place is None) == (sum(counts) == 0)
    if hits.place is None:
        return
    for offset in (1, -1):
        start, seen = hits.number, []
        for _ in range(hits.total):
            seen.append(hits.number)
            hits.step(offset)
        assert sorted(seen) == list(range(1, hits.total + 1)) and hits.number == start


def test_the_nearest_hit_is_looked_at_first_and_estimates_are_corrected() -> None:
    hits = Hits([2, 0, 1, 0, 3])
    hits.begin(1, 3)
    assert (hits.place, hits.number, hits.total) == ((2, 0), 3, 6)
    hits.begin(3, 3)
    assert hits.place == (2, 0), "the last before what is seen"
    hits.begin(0, 0)
    hits.step(-1)
    assert hits.place == (4, 2)
    assert hits.correct(4, 1) and hits.place == (4, 0) and hits.total == 4
    assert not hits.correct(4, 0)
    hits.step(-1)
    assert hits.place == (2, 0)
    for message in (0, 2):
        hits.correct(message, 0)
    hits.step(1)
    assert hits.place is None and hits.number == 0


def _long(store: ConversationStore) -> int:
    """A hundred messages, of which every tenth speaks of a zebra."""
    conversation = store.create(model="starter")
    parent: int | None = None
    for number in range(100):
        role = "user" if number % 2 == 0 else "assistant"
        text = f"message {number}" + (" with a **zebra** and another\nzebra" if number % 10 == 5 else "")
        parent = store.add(conversation.id, role, text, parent=parent).id  # type: ignore[arg-type]
    return conversation.id


def _count(app: ChatApp) -> str:
    return str(app.screen.query_one("#find-count", Static).visual)


def _styled(view: MessageView, style: str) -> list[str]:
    content = view.render()
    return [content.plain[span.start : span.end] for span in content.spans if span.style == style]


def _in_sight(app: ChatApp, text: str) -> bool:
    """Is the hit that is looked at in the message ``text``, and on the screen?"""
    assert app.chat is not None
    transcript = app.chat.transcript
    first, last = transcript.in_sight
    looked_at = [view.entry for view in transcript.views if _styled(view, CURRENT_HIT)]
    return len(looked_at) == 1 and text in looked_at[0].content and looked_at[0] in transcript.path[first : last + 1]


async def _type(pilot: Pilot[int], app: ChatApp, text: str) -> None:
    await pilot.press(*text)
    await pilot.pause()


@pytest.mark.soak
async def test_hits_are_found_while_typing_in_older_messages_too(make_app: MakeApp, store: ConversationStore) -> None:
    conversation = _long(store)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        controller(app).open_conversation(conversation)
        await wait_until(pilot, lambda: len(shown(app)) == 30)
        assert app.chat is not None
        await pilot.press("shift+tab", "slash")
        await _type(pilot, app, "zebra")
        await wait_until(pilot, lambda: _count(app) == "19 of 20" and _in_sight(app, "message 95"))
        view = next(view for view in app.chat.transcript.views if "message 85 " in view.entry.content)
        assert _styled(view, HIT) == ["zebra", "zebra"]
        await pilot.press("up", "up", "up")
        await wait_until(pilot, lambda: _count(app) == "16 of 20" and _in_sight(app, "message 75"))
        await pilot.press(*["up"] * 15, "up")
        await wait_until(pilot, lambda: _count(app) == "20 of 20" and _in_sight(app, "message 95"))
        await pilot.press("enter")
        await wait_until(pilot, lambda: _count(app) == "1 of 20" and _in_sight(app, "message 5 "))
        await _type(pilot, app, "q")
        await wait_until(pilot, lambda: _count(app) == "not found")
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.chat and app.chat.transcript.following and app.chat.prompt.has_focus)
        assert "message 99" in shown(app)[-1] and not any(_styled(view, HIT) for view in app.chat.transcript.views)


@pytest.mark.soak
async def test_the_reader_may_stay_or_return(make_app: MakeApp, store: ConversationStore) -> None:
    conversation = _long(store)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press(*"/find zebra", "enter")
        assert not app.chat or not app.chat.find_line.display
        controller(app).open_conversation(conversation)
        await wait_until(pilot, lambda: len(shown(app)) == 30)
        assert app.chat is not None
        transcript = app.chat.transcript
        transcript.scroll_to(y=7, animate=False, immediate=True)
        await wait_until(pilot, lambda: not transcript.following and transcript.scroll_y > 7)
        place = transcript.place
        await pilot.press(*"/find message 5 with", "enter")
        await wait_until(pilot, lambda: _count(app) == "1 of 1" and _in_sight(app, "message 5 "))
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.chat and app.chat.prompt.has_focus)
        assert transcript.place == place, "back to the same line"
        await pilot.press(*"/find message 25 ", "enter")
        await wait_until(pilot, lambda: _in_sight(app, "message 25 "))
        await pilot.press("tab")
        await wait_until(pilot, lambda: isinstance(app.focused, MessageView))
        assert isinstance(app.focused, MessageView) and "message 25 " in app.focused.entry.content
        await pilot.press("slash")
        assert app.chat.find_line.field.value == "message 25"
        controller(app).new_conversation()
        await wait_until(pilot, lambda: app.chat and not app.chat.find_line.display and app.chat.prompt.display)
