"""The list of models: one is fetched, chosen, or refused in a sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList, Static

from app.settings.file import open_settings
from app.tui.application import ChatApp
from app.tui.screens.models import ModelsScreen
from engine.ipc.messages import Pull
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, shown, wait_until

pytestmark = pytest.mark.usefixtures("few_settings")


def _details(app: ChatApp) -> str:
    """What the list of models says of the marked one."""
    return str(app.screen.query_one("#model-details Static", Static).visual)


async def test_a_model_is_fetched_and_can_be_stopped(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.pull_gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f3")
        await wait_until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        models = app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: models.option_count > 2)
        models.highlighted = 1
        await pilot.pause()
        assert "p" not in app.screen.active_bindings
        await pilot.press("enter")
        await wait_until(pilot, lambda: "p" in app.screen.active_bindings)
        await wait_until(pilot, lambda: "downloading 420 MB of 1.0 GB" in _details(app))
        await pilot.press("p")
        await wait_until(pilot, lambda: "420 MB of 1.0 GB are kept" in _details(app))
        engine.pull_gate.clear()
        await pilot.press("p")
        await wait_until(pilot, lambda: controller(app).pulling.active)
        assert len(engine.sent(Pull)) == 2


async def test_the_list_of_models_is_closed_before_they_are_found(make_app: MakeApp) -> None:
    """Looking reads the disk in a thread, which may take longer than the person looks."""
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press("f3")
        await wait_until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        screen = app.screen
        await pilot.press("escape")
        await wait_until(pilot, lambda: not screen.query("#model-problem"))
        assert isinstance(screen, ModelsScreen)
        screen._found([], "found too late")
        await ask(pilot, app, "still there?")
        assert "Paris" in shown(app)[1]


async def test_models_of_other_programs_can_be_chosen(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    (tmp_path / "M-Q4_K_M.gguf").write_bytes(b"GGUF")
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f3")
        await wait_until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        models = app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: models.option_count > 2)
        prompts = [str(option.prompt) for option in models.options]
        (index,) = (i for i, prompt in enumerate(prompts) if "llama.cpp:M-Q4_K_M" in prompt)
        models.highlighted = index
        await pilot.pause()
        assert "in llama.cpp" in _details(app) and str(tmp_path / "M-Q4_K_M.gguf") in _details(app)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.settings.model == "llama.cpp:M-Q4_K_M")


async def test_an_unknown_model_is_said_at_once(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f3")
        await wait_until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        field = app.screen.query_one("#other", Input)
        field.focus()
        field.value = "nosuchmodel"
        await pilot.press("enter")
        assert "no model called" in str(app.screen.query_one("#model-problem", Static).visual)


async def test_a_model_that_cannot_be_loaded_leaves_the_settings_as_they_were(
    make_app: MakeApp, engine: FakeEngine, home: Path
) -> None:
    engine.load_errors = {"/models/broken": "config.json is missing."}
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.fill("/model /models/broken")
        await pilot.press("enter")
        await wait_until(pilot, lambda: "config.json is missing" in notice(app))
        await ready(pilot, app)
        assert app.settings.model == "starter"
        assert open_settings(home / "settings.toml").settings.model == "starter"
        await ask(pilot, app, "still there?")
        assert "Paris" in shown(app)[1]
