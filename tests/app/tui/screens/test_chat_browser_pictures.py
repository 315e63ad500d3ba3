"""How the list of conversations looks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual.pilot import Pilot

from app.chat.state import Phase
from app.conversations.database import SqliteStore
from app.conversations.opening import open_store
from app.settings.file import open_settings
from app.tui.application import ChatApp
from app.tui.screens import chat_browser
from app.tui.screens.chat_browser import ChatBrowser
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MACHINE, wait_until
from tests.support.kept_screens import CheckScreen

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
CHATS = (
    ("How do bees find their way home?", 1), ("A haiku about the rain on the roof of a small house in the hills", 25),
    ("Fix the failing test in parser.py", 24 * 60), ("Reise nach Kyoto 京都", 2 * 24 * 60),
    ("Names for a cat", 3 * 24 * 60), ("Tax questions", 12 * 24 * 60), ("SQL window functions", 40 * 24 * 60),
    ("Draft of a letter to the landlord", 400 * 24 * 60),
)  # fmt: skip
"""Titles and ages in minutes."""


@pytest.fixture
def past(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteStore]:
    """A store with conversations of many ages, as seen at noon."""
    ages = [0]
    opened = open_store(home / "past.sqlite", clock=lambda: NOON.timestamp() - 60 * ages[-1])
    for title, age in CHATS:
        ages.append(age)
        made = opened.create(model="starter", title=title)
        question = opened.add(made.id, "user", f"{title}?", parent=None)
        opened.add(made.id, "assistant", "They use the sun as a compass, and landmarks near home.", parent=question.id)
    opened.change(opened.conversations()[4].id, pinned=True)
    monkeypatch.setattr(chat_browser, "time", SimpleNamespace(time=NOON.timestamp))
    yield opened
    opened.close()


@pytest.fixture
def past_app(past: SqliteStore, engine: FakeEngine, home: Path) -> ChatApp:
    return ChatApp(engine, past, open_settings(home / "s.toml"), machine=MACHINE, is_missing=lambda model: False)


async def ready(pilot: Pilot[int]) -> ChatApp:
    app = pilot.app
    assert isinstance(app, ChatApp)
    await wait_until(pilot, lambda: app.chat is not None and app.chat.is_mounted)
    assert app.chat is not None
    chat = app.chat
    await wait_until(pilot, lambda: chat.controller.status.phase is Phase.READY)
    return app


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (40, 20)], ids=["80x24", "40x20"])
@pytest.mark.parametrize("words", ["", "the sun"], ids=["all", "search"])
def test_the_chats_screen(check_screen: CheckScreen, past_app: ChatApp, size: tuple[int, int], words: str) -> None:
    async def before(pilot: Pilot[int]) -> None:
        app = await ready(pilot)
        assert app.chat is not None
        app.chat.controller.open_conversation(app.store.conversations()[0].id)
        await pilot.press("f2")
        await wait_until(pilot, lambda: app.screen.query(ChatBrowser) and app.screen.query_one(ChatBrowser).rows.rows)
        await pilot.press("down", *words)
        await pilot.pause()

    check_screen(past_app, size, before)


@pytest.mark.sampled
@pytest.mark.parametrize("focused", [False, True], ids=["beside", "focused"])
def test_the_chats_beside_the_conversation(check_screen: CheckScreen, past_app: ChatApp, focused: bool) -> None:
    async def before(pilot: Pilot[int]) -> None:
        app = await ready(pilot)
        assert app.chat is not None
        chat = app.chat
        chat.controller.open_conversation(app.store.conversations()[0].id)
        await pilot.press("f2")
        await wait_until(pilot, lambda: chat.chats.focused and chat.query_one(ChatBrowser).rows.rows)
        await pilot.press(*(["down"] if focused else ["escape"]))
        await wait_until(pilot, lambda: not app.highlighter.busy)
        await pilot.pause()

    check_screen(past_app, (120, 30), before)
