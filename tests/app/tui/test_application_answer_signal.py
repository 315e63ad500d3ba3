"""What tells that an answer has ended while the terminal's window has no focus."""

from __future__ import annotations

import asyncio

import pytest
from textual import events

from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, wait_until

BELL, NOTIFICATION = "\a", "\x1b]9;privatellm: an answer has ended.\a"


@pytest.fixture
def no_multiplexer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMUX", "STY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.sampled
@pytest.mark.usefixtures("no_multiplexer")
@pytest.mark.parametrize(
    ("wanted", "mark", "sent"),
    [("off", "", []), ("title", "✓ ", []), ("bell", "✓ ", [BELL]), ("notification", "✓ ", [BELL, NOTIFICATION])],
)
async def test_the_end_is_told_while_the_window_has_no_focus(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, wanted: str, mark: str, sent: list[str]
) -> None:
    app = make_app(answer_signal=wanted)
    titles: list[str] = []
    written: list[str] = []
    monkeypatch.setattr(app, "show_terminal_title", titles.append)
    monkeypatch.setattr(app, "_write_sequences", written.append)
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "a")
        assert titles[-1] == "a – privatellm" and not written
        app.post_message(events.AppBlur())
        await pilot.pause()
        controller(app).submit("b")
        await wait_until(pilot, lambda: len(controller(app).thread.path) == 4 and not controller(app).busy)
        assert titles[-1] == f"{mark}a – privatellm" and written == sent
        app.post_message(events.AppFocus())
        await pilot.pause()
        assert titles[-1] == "a – privatellm"


@pytest.mark.usefixtures("no_multiplexer")
async def test_what_the_person_stopped_is_not_told(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.gate = asyncio.Event()
    app = make_app(answer_signal="notification")
    written: list[str] = []
    monkeypatch.setattr(app, "_write_sequences", written.append)
    async with app.run_test() as pilot:
        await ready(pilot, app)
        controller(app).submit("a")
        await wait_until(pilot, lambda: controller(app).thread.path[-1].content)
        app.post_message(events.AppBlur())
        await pilot.pause()
        controller(app).stop()
        await wait_until(pilot, lambda: not controller(app).busy)
        assert app.chat is not None and not app.chat.ended_unseen and not written


async def test_an_answer_in_another_chat_is_told_too(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        controller(app).submit("a")
        await wait_until(pilot, lambda: controller(app).thread.path[-1].content)
        await pilot.press("ctrl+n")
        app.post_message(events.AppBlur())
        engine.gate.set()
        await wait_until(pilot, lambda: app.chat is not None and app.chat.ended_unseen)
