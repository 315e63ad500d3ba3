"""The list of conversations under the keys and the mouse of a person."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import Input

from app.conversations.searching import HIT_END, HIT_START
from app.conversations.store import ConversationStore
from app.tui.application import ChatApp
from app.tui.screens.chat_browser import LEAST_ROWS, ChatBrowser, ChatPreview
from app.tui.screens.chat_rows import ChatRows, around_hit
from app.tui.screens.chats_side import ConversationsScreen
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, shown, wait_until


async def opened(pilot: Pilot[int], app: ChatApp) -> ChatBrowser:
    await pilot.press("f2")
    await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
    return app.screen.query_one(ChatBrowser)


def titles(app: ChatApp) -> list[str]:
    return [row.conversation.title for row in app.screen.query_one(ChatRows).rows]


def saved(store: ConversationStore, *names: str) -> list[int]:
    """Conversations of these titles, each with a question of its title, the last one the newest."""
    numbers = []
    for name in names:
        numbers.append(store.create(model="starter").id)
        store.add(numbers[-1], "user", name, parent=None)
    return numbers


@pytest.mark.soak
async def test_typing_searches_wherever_one_is_and_enter_opens(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "about zebras")
        await pilot.press("ctrl+n")
        await ask(pilot, app, "about lions, read daily")
        browser = await opened(pilot, app)
        assert titles(app) == ["about lions, read daily", "about zebras"]
        # Letters that once renamed, archived, deleted, exported.
        await pilot.press("down", *"read d")
        assert browser.search_field.value == "read d"
        assert titles(app) == ["about lions, read daily"]
        await pilot.press("y", "v")
        assert browser.search_field.value == "read dyv" and titles(app) == []
        await pilot.pause()
        said = browser.query_one(".chats-problem")
        assert said.display and said.region.y == browser.search_field.region.bottom
        await pilot.press("escape")
        assert browser.search_field.value == "" and len(titles(app)) == 2
        await pilot.click(ChatRows, offset=(10, 12))
        await pilot.press(*"zebras")
        await wait_until(pilot, lambda: titles(app) == ["about zebras"])
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await wait_until(pilot, lambda: controller(app).thread.path[0].content == "about zebras")
        assert "about zebras" in shown(app)[0]
        await opened(pilot, app)
        # The rows are below the title of their group.
        await pilot.click(ChatRows, offset=(10, 1))
        await wait_until(pilot, lambda: app.screen is app.chat)
        await wait_until(pilot, lambda: controller(app).thread.path[0].content == "about lions, read daily")


@pytest.mark.sampled
@pytest.mark.parametrize("width", [40, 140])
async def test_a_search_lists_each_chat_once_with_the_number_of_its_hits(
    make_app: MakeApp, store: ConversationStore, width: int
) -> None:
    often, _ = saved(store, "zebras and their stripes in the morning", "one zebra")
    store.add(often, "assistant", "zebras", parent=None)
    app = make_app()
    async with app.run_test(size=(width, 20)) as pilot:
        await ready(pilot, app)
        await pilot.press("f2")
        await wait_until(pilot, lambda: bool(app.screen.query(ChatBrowser)))
        browser = app.screen.query_one(ChatBrowser)
        browser.focus_search()
        await pilot.press(*"zebra")
        await wait_until(pilot, lambda: len(browser.rows.rows) == 2)
        assert sorted(row.hits for row in browser.rows.rows) == [1, 2]
        lines = [browser.rows.render_line(line).text for line in range(4)]
        assert sum("2 hits" in line for line in lines) == 1 and not any("1 hit" in line for line in lines)


@pytest.mark.parametrize("width", [8, 20, 33, 80])
def test_the_hit_of_a_snippet_is_within_its_line(width: int) -> None:
    for before in ("", "one ", "a beginning of many words, 日本語 too, ", "x" * 90):
        snippet = f"{before}{HIT_START}zebra{HIT_END} and so on"
        shown = around_hit(snippet, width)
        line = shown.replace(HIT_START, "").replace(HIT_END, "")
        assert cell_len(line[: line.index("zebra") + 5]) <= width
        assert shown == snippet or (shown.startswith("…") and snippet.endswith(shown[1:]))
    assert around_hit("no hit in a long line", 5) == "no hit in a long line"


@pytest.mark.soak
async def test_chats_are_pinned_renamed_archived_deleted_and_brought_back(
    make_app: MakeApp, store: ConversationStore
) -> None:
    saved(store, "one", "two", "three")
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await opened(pilot, app)
        assert titles(app) == ["three", "two", "one"]
        await pilot.press("down", "down", "ctrl+t")
        assert titles(app) == ["one", "three", "two"]
        await pilot.press("ctrl+r")
        await wait_until(pilot, lambda: not isinstance(app.screen, ConversationsScreen))
        app.screen.query_one(Input).value = "new name"
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        await wait_until(pilot, lambda: titles(app) == ["new name", "three", "two"])
        await pilot.press("ctrl+t")
        await wait_until(pilot, lambda: titles(app) == ["three", "two", "new name"])
        await pilot.press("ctrl+y")
        await wait_until(pilot, lambda: titles(app) == ["three", "two"])
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: titles(app) == ["new name"])
        await pilot.press("ctrl+y", "ctrl+l")
        await wait_until(pilot, lambda: len(titles(app)) == 3)
        await pilot.press("up", "up", "up", "ctrl+d")
        await wait_until(pilot, lambda: titles(app) == ["two", "new name"])
        await pilot.press("ctrl+d")
        await wait_until(pilot, lambda: titles(app) == ["new name"])
        assert [found.title for found in store.conversations()] == ["new name"]
        await pilot.press("ctrl+z")
        await wait_until(pilot, lambda: titles(app) == ["two", "new name"])
        await pilot.press("ctrl+z")
        await wait_until(pilot, lambda: titles(app) == ["three", "two", "new name"])
        await pilot.press("ctrl+z")
        assert len(store.conversations()) == 3


async def test_the_chat_that_is_being_answered_is_deleted_and_brought_back(
    make_app: MakeApp, store: ConversationStore, engine: FakeEngine
) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: ["half", " whole"]
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        controller(app).submit("a question")
        await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)
        await opened(pilot, app)
        await pilot.press("ctrl+d")
        await wait_until(pilot, lambda: not titles(app))
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        assert controller(app).status.unsaved == ""
        assert controller(app).thread.path == []
        await pilot.press("ctrl+z")
        await wait_until(pilot, lambda: titles(app) == ["a question"])
        assert store.shown(store.conversations()[0].id)[0].content == "a question"


async def test_a_temporary_chat_is_no_chat_of_the_list(make_app: MakeApp, store: ConversationStore) -> None:
    saved(store, "kept")
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.action_command("temporary")
        await pilot.pause()
        await ask(pilot, app, "fleeting")
        browser = await opened(pilot, app)
        assert titles(app) == ["kept"] and browser.rows.current is None
        await pilot.press("ctrl+d")
        await wait_until(pilot, lambda: not titles(app))
        assert controller(app).thread.path[0].content == "fleeting"


async def test_a_long_list_is_turned_by_pages(make_app: MakeApp, store: ConversationStore) -> None:
    saved(store, *(f"chat {number}" for number in range(40)))
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await opened(pilot, app)
        rows = app.screen.query_one(ChatRows)
        await pilot.press("pagedown")
        assert rows.marked == rows.page > 3
        await pilot.press(*["ctrl+f"] * 8, "down")
        assert rows.marked == 39 and rows.scroll_offset.y > 20
        await pilot.press(*["ctrl+b"] * 8, "up")
        assert rows.marked == 0 and rows.scroll_offset.y == 0


@pytest.mark.soak
async def test_chats_are_imported_pinned_and_archived_by_commands(
    make_app: MakeApp, store: ConversationStore, home: Path
) -> None:
    file = home / "mine.json"
    file.write_text(json.dumps({"title": "From elsewhere", "messages": [{"role": "user", "content": "hello"}]}))
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.fill(f"/import {file}")
        await pilot.press("enter")
        await wait_until(pilot, lambda: [chat.title for chat in store.conversations()] == ["From elsewhere"])
        app.chat.prompt.fill(f"/import {home}")
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Nothing was imported" in notice(app))
        await opened(pilot, app)
        await pilot.press("ctrl+g")
        await wait_until(pilot, lambda: not isinstance(app.screen, ConversationsScreen))
        app.screen.query_one(Input).value = str(file)
        await pilot.press("enter")
        await wait_until(pilot, lambda: any("0 new, 1 already here" in said.message for said in app._notifications))
        await pilot.press("enter")
        await wait_until(pilot, lambda: controller(app).thread.title == "From elsewhere")
        app.chat.action_command("pin")
        await wait_until(pilot, lambda: store.conversations()[0].pinned)
        app.chat.action_command("archive")
        await wait_until(pilot, lambda: not store.conversations())


# --- beside the chat ------------------------------------------------------------------------------------------------


def beside(app: ChatApp) -> bool:
    assert app.chat is not None
    return app.chat.query_one("#chats-side").display


@pytest.mark.soak
async def test_the_list_stands_beside_the_chat_where_there_is_room(
    make_app: MakeApp, store: ConversationStore, engine: FakeEngine
) -> None:
    saved(store, "one", "two")
    app = make_app()
    async with app.run_test(size=(120, 30)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None and not beside(app)
        await pilot.press("ctrl+o")
        await wait_until(pilot, lambda: app.chat and app.chat.chats.focused)
        assert app.screen is app.chat and app.settings.show_chats and titles(app) == ["two", "one"]
        # Keys of the list come before those of the chat, and only while it has the focus.
        await pilot.press("down", "ctrl+t")
        await wait_until(pilot, lambda: titles(app) == ["one", "two"])
        await pilot.press(*"on", "enter")
        await wait_until(pilot, lambda: controller(app).thread.title == "one")
        assert app.focused is app.chat.prompt and app.chat.chats.browser is not None
        assert app.chat.chats.browser.rows.current == store.conversations()[-1].id
        await pilot.press("ctrl+o", "escape", "escape")
        assert app.focused is app.chat.prompt and titles(app) == ["one", "two"]
        await pilot.press("ctrl+n")
        await ask(pilot, app, "three")
        await wait_until(pilot, lambda: titles(app) == ["one", "three", "two"])
        controller(app).rename("3")
        await wait_until(pilot, lambda: titles(app) == ["one", "3", "two"])
        await pilot.click(ChatRows, offset=(8, 5))
        await wait_until(pilot, lambda: controller(app).thread.title == "two")
        # It gives way to another panel, and where the terminal is narrow; then the same key opens a screen.
        await pilot.press("ctrl+b")
        await wait_until(pilot, lambda: not beside(app))
        await pilot.press("ctrl+b")
        await wait_until(pilot, lambda: beside(app))
        await pilot.resize_terminal(119, 30)
        await wait_until(pilot, lambda: not beside(app))
        await opened(pilot, app)
        await pilot.press("escape")
        await pilot.resize_terminal(160, 30)
        await wait_until(pilot, lambda: beside(app))
        await pilot.press("ctrl+b")
        await wait_until(pilot, lambda: app.chat and app.chat.panels.beside)
        assert beside(app)
        await pilot.press("ctrl+b", "ctrl+o", "ctrl+o")
        assert not beside(app) and not app.settings.show_chats and app.focused is app.chat.prompt


async def test_a_terminal_may_become_narrow_beside_the_list(make_app: MakeApp) -> None:
    app = make_app(show_chats=True)
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot, app)
        await wait_until(pilot, lambda: beside(app))
        await pilot.resize_terminal(39, 20)
        await wait_until(pilot, lambda: not beside(app))
        await pilot.resize_terminal(4, 20)
        await wait_until(pilot, lambda: app.chat and app.chat.prompt.size.width == 6)


@pytest.mark.soak
async def test_the_list_beside_the_chat_takes_its_own_keys_only(make_app: MakeApp) -> None:
    app = make_app(show_chats=True)
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "One")
        assert app.chat is not None
        await wait_until(pilot, lambda: beside(app))
        for key, screen in (("f3", "ModelsScreen"), ("f8", "MachinesScreen"), ("f7", "SamplingScreen")):
            await pilot.press("f2", key)
            await wait_until(pilot, lambda screen=screen: type(app.screen).__name__ == screen)  # type: ignore[misc]
            await pilot.press("escape")
            await wait_until(pilot, lambda: app.screen is app.chat)
        await pilot.press("f2", "f5")
        await wait_until(pilot, lambda: app.chat and app.chat.panels.panel is not None)
        await pilot.press("ctrl+t")
        await wait_until(pilot, lambda: app.chat and app.chat.controller.store.conversations()[0].pinned)


async def test_the_list_beside_the_chat_is_there_at_the_next_start_and_left_alone_by_streaming(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: ["word "] * 50
    looks = []
    show = ChatRows.show
    monkeypatch.setattr(ChatRows, "show", lambda *arguments: (looks.append(1), show(*arguments)))
    app = make_app(show_chats=True)
    async with app.run_test(size=(120, 30)) as pilot:
        await ready(pilot, app)
        await wait_until(pilot, lambda: beside(app) and looks)
        assert app.chat is not None and app.focused is app.chat.prompt
        controller(app).submit("a question")
        await wait_until(pilot, lambda: titles(app) == ["a question"])
        rows = app.chat.query_one(ChatRows)
        await wait_until(pilot, lambda: rows.answering)
        before = len(looks)
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        await wait_until(pilot, lambda: not rows.answering)
        # Once for the end of the answer.
        assert len(looks) <= before + 1


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(100, 32), (80, 24)])
async def test_the_marked_chat_is_shown_below_the_list_where_there_is_room(
    make_app: MakeApp, store: ConversationStore, size: tuple[int, int]
) -> None:
    for name in ("rain", "sun"):
        chat = store.create(model="m").id
        question = store.add(chat, "user", f"about [b]{name}[/b]\nmore", parent=None)
        store.add(chat, "assistant", f"first\n\x1b[31mthe end of {name}", parent=question.id)
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await ready(pilot, app)
        await opened(pilot, app)
        preview = app.screen.query_one(ChatPreview)
        if size[1] < LEAST_ROWS:
            await pilot.pause()
            assert not preview.display
            return
        wanted = {name: f"about [b]{name}[/b] more\nfirst\nthe end of {name}" for name in ("rain", "sun")}
        await wait_until(pilot, lambda: str(preview.render()) == wanted["sun"])
        assert preview.display
        await pilot.press("down")
        await wait_until(pilot, lambda: str(preview.render()) == wanted["rain"])
