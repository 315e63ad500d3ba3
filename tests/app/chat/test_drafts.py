"""Unsent text and earlier questions in the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.events import Paste
from textual.pilot import Pilot

from app.chat import drafts
from app.chat.drafts import NO_DRAFT, DraftKeeper, QuestionHistory
from app.chat.thread import Thread
from app.conversations.drafts import Draft
from app.conversations.opening import open_store
from app.conversations.store import ConversationStore, StoreError
from app.tui.application import ChatApp
from app.tui.panels.beam_panel import Widths
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, until, wait_until

LONG = "\n".join(f"line {number}" for number in range(214))


# --- keeping ---


async def test_a_draft_is_written_soon_and_moves_with_a_conversation_that_begins(store: ConversationStore) -> None:
    keeper, thread = DraftKeeper(store, keep_s=0.0), Thread()
    assert keeper.open(thread) == NO_DRAFT
    keeper.note(Draft("typed"))
    await until(lambda: store.draft(0) is not None)
    thread.conversation = store.create(model="m").id
    keeper.note(Draft("more"))
    keeper.write()
    assert store.draft(0) is None and store.draft(thread.conversation) == Draft("more")
    other = Thread(conversation=store.create(model="m").id)
    keeper.note(Draft("and more"))
    assert keeper.open(other) == NO_DRAFT
    assert keeper.open(thread) == Draft("and more")
    keeper.note(Draft("  \n"))
    keeper.write()
    assert store.draft(thread.conversation) is None


async def test_a_draft_that_cannot_be_written_is_tried_again(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    keep = store.keep_draft

    def refuse_first(conversation: int, draft: Draft | None) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StoreError("locked", "locked")
        keep(conversation, draft)

    monkeypatch.setattr(store, "keep_draft", refuse_first)
    keeper = DraftKeeper(store, keep_s=0.0)
    keeper.open(Thread())
    keeper.note(Draft("typed"))
    await until(lambda: store.draft(0) is not None)
    assert tries == 2


async def test_a_draft_that_is_left_while_nothing_can_be_written_is_not_lost(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(conversation: int, draft: Draft | None) -> None:
        raise StoreError("locked", "locked")

    keeper, thread, other = DraftKeeper(store, keep_s=60.0), Thread(), Thread(store.create(model="m").id)
    keeper.open(thread)
    keeper.note(Draft("typed"))
    with monkeypatch.context() as locked:
        locked.setattr(store, "keep_draft", refuse)
        assert keeper.open(other) == NO_DRAFT
        assert keeper.open(thread) == Draft("typed")
        keeper.open(other)
    keeper.write()
    assert store.draft(0) == Draft("typed")


@pytest.mark.parametrize("fails", [False, True], ids=["written", "refused"])
@pytest.mark.parametrize("newer", [Draft("new"), NO_DRAFT], ids=["new", "empty"])
async def test_a_late_thread_does_not_replace_a_newer_draft(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch, newer: Draft, fails: bool
) -> None:
    """Nor if the store refuses the newer one at first."""
    begun, allowed = asyncio.Event(), asyncio.Event()
    keep, refused = store.keep_draft, not fails

    def refuse_first(conversation: int, draft: Draft | None) -> None:
        nonlocal refused
        if not refused:
            refused = True
            raise StoreError("locked", "locked")
        keep(conversation, draft)

    monkeypatch.setattr(store, "keep_draft", refuse_first)

    async def late(write: Callable[..., object], *arguments: object) -> object:
        begun.set()
        await allowed.wait()
        return write(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", late)
    keeper, thread, other = DraftKeeper(store, keep_s=0.0), Thread(), Thread(store.create(model="m").id)
    keeper.open(thread)
    keeper.note(Draft("old"))
    await begun.wait()
    keeper.note(newer)
    assert keeper.open(other) == NO_DRAFT
    allowed.set()
    writing = keeper._task
    assert writing is not None
    await writing
    assert keeper.open(thread) == newer


async def test_a_question_that_was_sent_is_no_draft_of_the_next_chat(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the store could not be written when its chat was left."""

    def refuse(conversation: int, draft: Draft | None) -> None:
        raise StoreError("locked", "locked")

    keeper, thread = DraftKeeper(store, keep_s=60.0), Thread()
    keeper.open(thread)
    keeper.note(Draft("the question"))
    keeper.write()
    thread.conversation = store.create(model="m").id
    keeper.note(NO_DRAFT)
    with monkeypatch.context() as locked:
        locked.setattr(store, "keep_draft", refuse)
        keeper.write()
        assert keeper.open(Thread()) == NO_DRAFT
    keeper.write()
    assert store.draft(0) is None


