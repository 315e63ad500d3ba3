"""The panel of times: measured while it is open."""

from __future__ import annotations

import msgspec
import pytest
from textual import events
from textual.keys import _character_to_key as character_key

from app.tui.panels.beam_panel import Widths
from app.tui.panels.panel import PanelScreen
from app.tui.panels.timing_panel import TimingPanel
from engine.ipc.messages import ExpertMovement, LayerTimes, PassShare, PhaseTimes, Timing
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, ready, wait_until

pytestmark = pytest.mark.usefixtures("few_settings")


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


async def test_who_shares_the_passes_stands_first(make_app: MakeApp, engine: FakeEngine) -> None:
    shares = [
        PassShare(program="chat", answers=1, rows=1.0, tokens_per_s=9.8),
        PassShare(program="serve", answers=2, rows=1.6, tokens_per_s=14.3),
    ]
    engine.timing = msgspec.structs.replace(TIMING, rows_per_pass=2.6, shares=shares)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        await wait_until(pilot, lambda: engine.watching)
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await ask(pilot, app, "q")
        await pilot.press("f5")
        await wait_until(pilot, lambda: "2.6 rows per pass" in str(app.screen.query_one(".timing").render()))
        assert str(app.screen.query_one(".timing").render()).splitlines()[:3] == [
            "3 answers, 2.6 rows per pass",
            "chat: 1 answer, 1.0 rows, 9.8 tok/s",
            "serve: 2 answers, 1.6 rows, 14.3 tok/s",
        ]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("key", ["f4", "f5"])
async def test_a_question_that_is_typed_at_once_in_a_panel_loses_no_letter(
    make_app: MakeApp, columns: int, key: str
) -> None:
    """Keys that arrive together are all on their way to the panel when the first of them leaves it."""
    app = make_app()
    async with app.run_test(size=(columns, 40)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        await pilot.press(key)
        await wait_until(pilot, lambda: bool(app.screen.query(".panel")))
        await pilot.press(key) if columns == 120 and key == "f5" else None
        await pilot.pause()
        for character in "What is p? 12 apples?":
            app.post_message(events.Key(character_key(character), character))
        prompt = app.chat.prompt
        await wait_until(pilot, lambda: app.focused is prompt and len(prompt.text) == 21)
        assert prompt.text == "What is p? 12 apples?"


async def test_the_key_of_another_panel_opens_it_in_place_of_this_one(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("f5")
        for key, other in (("f4", Widths), ("f5", TimingPanel), ("f4", Widths)):
            await pilot.press(key)
            await wait_until(pilot, lambda other=other: bool(app.screen.query(other)))  # type: ignore[misc]
            assert isinstance(app.screen, PanelScreen)
        await pilot.press("f4")
        await wait_until(pilot, lambda: app.screen is app.chat)
        assert app.chat is not None and app.focused is app.chat.prompt


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
