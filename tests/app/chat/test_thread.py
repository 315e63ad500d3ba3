"""What a model thinks before it answers: folded, opened by a key, saved apart, and no part of what is asked next."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from app.chat.state import Entry, Phase
from app.chat.thread import export_thread
from app.conversations.database import SqliteStore
from app.conversations.records import Thoughts
from app.conversations.store import ConversationStore
from app.settings.schema import Settings
from app.tui.chat.message import LIVE_THOUGHTS, MessageView
from app.tui.render.formatting import thoughts_line
from app.tui.render.highlighting import Highlighter
from app.tui.render.thumbnails import Thumbnails
from app.tui.terminal.application import CopyRequested
from app.tui.terminal.drawn_pictures import SixelTable
from engine.ipc.messages import Finished, Generate, Message, Piece
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, shown, wait_until

THOUGHTS = ["France is a country.", "\n\nIts capital", " is Paris."]
WHOLE = Thoughts("".join(THOUGHTS), 3, 3.0)


# --- without the screen -------------------------------------------------------------------------------------------


async def answered(engine: FakeEngine, store: ConversationStore, settings: Settings | None = None) -> Chat:
    """A chat with one question and its answer."""
    chat = Chat(engine, store, settings)
    async with running(chat):
        chat.controller.submit("Which city?")
        await chat.answered()
    return chat


@pytest.mark.parametrize(
    ("thoughts", "pieces", "note"),
    [
        (THOUGHTS, [""], "The model thought, and then said nothing. Ask again, or turn thinking off."),
        ([], [""], "The model said nothing."),
        ([], [" \n"], "The model said nothing."),
        (THOUGHTS, ["Paris"], ""),
    ],
)
async def test_an_answer_without_a_word_says_so(
    engine: FakeEngine, store: ConversationStore, thoughts: list[str], pieces: list[str], note: str
) -> None:
    engine.thoughts, engine.answer = thoughts, lambda request: pieces
    chat = await answered(engine, store)
    assert (chat.path[-1].state, chat.path[-1].note) == ("complete", note)


async def test_thoughts_are_saved_apart_and_left_out_of_the_next_prompt(store: SqliteStore) -> None:
    engine = FakeEngine()
    engine.thoughts = THOUGHTS
    chat = Chat(engine, store)
    async with running(chat):
        chat.controller.submit("Which city?")
        await chat.answered()
        assert (chat.path[1].content, chat.path[1].thoughts) == ("Paris is the capital.", WHOLE)
        assert on_disk(store, chat)[1].thoughts == WHOLE
        chat.controller.submit("And its river?")
        await chat.answered()
    (_, second) = engine.sent(Generate)
    assert isinstance(second, Generate) and second.messages is not None
    assert second.messages[1] == Message("assistant", "Paris is the capital.")


async def test_what_was_thought_before_a_stop_is_kept(store: SqliteStore) -> None:
    engine = FakeEngine()
    engine.thoughts, engine.gate = THOUGHTS, asyncio.Event()
    chat = Chat(engine, store)
    async with running(chat):
        chat.controller.submit("Which city?")
        await chat.until(lambda: chat.path[1:] and chat.path[1].thoughts.text)
        assert chat.controller.status.phase is Phase.THINKING
        await chat.until(lambda: on_disk(store, chat)[1].thoughts.text == THOUGHTS[0])
        chat.controller.stop_soon()
        await chat.answered()
        assert (chat.path[1].content, chat.path[1].state) == ("", "stopped")
        assert on_disk(store, chat)[1].thoughts.text == THOUGHTS[0]
        chat.controller.submit("Again?")
        await chat.answered()
    (_, second) = engine.sent(Generate)
    assert isinstance(second, Generate) and second.messages is not None
    assert [message.role for message in second.messages] == ["user"]


async def test_an_answer_that_turns_out_to_be_thoughts(store: SqliteStore) -> None:
    class Late(FakeEngine):
        async def _generate(self, request: Generate):  # type: ignore[no-untyped-def]
            yield Piece(id=request.id, text="Which one? ", tokens=1)
            yield Piece(id=request.id, text="Par", tokens=4, reasoning="Which one?", reasoning_tokens=3, withdrawn=True)
            assert self.gate is not None
            await self.gate.wait()
            found = self._finished(request, "Paris", [])
            yield msgspec.structs.replace(found, reasoning="Which one?", reasoning_tokens=3)

    engine = Late()
    engine.gate = asyncio.Event()
    chat = Chat(engine, store)
    async with running(chat):
        chat.controller.submit("Which city?")
        await chat.until(lambda: chat.path[1:] and chat.path[1].content == "Par")
        assert chat.path[1].thoughts.text == "Which one?"
        engine.gate.set()
        await chat.answered()
        assert (chat.path[1].content, chat.path[1].thoughts.tokens) == ("Paris", 3)


async def test_a_limit_that_ends_the_thoughts_is_said(store: SqliteStore) -> None:
    class Short(FakeEngine):
        def _finished(self, request: Generate, text: str, beams: list) -> Finished:  # type: ignore[type-arg]
            return msgspec.structs.replace(super()._finished(request, text, beams), finish_reason="length")

    engine = Short(lambda request: [])
    engine.thoughts = THOUGHTS
    chat = await answered(engine, store)
    assert "before the answer began" in chat.path[1].note


@pytest.mark.parametrize(
    ("settings", "thinking", "effort"),
    [
        (Settings(), None, ""),
        (Settings(thinking="off"), False, ""),
        (Settings(thinking="on", effort="low"), True, "low"),
    ],
)
async def test_the_model_is_told_how_to_think(
    store: SqliteStore, settings: Settings, thinking: bool | None, effort: str
) -> None:
    engine = FakeEngine()
    await answered(engine, store, settings)
    (request,) = engine.sent(Generate)
    assert isinstance(request, Generate) and (request.thinking, request.effort) == (thinking, effort)


async def test_an_export_has_thoughts_only_if_asked(store: SqliteStore, tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.thoughts = THOUGHTS
    chat = await answered(engine, store)
    thread = chat.controller.thread
    for saved in (True, False):
        if not saved:
            thread.path[0].dirty = True
        plain = export_thread(store, thread, tmp_path / f"plain-{saved}.md").read_text()
        assert "France" not in plain and "Paris is the capital." in plain
        full = export_thread(store, thread, tmp_path / f"full-{saved}.md", thoughts=True).read_text()
        assert "> France is a country.\n>\n> Its capital is Paris.\n\nParis is the capital." in full
        plain_json = json.loads(export_thread(store, thread, tmp_path / f"plain-{saved}.json").read_text())
        assert "thoughts" not in plain_json["messages"][1]
        full_json = json.loads(export_thread(store, thread, tmp_path / f"full-{saved}.json", thoughts=True).read_text())
        assert full_json["messages"][1]["thoughts"]["text"] == WHOLE.text


# --- on the screen ------------------------------------------------------------------------------------------------


async def test_thoughts_are_folded_and_a_key_opens_them(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.thoughts = THOUGHTS
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Which city?")
        assert "▸ Thought for 3.0 s, 3 tokens\nParis is the capital." in shown(app)[1]
        await pilot.press("f9")
        assert f"▾ Thought for 3.0 s, 3 tokens\n{WHOLE.text}\nParis" in shown(app)[1]
        await ask(pilot, app, "And now?")
        assert WHOLE.text in shown(app)[3]
        await pilot.press("ctrl+right_square_bracket")
        assert not any(WHOLE.text in text for text in shown(app))
        await pilot.press("shift+up", "t")
        assert [WHOLE.text in text for text in shown(app)] == [False, False, False, True] and notice(app) == ""
        # What is above the screen is said.
        engine.answer = lambda request: ["\n\n".join(map(str, range(60)))]
        await pilot.press("escape")
        await ask(pilot, app, "Count")
        await pilot.press("f9")
        await wait_until(pilot, lambda: notice(app).startswith("The thoughts are folded now, above"))


async def test_no_thoughts_to_open_is_said(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Which city?")
        await pilot.press("f9")
        await wait_until(pilot, lambda: any("has thoughts" in note.message for note in app._notifications))
        assert notice(app) == ""
        view = app.screen.query(MessageView).last()
        assert view.check_action("thoughts", ()) is False


async def test_while_the_model_thinks_a_line_grows(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.thoughts, engine.gate = THOUGHTS, asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.fill("Which city?")
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(shown(app)) == 2 and "▸ Thinking for 1.0 s, 1 token" in shown(app)[1])
        await pilot.press("f9")
        await wait_until(pilot, lambda: THOUGHTS[0] in shown(app)[1])
        assert controller(app).status.phase is Phase.THINKING
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy and "Paris is the capital." in shown(app)[1])
        assert f"{WHOLE.text}\nParis" in shown(app)[1]


async def test_what_is_copied_has_open_thoughts_only(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.thoughts = THOUGHTS
    app = make_app()
    copied: list[str] = []
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        post = app.chat.post_message
        monkeypatch.setattr(
            app.chat,
            "post_message",
            lambda message: (
                copied.append(message.text) is None if isinstance(message, CopyRequested) else post(message)
            ),
        )
        await ask(pilot, app, "Which city?")
        await pilot.press("shift+up", "c", "t", "c")
        await pilot.pause()
    assert copied == [
        "Paris is the capital.",
        "> France is a country.\n>\n> Its capital is Paris.\n\nParis is the capital.",
    ]


def test_long_thoughts_are_drawn_from_their_end_while_they_grow() -> None:
    entry = Entry("assistant", "", state="writing")
    entry.thoughts = Thoughts("\n".join(f"line {number}" for number in range(2_000)), 5, 1.0)
    view = MessageView(entry, Highlighter(), Thumbnails(print, SixelTable()), thoughts_open=True)
    view._parts = []
    text = view.written(80).plain
    assert "line 1999" in text and "line 10\n" not in text and len(text) < LIVE_THOUGHTS + 200
    view._parts = None
    entry.state = "complete"
    assert "line 10\n" in view.written(80).plain


@pytest.mark.parametrize(
    ("thoughts", "live", "line"),
    [
        (Thoughts("x", 1, 0.0), False, "▸ Thought for 1 token"),
        (Thoughts("x", 1234, 65.4), False, "▸ Thought for 65 s, 1,234 tokens"),
        (Thoughts("x"), False, "▸ Thoughts"),
        (Thoughts("x"), True, "▸ Thinking…"),
    ],
)
def test_the_line_that_stands_for_them(thoughts: Thoughts, live: bool, line: str) -> None:
    assert thoughts_line(thoughts, is_open=False, live=live).plain == line