# --- the screen ---


async def test_drafts_survive_leaving_and_the_end_of_the_program(
    make_app: MakeApp, store: ConversationStore, home: Path
) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await ask(pilot, app, "first question")
        conversation = controller(app).thread.conversation
        assert conversation is not None
        await pilot.press(*"look: ")
        prompt.paste(LONG)
        controller(app).new_conversation()
        await wait_until(pilot, lambda: prompt.text == "")
        await pilot.press(*"new")
        controller(app).open_conversation(conversation)
        await wait_until(pilot, lambda: prompt.text == "look: [Pasted 214 lines]")
        assert prompt.whole_text == f"look: {LONG}"
        await pilot.press("ctrl+q")
        await pilot.pause()
    store.close()
    again = open_store(home / "conversations.sqlite")
    assert again.draft(conversation) == Draft("look: [Pasted 214 lines]", {"[Pasted 214 lines]": LONG})
    assert again.draft(0) == Draft("new")
    again.close()


async def test_a_crash_costs_no_draft_and_no_queued_question(
    make_app: MakeApp, engine: FakeEngine, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "KEEP_S", 0.0)
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"go", "enter")
        await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)
        await pilot.press(*"queued", "enter", *"typed")
        conversation = controller(app).thread.conversation
        assert conversation is not None
        await wait_until(pilot, lambda: store.draft(conversation) == Draft("queued\n\ntyped"))
    second = make_app()
    async with second.run_test() as pilot:
        await ready(pilot, second)
        controller(second).open_conversation(conversation)
        await wait_until(pilot, lambda: second.chat and second.chat.prompt.text == "queued\n\ntyped")


@pytest.mark.soak
async def test_editing_an_earlier_question_sets_the_draft_aside(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await ask(pilot, app, "a")
        await pilot.press(*"draft", "shift+up", "up", "e")
        assert prompt.text == "a"
        await pilot.press("escape")
        assert prompt.text == "draft"
        await pilot.press("shift+up", "up", "e", "b", "enter")
        await wait_until(pilot, lambda: controller(app).thread.path[0].content == "ab")
        await wait_until(pilot, lambda: prompt.text == "draft")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pasted", "asked"),
    [
        ("// @ts-check\nconst x = 1;", "// @ts-check\nconst x = 1;"),
        ("// why does this fail", "// why does this fail"),
        ("//help", "/help"),
    ],
)
async def test_a_pasted_text_that_begins_with_slashes_is_asked_as_it_is(
    pasted: str, asked: str, make_app: MakeApp, store: ConversationStore
) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.post_message(Paste(pasted))
        await wait_until(pilot, lambda: app.chat and app.chat.prompt.text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: controller(app).thread.path and not controller(app).busy)
    assert store.shown(1)[0].content == asked


