"""How the prompt and what belongs to it look. `pytest --update-screens` takes what is drawn now as right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot

from app.tui.application import ChatApp
from app.tui.chat.attaching import AttachmentLine
from app.tui.chat.completion import CompletionPopup
from app.tui.chat.queue_view import QueueView
from tests.app.attachments.pictures import SEEING, png
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, wait_until
from tests.support.kept_screens import CheckScreen

NARROW, USUAL = (40, 20), (80, 24)


def app_of(pilot: Pilot[int]) -> ChatApp:
    assert isinstance(pilot.app, ChatApp)
    return pilot.app


def test_queued_questions_and_a_folded_paste(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()

    async def before(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await ready(pilot, app)
        assert app.chat is not None
        chat = app.chat
        chat.controller.submit("Why is the sky blue?")
        await wait_until(pilot, lambda: chat.transcript.views and controller(app).thread.path[-1].content)
        chat.controller.submit(
            "And why is it red in the evening, when the sun is low and its light comes from the west?"
        )
        chat.controller.submit("And on Mars?")
        chat.prompt.fill("Explain this: ")
        chat.prompt.paste("a line\n" * 214)
        await wait_until(pilot, lambda: chat.query_one(QueueView).option_count == 2)

    check_screen(make_app(), USUAL, before)


def test_files_are_offered_announced_and_folded(
    check_screen: CheckScreen, make_app: MakeApp, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("notes.md", "src/prompt.py", "src/deep/proof.py", "two words.txt"):
        (home / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "work" / name).write_text(f"# {name}\n" + "text\n" * 40)
    monkeypatch.chdir(home / "work")

    async def before(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await ready(pilot, app)
        assert app.chat is not None
        chat = app.chat
        await ask(pilot, app, "Compare @notes.md with @src/prompt.py")
        await wait_until(pilot, lambda: not chat.transcript.query_one(".tail").display)
        chat.prompt.fill("And with @src/*.py, @pro")
        await wait_until(pilot, lambda: chat.query_one(AttachmentLine).display)
        await wait_until(pilot, lambda: chat.query_one(CompletionPopup).display)

    check_screen(make_app(), USUAL, before)


def test_a_picture_is_announced_and_shown_by_its_name(
    check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.facts = SEEING
    (home / "work").mkdir()
    (home / "work" / "harbour.png").write_bytes(png(1024, 768))
    (home / "work" / "notes.md").write_text("text\n" * 40)
    monkeypatch.chdir(home / "work")

    async def before(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await ready(pilot, app)
        assert app.chat is not None
        chat = app.chat
        await ask(pilot, app, "Which ships are in @harbour.png?")
        await wait_until(pilot, lambda: not chat.transcript.query_one(".tail").display)
        chat.prompt.fill("And in @harbour.png by @notes.md ?")
        await wait_until(pilot, lambda: chat.query_one(AttachmentLine).display)

    check_screen(make_app(), USUAL, before)
