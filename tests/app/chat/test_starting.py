"""How the chat begins: with the latest conversation, drawn at its end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from textual.geometry import Region
from textual.widgets import Static

from app.chat.starting import Start
from app.conversations.store import ConversationStore
from app.settings.personas import Persona
from app.tui.application import ChatApp
from engine.ipc.messages import Load
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, ready, shown, wait_until


async def test_the_latest_chat_is_shown_at_its_end_and_a_scroll_is_drawn_whatever_happens_meanwhile(
    make_app: MakeApp, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, parent = store.create(model="starter").id, None
    for number in range(40):
        parent = store.add(chat, "assistant" if number % 2 else "user", f"{number} " + "words " * 90, parent=parent).id
    app = make_app()
    app._start = Start(latest=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: transcript.views and transcript.max_scroll_y > 0)
        assert transcript.following and transcript.scroll_y == transcript.max_scroll_y
        compositor = app.chat._compositor
        drawn: list[Region] = []
        draw = compositor.render_update

        def recorded(*arguments: Any, **values: Any) -> Any:
            drawn.extend(compositor._dirty_regions)
            return draw(*arguments, **values)

        monkeypatch.setattr(compositor, "render_update", recorded)
        await pilot.press("pageup")
        await wait_until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)
        drawn.clear()
        # Textual takes what it is asked about between a scroll and a layout for what is already on the screen.
        transcript.scroll_end(animate=False, immediate=True)
        assert compositor.full_map
        app.chat.prompt.refresh(layout=True)
        await pilot.pause()
        assert any(region.contains_region(transcript.content_region) for region in drawn)


EDITOR = Persona("Strict editor", "Correct spelling.", "other", {"temperature": 0.0})


def heading(app: ChatApp) -> str:
    assert app.chat is not None
    return str(app.chat.query_one("#setup", Static).visual) if app.chat.query_one("#heading").display else ""


def toasts(app: ChatApp) -> str:
    return " ".join(notification.message for notification in app._notifications)


async def test_the_chat_begins_as_the_command_line_says(
    make_app: MakeApp, engine: FakeEngine, store: ConversationStore
) -> None:
    old = store.create(model="starter", own_values={"own": {"seed": 4}})
    store.add(old.id, "user", "the latest question", parent=None)
    app = make_app(temperature=0.5)
    app._start = Start(latest=True, model="big", persona=dataclasses.replace(EDITOR, values={"top_k": 3}))
    app._start.choose_model(app.settings_file)
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert [load.model for load in engine.sent(Load) if isinstance(load, Load)] == ["big"]
        await wait_until(pilot, lambda: shown(app))
        assert "the latest question" in shown(app)[0] and heading(app) == "Strict editor · system prompt"
        setup = controller(app).setup
        assert (setup.system, setup.options.top_k, setup.options.seed) == ("Correct spelling.", 3, None)
        await wait_until(pilot, lambda: store.conversation(old.id).own_values.get("persona") == "Strict editor")
        await pilot.press("ctrl+n")
        assert setup.options == controller(app).options and setup.options.model == "big"


async def test_nothing_to_continue_is_a_new_chat(make_app: MakeApp) -> None:
    app = make_app()
    app._start = Start(latest=True)
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await wait_until(pilot, lambda: "no earlier chat to continue" in toasts(app))
        assert controller(app).thread.path == []
