"""The settings: changed, saved and used; the prediction before a model is loaded; what cannot be had."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, RadioButton, RadioSet, Static

from app.settings.file import open_settings
from app.settings.schema import GROUPS
from app.tui.application import ChatApp
from app.tui.screens import settings as settings_shown
from app.tui.screens.settings import Prediction, SettingRow, SettingsScreen, prediction
from engine.ipc.messages import (
    DeviceMemory,
    Failed,
    Generate,
    Load,
    Plan,
)
from tests.app.fake_engine import PLANNED, FakeEngine
from tests.app.tui.screen_helpers import MACHINE, MakeApp, ask, controller, ready, wait_until

FULL = DeviceMemory(
    device="Some GPU", total=24_000_000_000, free=20_000_000_000, trunk=4_000_000_000, experts=19_200_000_000
)


def test_a_shortfall_comes_first() -> None:
    short = msgspec.structs.replace(PLANNED, fits=False, shortfall=3_200_000_000, memory=[FULL])
    lines = prediction(short, 80).plain.splitlines()
    assert lines[0] == "starter does not fit in memory: 3.2 GB are missing."
    assert "Some GPU 23.2 GB of 24.0 GB" in lines[3] or "Some GPU 23.2 GB of 24.0 GB" in lines[2]


def test_a_prediction_says_what_it_rests_on() -> None:
    text = prediction(PLANNED, 100).plain
    assert "about 96.4 tok/s" in text and "prompts at 1,069 tok/s" in text and "48 GB/s, measured here" in text
    assert "CPU 824 MB of 25.0 GB" in text and "21.0 GB free" in text
    assert "runtime: native – no GPU is used" in text
    unknown = msgspec.structs.replace(PLANNED, tokens_per_s=None, basis="run `privatellm bench experts`")
    assert prediction(unknown, 100).plain.startswith("No predicted speed  run `privatellm bench experts`")
    assert prediction("There is no model\ncalled x.", 80).plain == "No prediction: There is no model called x."


pytestmark = pytest.mark.usefixtures("few_settings")


@pytest.mark.soak
async def test_a_setting_is_changed_saved_and_used(make_app: MakeApp, engine: FakeEngine, home: Path) -> None:
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        rows = {row.setting.key: row for row in app.screen.query(SettingRow)}
        field = rows["max_tokens"].query_one(Input)
        field.focus()
        field.value = "no number"
        await pilot.press("enter")
        assert "Answer limit cannot be" in str(rows["max_tokens"].query_one(".setting-help", Static).visual)
        field.value = "7"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert open_settings(home / "settings.toml").settings.max_tokens == 7
        await ask(pilot, app, "q")
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate)
        assert request.max_tokens == 7


@pytest.mark.soak
async def test_leaving_does_not_drop_a_wrong_value_unsaid(make_app: MakeApp, home: Path) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        rows = await open_settings_screen(pilot, app)
        before = app.settings
        field = rows["max_tokens"].query_one(Input)
        field.focus()
        field.value = "no number"
        await pilot.press("tab", "escape")
        await pilot.pause()
        assert isinstance(app.screen, SettingsScreen) and app.focused is field
        assert "Answer limit cannot be" in str(rows["max_tokens"].query_one(".setting-help", Static).visual)
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert app.settings == before and not (home / "settings.toml").exists()


def prediction_of(app: ChatApp) -> str:
    return str(app.screen.query_one(Prediction).render())


async def open_settings_screen(pilot: Pilot[int], app: ChatApp) -> dict[str, SettingRow]:
    await pilot.press("ctrl+s")
    await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen) and app.screen.query(Prediction))
    return {row.setting.key: row for row in app.screen.query(SettingRow)}


def planned_loads(engine: FakeEngine) -> list[Load]:
    return [request.load for request in engine.sent(Plan) if isinstance(request, Plan)]


@pytest.mark.soak
async def test_the_prediction_comes_before_the_model_is_loaded_again(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        rows = await open_settings_screen(pilot, app)
        await wait_until(pilot, lambda: "96.4 tok/s" in prediction_of(app))
        rows["cpu_threads"].query_one(Input).focus()
        await pilot.press("3")
        await wait_until(pilot, lambda: planned_loads(engine)[-1].cpu_threads == 3)
        rows["runtime"].query_one(RadioSet).focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: planned_loads(engine)[-1].runtime == "native")
        assert planned_loads(engine)[-1].cpu_threads == 3
        assert "Pending changes" in prediction_of(app)
        assert len(engine.sent(Load)) == 1 and app.settings.runtime == "auto"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat and len(engine.sent(Load)) == 2)
        await ready(pilot, app)
        (_, load) = engine.sent(Load)
        assert isinstance(load, Load) and (load.runtime, load.cpu_threads) == ("native", 3)
        assert (app.settings.runtime, app.settings.cpu_threads) == ("native", 3)


@pytest.mark.soak
async def test_changes_that_are_taken_back_load_nothing(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        rows = await open_settings_screen(pilot, app)
        rows["runtime"].query_one(RadioSet).focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "Pending changes" in prediction_of(app))
        await pilot.press("f6")
        await wait_until(pilot, lambda: app.screen.query(Prediction) and "96.4 tok/s" in prediction_of(app))
        assert "Not applied" not in prediction_of(app)
        assert planned_loads(engine)[-1].runtime == "auto"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert len(engine.sent(Load)) == 1


@pytest.mark.soak
async def test_policy_and_gpu_memory_go_into_the_load(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    app.machine = dataclasses.replace(MACHINE, gpu=True)
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        rows = await open_settings_screen(pilot, app)
        rows["policy"].query_one(RadioSet).focus()
        await pilot.press("down", "down", "enter")
        rows["gpu_expert_memory"].query_one(Input).focus()
        await pilot.press(*"1.5")
        await wait_until(pilot, lambda: planned_loads(engine)[-1].gpu_expert_bytes == 3 * 2**29)
        await pilot.press("escape")
        await wait_until(pilot, lambda: len(engine.sent(Load)) == 2)
        load = engine.sent(Load)[-1]
        assert isinstance(load, Load) and (load.policy, load.gpu_expert_bytes) == ("monde", 3 * 2**29)


@pytest.mark.soak
async def test_sharing_is_greyed_as_a_whole_without_a_gpu(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        rows = await open_settings_screen(pilot, app)
        # The papers' policies are not named where there is nothing to choose.
        assert not rows["policy"].query(RadioSet) and rows["gpu_expert_memory"].query_one(Input).disabled
        assert str(rows["policy"].query_one(".only-choice", Static).visual) == "Balanced: the split that ends first"
        assert "no GPU found" in str(rows["policy"].query_one(".setting-help", Static).visual)
        assert not rows["cpu_threads"].query_one(Input).disabled


@pytest.mark.soak
async def test_what_cannot_be_predicted_is_said_in_a_line(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.planned = Failed(error="There is no model called 'x'; did you mean starter?", kind="bad-input")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await open_settings_screen(pilot, app)
        await wait_until(pilot, lambda: "No prediction: There is no model called 'x'" in prediction_of(app))


@pytest.mark.soak
async def test_the_prediction_waits_for_an_engine_that_is_not_up(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.start_gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.chat is not None and app.chat.is_mounted)
        await open_settings_screen(pilot, app)
        await wait_until(pilot, lambda: "when the engine is running" in prediction_of(app))
        engine.start_gate.set()
        await wait_until(pilot, lambda: "96.4 tok/s" in prediction_of(app))


@pytest.mark.soak
async def test_the_prediction_comes_while_an_answer_is_written(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        controller(app).submit("q")
        await wait_until(pilot, lambda: controller(app).busy)
        rows = await open_settings_screen(pilot, app)
        await wait_until(pilot, lambda: "96.4 tok/s" in prediction_of(app))
        rows["runtime"].query_one(RadioSet).focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "answer is stopped" in prediction_of(app))
        await pilot.press("f6")
        engine.gate.set()
        await pilot.press("escape")
        await wait_until(pilot, lambda: not controller(app).busy)
        assert controller(app).thread.path[-1].content == "Paris is the capital."


@pytest.mark.soak
async def test_what_cannot_be_had_is_greyed_with_the_reason(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        buttons = {button.name: button for button in app.screen.query(RadioButton)}
        assert buttons["hybrid"].disabled
        assert "no GPU found" in str(buttons["hybrid"].label)
        assert buttons["mlx"].disabled
        assert not buttons["ring"].disabled
        assert not buttons["cpu"].disabled


@pytest.mark.soak
async def test_settings_may_be_left_before_all_of_them_are_shown(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        for _ in range(3):
            await app.push_screen(SettingsScreen(controller(app), None))
            assert not app.screen.query("#group-screen")
            assert isinstance(app.screen, SettingsScreen)
            app.screen.action_leave()
            await wait_until(pilot, lambda: app.screen is app.chat)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.screen.query("#group-screen"))
        assert [title.id for title in app.screen.query(".group-title")] == [f"group-{group}" for group in GROUPS]
        rows = [row.setting for row in app.screen.query(SettingRow)]
        assert rows == sorted(settings_shown.SCHEMA, key=lambda setting: list(GROUPS).index(setting.group))
