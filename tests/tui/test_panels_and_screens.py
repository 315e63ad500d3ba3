"""The panels and the other screens under the keys of a person."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from fake_engine import FakeEngine
from screen_helpers import MakeApp, ask, controller, notice, ready, shown, wait_until
from textual.widgets import Input, OptionList, Static

from app.conversations.store import ConversationStore
from app.settings_file import open_settings
from app.tui.screens.conversations import ConversationsScreen
from app.tui.screens.models import ModelsScreen
from app.tui.screens.panel import PanelScreen
from app.tui.screens.settings import SettingRow, SettingsScreen
from app.tui.widgets.beam_panel import Candidates, Widths
from engine.messages import Beam, Generate, LayerTimes, PhaseTimes, Timing

BEAMS = [Beam("first", [1], -0.1), Beam("second", [2], -0.2), Beam("third", [3], -0.3)]


async def test_conversations_are_found_and_resumed(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "about zebras")
        await pilot.press("ctrl+n")
        await ask(pilot, app, "about lions")
        await pilot.press("f2")
        await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        assert app.screen.query_one(OptionList).option_count == 2
        app.screen.query_one("#search", Input).focus()
        await pilot.press(*"zebras")
        await wait_until(pilot, lambda: app.screen.query_one(OptionList).option_count == 1)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await wait_until(pilot, lambda: controller(app).thread.path[0].content == "about zebras")
        assert "about zebras" in shown(app)[0]


async def test_conversations_are_renamed_archived_and_deleted(make_app: MakeApp, store: ConversationStore) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "old name")
        await pilot.press("f2")
        await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        await pilot.press("r")
        await wait_until(pilot, lambda: app.screen.query("Input"))
        app.screen.query_one(Input).value = "new name"
        await pilot.press("enter")
        await wait_until(pilot, lambda: store.conversations()[0].title == "new name")
        assert controller(app).thread.title == "new name"
        await pilot.press("a")
        await wait_until(pilot, lambda: not store.conversations())
        await pilot.press("v", "a")
        await wait_until(pilot, lambda: len(store.conversations()) == 1)
        await pilot.press("v", "d", "n")
        await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        assert len(store.conversations()) == 1
        await pilot.press("d", "y")
        await wait_until(pilot, lambda: not store.conversations())
        assert controller(app).thread.path == []


async def test_a_width_of_beams_is_chosen_and_a_candidate_picked(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.beam_steps = [BEAMS]
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        await wait_until(pilot, lambda: "1 beam" in str(app.focused.render() if app.focused else ""))
        await pilot.press("right", "right")
        assert "memory 570 MB of 2.4 GB free" in str(app.focused.render() if app.focused else "")
        assert "1.24 ×" in str(app.focused.render() if app.focused else "")
        await pilot.press("enter")
        assert app.settings.beams == 3
        await ask(pilot, app, "q")
        assert "first" in shown(app)[1]
        app.screen.query_one(Candidates).focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "second" in shown(app)[1])
        assert "2/2" in shown(app)[1]


async def test_the_panel_follows_a_width_that_is_set_elsewhere(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        app.change_setting("beams", 5)
        await wait_until(pilot, lambda: "now 5" in str(app.screen.query_one(Widths).render()))


async def test_a_width_that_does_not_fit_is_refused(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.focused, Widths))
        await wait_until(pilot, lambda: "1 beam" in str(app.focused.render() if app.focused else ""))
        await pilot.press(*["right"] * 15, "enter")
        assert "short" in str(app.focused.render() if app.focused else "")
        assert app.settings.beams == 1


TIMING = Timing(
    prefill=PhaseTimes(layers=[LayerTimes(1, 0.1, 2, 0, 0, 0.2)] * 4, per_token=14, steps=1, tokens=20),
    decode=PhaseTimes(layers=[LayerTimes(1, 0.1, 4, 0, 0, 0.2)] * 4, per_token=24, steps=3, tokens=3),
    moe_layers=[0, 1, 2, 3], expert_use=[[5, 1, 3, 7]] * 4,
)  # fmt: skip


async def test_timing_is_measured_while_the_panel_is_open(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.timing = TIMING
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await ask(pilot, app, "q")
        view = app.screen.query_one(".timing")
        await wait_until(pilot, lambda: "Use of the experts" in str(view.render()))
        assert "Decoding by layer" in str(view.render())
        await pilot.press("f5", "p")
        assert "Prefill by layer" in str(view.render())
        await pilot.press("f5")
        await wait_until(pilot, lambda: not engine.watching)
        assert not app.screen.query(".timing")


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
        await wait_until(pilot, lambda: not engine.watching)


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
        assert "max_tokens cannot be" in str(rows["max_tokens"].query_one(".setting-help", Static).visual)
        field.value = "7"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert open_settings(home / "settings.toml").settings.max_tokens == 7
        await ask(pilot, app, "q")
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate)
        assert request.max_tokens == 7


async def test_what_cannot_be_had_is_greyed_with_the_reason(make_app: MakeApp) -> None:
    from textual.widgets import RadioButton

    app = make_app()
    async with app.run_test(size=(100, 40)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        buttons = {button.name: button for button in app.screen.query(RadioButton)}
        assert buttons["ring"].disabled
        assert "not in this version" in str(buttons["ring"].label)
        assert buttons["mlx"].disabled
        assert not buttons["cpu"].disabled


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
        await pilot.press("enter")
        await wait_until(pilot, lambda: "downloading 420 MB of 1.0 GB" in str(models.get_option_at_index(1).prompt))
        await pilot.press("x")
        await wait_until(pilot, lambda: not controller(app).pulling.active)
        assert "resumes" in notice(app)


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
