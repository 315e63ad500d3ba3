"""The panel of beams: a width is chosen, and a candidate picked."""

from __future__ import annotations

import asyncio

import pytest

from app.tui.panels.beam_panel import Candidates, Widths
from engine.ipc.messages import Beam
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, shown, wait_until

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
