"""How the first screen of a first start looks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.tui.application import ChatApp
from app.tui.screens.first_run import FirstRunScreen
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MACHINE, controller, wait_until
from tests.app.tui.screens.test_screens_pictures import at_sizes
from tests.support.kept_screens import CheckScreen


async def offered(pilot: Pilot[int]) -> None:
    app = pilot.app
    await wait_until(
        pilot,
        lambda: isinstance(app.screen, FirstRunScreen) and app.screen.query_one(OptionList).option_count == 4,
    )


@pytest.fixture
def app(engine: FakeEngine, store: ConversationStore, home: Path, monkeypatch: pytest.MonkeyPatch) -> ChatApp:
    monkeypatch.setattr("engine.models.store.catalogue.platform.machine", lambda: "x86_64")
    return ChatApp(engine, store, open_settings(home / "s.toml"), machine=MACHINE, is_missing=lambda model: True)


@at_sizes((80, 24), (40, 20), (120, 30))
def test_models_to_choose_from(check_screen: CheckScreen, app: ChatApp, size: tuple[int, int]) -> None:
    check_screen(app, size, offered)


@at_sizes((80, 24), (40, 20))
def test_downloads_on_the_first_screen(
    check_screen: CheckScreen, app: ChatApp, engine: FakeEngine, size: tuple[int, int]
) -> None:
    async def downloading(pilot: Pilot[int]) -> None:
        await offered(pilot)
        pulling = controller(app).pulling
        engine.pull_error = (
            "The starter model could not be fetched (no route to host); check the network and try again."
        )
        await pilot.press("1")
        await wait_until(pilot, lambda: "starter" in pulling.stopped)
        engine.pull_gate = asyncio.Event()
        await pilot.press("2")
        await wait_until(pilot, lambda: any(progress.total for progress in pulling.active.values()))
        await pilot.press("p")
        await wait_until(pilot, lambda: len(pulling.stopped) == 2)
        engine.pull_gate.clear()
        await pilot.press("3")
        await wait_until(pilot, lambda: any(progress.total for progress in pulling.active.values()))

    check_screen(app, size, downloading)
