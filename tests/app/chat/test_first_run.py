"""Nothing is downloaded unasked: not on a first start, and not in place of a model that cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from app.chat.state import Phase
from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.tui.application import ChatApp
from app.tui.screens.first_run import FirstRunScreen
from app.tui.screens.models import ModelsScreen
from engine.ipc.messages import Load, Pull
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MACHINE, ask, controller, wait_until


@asynccontextmanager
async def first_start(engine: FakeEngine, store: ConversationStore, home: Path) -> AsyncIterator[Pilot[int]]:
    """A chat whose starter is missing until the engine has fetched it."""
    app = ChatApp(
        engine, store, open_settings(home / "settings.toml"), machine=MACHINE,
        is_missing=lambda model: model == "starter" and not any(pull.model == "starter" for pull in pulls(engine)),
    )  # fmt: skip
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: isinstance(app.screen, FirstRunScreen) and rows(app) == 4)
        yield pilot


def pulls(engine: FakeEngine) -> list[Pull]:
    return [request for request in engine.requests if isinstance(request, Pull)]


def rows(app: object) -> int:
    assert isinstance(app, ChatApp)
    return app.screen.query_one(OptionList).option_count


def shown(app: object) -> str:
    assert isinstance(app, ChatApp)
    models = app.screen.query_one(OptionList)
    return "\n".join(str(models.get_option_at_index(row).prompt) for row in range(models.option_count))


@pytest.mark.parametrize(
    "written",
    ["[model]\nmodel = 3\n", "model = 'mine'\n", "[model\n", "[model]\nmodel = ''\n"],
    ids=["number", "no table", "damaged", "empty"],
)
async def test_a_refused_model_fetches_nothing(
    engine: FakeEngine, store: ConversationStore, home: Path, written: str
) -> None:
    path = home / "settings.toml"
    path.write_text(written)
    app = ChatApp(engine, store, open_settings(path), machine=MACHINE, is_missing=lambda model: True)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.chat is not None and engine.sent(Load))
        assert not engine.sent(Pull) and not isinstance(app.screen, FirstRunScreen)
        # Asked for by name it is fetched.
        controller(app).change_settings({"model": "starter"})
        controller(app).load_again()
        await wait_until(pilot, lambda: engine.sent(Pull))


async def test_a_first_start_offers_and_fetches_nothing(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    async with first_start(engine, store, home) as pilot:
        app = pilot.app
        assert isinstance(app, ChatApp)
        text = shown(app)
        assert "starter" in text and "93" not in text.split("starter")[0] and "92.9 MB" in text
        assert text.count("tokens/s") == 3 and "often wrong" in text and "Choose another" in text
        await wait_until(pilot, lambda: controller(app).status.phase is Phase.UNAVAILABLE)
        await pilot.press("escape")
        # A question without a model says so, and fetches nothing.
        await ask(pilot, app, "Hello?")
        assert not engine.sent(Pull) and not engine.sent(Load)
        assert "not on this machine yet" in controller(app).thread.path[-1].note


async def test_one_key_downloads_pauses_continues_and_loads(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    engine.pull_gate = asyncio.Event()
    async with first_start(engine, store, home) as pilot:
        app = pilot.app
        assert isinstance(app, ChatApp)
        await pilot.press("1")
        await wait_until(pilot, lambda: "42 %" in shown(app))
        assert [pull.model for pull in pulls(engine)] == ["starter"] and not engine.sent(Load)
        await pilot.press("p")
        await wait_until(pilot, lambda: "Paused" in shown(app))
        assert "420 MB of 1.0 GB are kept" in shown(app)
        engine.pull_gate.clear()
        await pilot.press("p")
        await wait_until(pilot, lambda: "42 %" in shown(app))
        engine.pull_gate.set()
        await wait_until(pilot, lambda: not isinstance(app.screen, FirstRunScreen))
        await wait_until(pilot, lambda: controller(app).status.phase is Phase.READY)
        assert len(pulls(engine)) == 2
        (load,) = engine.sent(Load)
        assert isinstance(load, Load) and load.model == "starter"


async def test_a_download_that_fails_says_why_and_another_can_be_chosen(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    engine.pull_error = "The package index cannot be reached; check the network."
    async with first_start(engine, store, home) as pilot:
        app = pilot.app
        assert isinstance(app, ChatApp)
        await pilot.press("1")
        await wait_until(pilot, lambda: "cannot be reached" in shown(app))
        assert "tries again" in shown(app) and isinstance(app.screen, FirstRunScreen)
        engine.pull_error = None
        await pilot.press("2")
        await wait_until(pilot, lambda: engine.sent(Load))
        (load,) = engine.sent(Load)
        assert isinstance(load, Load) and load.model == "gpt-oss-20b-mxfp4"
        # It is also the model of the next start.
        assert open_settings(home / "settings.toml").settings.model == "gpt-oss-20b-mxfp4"


async def test_another_model_is_chosen_from_the_whole_list(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    async with first_start(engine, store, home) as pilot:
        await pilot.press("end", "enter")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, ModelsScreen))
        assert not engine.sent(Pull)


async def test_without_measurements_the_speeds_are_said_to_be_rough(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    engine.machine = type(engine.machine)(memory_bytes=8_000_000_000, memory_read=0.0)
    async with first_start(engine, store, home) as pilot:
        assert "rough" in str(pilot.app.screen.query_one("#first-machine", Static).visual)