async def leave_by_escape(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("escape")


async def leave_for_another_chat(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("ctrl+n")
    controller(app).open_conversation(1)
    await wait_until(pilot, lambda: controller(app).thread.path)


async def leave_for_another_message(pilot: Pilot[int], app: ChatApp) -> None:
    assert app.chat is not None
    app.chat.editing.begin(controller(app).thread.path[1])
    await pilot.press("escape")


@pytest.mark.sampled
@pytest.mark.parametrize("leave", [leave_by_escape, leave_for_another_chat, leave_for_another_message])
@pytest.mark.parametrize("place", [0, 1])
async def test_an_edit_that_is_left_is_there_when_the_message_is_edited_again(
    leave: Callable[[Pilot[int], ChatApp], Awaitable[None]], place: int, make_app: MakeApp, store: ConversationStore
) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await ask(pilot, app, "a")
        await pilot.press(*"draft")
        message = controller(app).thread.path[place]
        app.chat.editing.begin(message)
        await pilot.press("!")
        changed = f"{message.content}!"
        assert prompt.text == changed
        await leave(pilot, app)
        assert prompt.text == "draft"
        assert store.draft(-(message.record or 0)) == Draft(changed)
        app.chat.editing.begin(controller(app).thread.path[place])
        assert prompt.text == changed
        await pilot.press("enter")
        await wait_until(pilot, lambda: controller(app).thread.path[place].content == changed)
        await wait_until(pilot, lambda: prompt.text == "draft")
        assert store.draft(-(message.record or 0)) is None
        # What was sent is not there again, and an edit that changes nothing is none.
        app.chat.editing.begin(message)
        assert prompt.text == message.content
        await pilot.press("escape")
        assert store.draft(-(message.record or 0)) is None


async def test_a_crash_and_the_end_of_the_program_cost_no_edit(
    make_app: MakeApp, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "KEEP_S", 0.0)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        await ask(pilot, app, "a")
        question = controller(app).thread.path[0].record
        assert question is not None
        await pilot.press(*"draft")
        app.chat.editing.begin(controller(app).thread.path[0])
        await pilot.press("b")
        # As a kill would find it.
        await wait_until(pilot, lambda: store.draft(-question) == Draft("ab"))
        assert store.draft(1) == Draft("draft")
        await pilot.press("c", "ctrl+q")
    assert store.draft(-question) == Draft("abc")


def test_the_edits_of_a_deleted_message_are_removed_with_it(home: Path) -> None:
    store = open_store(home / "conversations.sqlite")
    conversation = store.create(model="m").id
    first = store.add(conversation, "user", "a", parent=None).id
    second = store.add(conversation, "assistant", "b", parent=first).id
    store.keep_draft(-first, Draft("another a"))
    store.keep_draft(-second, Draft("another b"))
    store.delete_message(second)
    store.close()
    store = open_store(home / "conversations.sqlite")
    assert (store.draft(-first), store.draft(-second)) == (Draft("another a"), None)
    store.close()


async def test_up_goes_through_the_questions_of_all_conversations_that_begin_with_what_is_typed(
    make_app: MakeApp, store: ConversationStore
) -> None:
    for text in ("where am I?", "why?", "two\nlines", "where to?"):
        store.add(store.create(model="m").id, "user", text, parent=None)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press(*"wh")
        seen = []
        for key in ("up", "up", "up", "up", "down", "down", "down", "down"):
            await pilot.press(key)
            seen.append(prompt.text)
        assert seen == ["where to?", "why?", "where am I?", "where am I?", "why?", "where to?", "wh", "wh"]
        # Edited, a recalled question is the beginning that is looked for.
        await pilot.press("up", "up", "up", "backspace", "up")
        assert prompt.text == "where am I?"
        prompt.clear()
        await pilot.press("up", "up")
        assert prompt.text == "two\nlines"
        # The cursor moves in text of several lines that was changed.
        await pilot.press("!", "up")
        assert prompt.text == "two\nlines!" and prompt.cursor_location[0] == 0


def test_the_history_has_each_question_once_and_those_not_saved() -> None:
    history = QuestionHistory()
    history.source = lambda beginning, limit: ["b", "a", "sent"]
    history.sent("unsaved")
    history.sent("sent")
    assert [history.back("") for _ in range(5)] == ["sent", "unsaved", "b", "a", None]
    assert history.recalled == "a"
    assert [history.forward() for _ in range(4)] == ["b", "unsaved", "sent", ""]
    assert history.recalled is None


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["over", "beside"])
async def test_what_is_typed_in_a_panel_is_written_in_the_prompt(make_app: MakeApp, size: tuple[int, int]) -> None:
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press(*"draft ", "f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        await pilot.press("right", *"one")
        await wait_until(pilot, lambda: app.screen is app.chat and app.focused is prompt)
        assert prompt.text == "draft one"
        await pilot.press("f5")
        await wait_until(pilot, lambda: app.screen is not app.chat or size[0] > 100)
        app.screen.post_message(Paste("pasted"))
        await wait_until(pilot, lambda: app.screen is app.chat and prompt.text == "draft onepasted")
