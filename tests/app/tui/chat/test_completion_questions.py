"""``/history`` finds earlier questions by their words."""

from __future__ import annotations

from app.conversations.store import ConversationStore
from app.tui.chat.completion import CompletionPopup, QuestionSearch
from tests.app.tui.screen_helpers import MakeApp, notice, ready, wait_until

ASKED = ["Why is the sky blue?", "two\nlines about the Sky", "Who?"]


def test_all_words_must_be_in_the_question_in_any_order() -> None:
    asked = list(ASKED)
    source = QuestionSearch(lambda beginning, limit: asked[:limit])

    def offered(before: str, after: str = "") -> list[str]:
        found = source.complete(before, after)
        return [candidate.replacement for candidate in found.candidates] if found is not None else []

    assert offered("/history ") == ASKED
    assert offered("/history SKY") == ASKED[:2] and offered("/history blue sk") == ASKED[:1]
    assert offered("/history xyzzy") == [] and offered("/history sky", "x") == [] and offered("sky") == []
    asked.insert(0, "sky again")
    assert offered("/history again") == ["sky again"]


async def test_a_question_is_found_and_taken(make_app: MakeApp, store: ConversationStore) -> None:
    for text in reversed(ASKED):
        store.add(store.create(model="m").id, "user", text, parent=None)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt, popup = app.chat.prompt, app.chat.query_one(CompletionPopup)
        app.chat.drafting.history()
        await pilot.press(*"sky")
        await wait_until(pilot, lambda: popup.display and popup.option_count == 2)
        await pilot.press("down", "enter")
        assert prompt.text == "two\nlines about the Sky" and not popup.display
        prompt.fill("/history xyzzy")
        await pilot.press("enter")
        await wait_until(pilot, lambda: "No earlier question has the words xyzzy" in notice(app))
