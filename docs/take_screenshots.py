"""Takes the pictures of the README: a real conversation with the starter model, panels open.

    python docs/take_screenshots.py

Needs the starter model on this machine. The conversation is kept in a temporary database.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}  # whatever terminal this runs in

from textual.pilot import Pilot

from app.chat.controller import ChatController
from app.chat.state import Phase
from app.conversations.opening import open_store
from app.engine_client import EngineClient
from app.settings.file import SettingsFile, open_settings
from app.tui.application import ChatApp

DOCS = Path(__file__).parent
SIZE = (124, 38)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short Python function that adds two numbers, and explain it.",
)


async def until(pilot: Pilot[int], holds: Callable[[], bool]) -> None:
    while not holds():
        await pilot.pause()
        await asyncio.sleep(0.05)


async def ask(pilot: Pilot[int], app: ChatApp, chat: ChatController, text: str) -> None:
    assert app.chat is not None
    app.chat.prompt.focus()
    app.chat.prompt.fill(text)
    await pilot.press("enter")
    await until(pilot, lambda: chat.busy)
    await until(pilot, lambda: not chat.busy)
    await pilot.pause(0.5)


def save(app: ChatApp, name: str) -> None:
    (DOCS / name).write_text(app.export_screenshot(title="privatellm"), encoding="utf-8")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings: SettingsFile = open_settings(Path(folder) / "settings.toml")
        settings.change("temperature", 0.0)
        store = open_store(Path(folder) / "conversations.sqlite")
        engine = EngineClient()
        app = ChatApp(engine, store, settings)
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: app.chat is not None)
            assert app.chat is not None
            chat = app.chat.controller
            await until(pilot, lambda: chat.status.phase is Phase.READY)
            await pilot.press("f5")
            for question in QUESTIONS:
                await ask(pilot, app, chat, question)
            save(app, "chat.svg")
            await pilot.press("f4")
            app.chat.controller.change_settings({"beams": 4})
            await ask(pilot, app, chat, "Describe the sea in one sentence.")
            save(app, "beams.svg")
        await engine.close()
        store.close()


if __name__ == "__main__":
    asyncio.run(main())
