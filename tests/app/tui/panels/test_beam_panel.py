"""The panels and the other screens under the keys of a person."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, RadioButton, RadioSet, Static

from app.conversations.exporting import export_problem
from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.settings.schema import GROUPS, THEMES
from app.tui.application import ChatApp
from app.tui.panels.beam_panel import Candidates, Widths
from app.tui.panels.panel import PanelScreen
from app.tui.screens import settings as settings_shown
from app.tui.screens.models import ModelsScreen
from app.tui.screens.settings import Prediction, SettingRow, SettingsScreen
from engine.ipc.messages import Beam, ExpertMovement, Failed, Generate, LayerTimes, Load, PhaseTimes, Plan, Pull, Timing
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MACHINE, MakeApp, ask, controller, notice, ready, shown, wait_until

pytestmark = pytest.mark.usefixtures("few_settings")

BEAMS = [Beam("first", [1], -0.1), Beam("second", [2], -0.2), Beam("third", [3], -0.3)]


async def test_a_width_of_beams_is_chosen_and_a_candidate_picked(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.beam_steps = [BEAMS]
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        await wait_until(pilot, lambda: "1 beam" in str(app.focused.render() if app.focused else ""))
        await pilot.press("right", "right")
        assert "Needs 570 MB of 2.4 GB free memory" in str(app.focused.render() if app.focused else "")
        assert "81 % of the speed of one beam" in str(app.focused.render() if app.focused else "")
        await pilot.press("enter")
        assert (controller(app).setup.options.beams, app.settings.beams) == (3, 1)
        await ask(pilot, app, "q")
        assert "first" in shown(app)[1]
        app.screen.query_one(Candidates).focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "second" in shown(app)[1])
        assert "2/2" in shown(app)[1]


async def test_a_width_is_typed_in_the_panel(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        widths = app.screen.query_one(Widths)
        marked = []
        for pressed in ("0", "1", "2", "1", "6", "6", "right", "1", "left", "4"):
            await pilot.press(pressed)
            marked.append(widths.marked)
        assert marked == [1, 1, 12, 1, 16, 6, 7, 1, 1, 4]
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert controller(app).setup.options.beams == 4 and app.chat.prompt.text == ""


async def test_the_panel_follows_a_width_that_is_set_elsewhere(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        controller(app).change_settings({"beams": 5})
        await wait_until(pilot, lambda: "now 5" in str(app.screen.query_one(Widths).render()))


async def test_the_costs_are_asked_when_a_model_is_loaded_while_the_panel_is_open(
    make_app: MakeApp, engine: FakeEngine
) -> None:
    engine.load_gate = asyncio.Event()
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        await wait_until(pilot, lambda: "once the model is loaded" in str(app.screen.query_one(Widths).render()))
        engine.load_gate.set()
        await wait_until(pilot, lambda: "of 2.4 GB free memory" in str(app.screen.query_one(Widths).render()))


async def test_a_width_that_does_not_fit_is_refused(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        await wait_until(pilot, lambda: "1 beam" in str(app.focused.render() if app.focused else ""))
        await pilot.press(*["right"] * 15, "enter")
        assert "more memory" in str(app.focused.render() if app.focused else "")
        assert app.settings.beams == 1


TIMING = Timing(
    prefill=PhaseTimes(layers=[LayerTimes(1, 0.1, 2, 0, 0, 0.2)] * 4, per_token=14, steps=1, tokens=20),
    decode=PhaseTimes(layers=[LayerTimes(1, 0.1, 4, 0, 0, 0.2)] * 4, per_token=24, steps=3, tokens=3),
    moe_layers=[0, 1, 2, 3], expert_use=[[5, 1, 3, 7]] * 4,
)  # fmt: skip


async def test_timing_is_measured_after_a_panel_that_covers_the_conversation(
    make_app: MakeApp, engine: FakeEngine
) -> None:
    """On a small terminal nobody can ask while the panel is open."""
    engine.timing = TIMING
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: bool(app.screen.query(".timing")) and engine.watching)
        assert "measures from now on" in str(app.screen.query_one(".timing").render())
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await ask(pilot, app, "Hello")
        await pilot.press("f5")
        await wait_until(pilot, lambda: "Decoding by layer" in str(app.screen.query_one(".timing").render()))
        assert engine.watching


async def test_timing_is_measured_while_the_panel_is_open(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.timing = TIMING
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, app, "q")
        view, experts = app.screen.query_one(".timing"), app.screen.query_one(".experts")
        await wait_until(pilot, lambda: "Expert use" in str(experts.render()))
        assert "Decoding by layer" in str(view.render())
        await pilot.press("f5", "p")
        assert "Prefill by layer" in str(view.render())
        await pilot.press("f5")
        await wait_until(pilot, lambda: not engine.watching)
        assert not app.screen.query(".timing")


async def test_sharing_is_shown_where_there_is_any(make_app: MakeApp, engine: FakeEngine) -> None:
    moved = ExpertMovement(tokens=4, weight_bytes=8_000_000, hits=3, misses=1, gpu_s=0.5, cpu_s=0.5, total_s=1.0)
    engine.timing = msgspec.structs.replace(TIMING, movement=moved, resident=[[3], [3], [0, 3], []])
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, app, "q")
        view = app.screen.query_one(".timing")
        await wait_until(pilot, lambda: "hit rate 75%" in str(view.render()))
        assert "weights 2.0 MB" in str(view.render())
        assert "in GPU memory: 4 of 16 experts" in str(app.screen.query_one(".experts").render())


@pytest.mark.soak
async def test_a_panel_becomes_a_screen_where_it_is_narrow(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await pilot.resize_terminal(60, 30)
        await wait_until(pilot, lambda: isinstance(app.screen, PanelScreen))
        await pilot.resize_terminal(120, 40)
        await wait_until(pilot, lambda: app.screen is app.chat and app.screen.query("#side .timing"))
        await pilot.resize_terminal(40, 20)
        await wait_until(pilot, lambda: isinstance(app.screen, PanelScreen))
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await wait_until(pilot, lambda: engine.watching)


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


async def test_the_notice_of_text_not_saved_goes_when_it_is_saved(make_app: MakeApp, store: ConversationStore) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:  # type: ignore[attr-defined]
            other.execute("BEGIN IMMEDIATE")
            await ask(pilot, app, "hello")
            await wait_until(pilot, lambda: "locked by another program" in notice(app))
            other.execute("ROLLBACK")
            controller(app)._saver.retry()
            await wait_until(pilot, lambda: not notice(app))
            assert "not saved" not in "".join(shown(app))


async def test_a_theme_of_the_palette_is_there_at_the_next_start(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert set(app.available_themes) == set(THEMES)
        app.theme = "nord"
        await pilot.pause()
    again = make_app()
    async with again.run_test() as pilot:
        await ready(pilot, again)
        assert again.theme == "nord"


def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    path = tmp_path / "nope" / "x.md"
    with pytest.raises(OSError) as failed:
        path.open("x")
    assert export_problem(path, failed.value) == f"Export failed: the folder {path.parent} does not exist."
    there = tmp_path / "x.md"
    there.touch()
    with pytest.raises(OSError) as failed:
        there.open("x")
    assert export_problem(there, failed.value) == f"Export failed: {there} already exists; choose another name."


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
