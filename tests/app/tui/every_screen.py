"""A way into every screen of the chat, and into each state in which other keys count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from textual.pilot import Pilot

from app.chat.commands.table import COMMANDS
from app.chat.state import Phase
from app.settings.personas import Persona, open_personas
from app.tui.application import ChatApp
from app.tui.screens.dialogues import AskText, Confirm, Tell
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import ask, controller, wait_until
from tests.app.tui.screens.test_screens_pictures import ANSWER, BEAMS, TIMING

Open = Callable[[Pilot[int], ChatApp], Awaitable[None]]


def prepare(engine: FakeEngine) -> None:
    """Let ``engine`` answer with something of everything."""
    engine.answer = lambda request: [ANSWER]
    engine.beam_steps = [BEAMS]
    engine.timing = TIMING
    file = open_personas()
    for persona in (
        Persona("Coder", "You write short, idiomatic Python, and say in one sentence what it does.",
                values={"temperature": 0.1}),
        Persona("Translator", "Translate what you are given into English. Keep names and numbers as they are.",
                model="Qwen/Qwen3-30B-A3B", values={"temperature": 0.0, "beams": 4}),
    ):  # fmt: skip
        file.put(persona)


def _pressing(*keys: str) -> Open:
    async def open(pilot: Pilot[int], app: ChatApp) -> None:
        await pilot.press(*keys)

    return open


def _command(name: str, argument: str = "") -> Open:
    command = next(known for known in COMMANDS if known.name == name)

    async def open(pilot: Pilot[int], app: ChatApp) -> None:
        assert app.chat is not None
        app.chat.run_command(command, argument)
        await pilot.pause()

    return open


async def _message(pilot: Pilot[int], app: ChatApp) -> None:
    assert app.chat is not None
    app.chat.transcript.views[-1].focus()


async def _question(pilot: Pilot[int], app: ChatApp) -> None:
    assert app.chat is not None
    app.chat.transcript.views[-2].focus()


async def _versions(pilot: Pilot[int], app: ChatApp) -> None:
    controller(app).regenerate()
    await wait_until(pilot, lambda: not controller(app).busy)
    await _message(pilot, app)


async def _empty_list_of_chats(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press("f2", *"nothingfound")


async def _named_chat(pilot: Pilot[int], app: ChatApp) -> None:
    app.push_screen(AskText("Title of the chat", "Explain stacks and queues"))


async def _confirm(pilot: Pilot[int], app: ChatApp) -> None:
    app.push_screen(Confirm("Forget studio?", "It must be paired again to be used."))


async def _told(pilot: Pilot[int], app: ChatApp) -> None:
    app.push_screen(Tell("Title", "A sentence."))


async def _candidates(pilot: Pilot[int], app: ChatApp) -> None:
    controller(app).setup.change({"beams": 4})
    await ask(pilot, app, "Which city?")
    await pilot.press("f4", "tab")


async def _several(pilot: Pilot[int], app: ChatApp) -> None:
    await pilot.press(*"/n 4 Which city?", "enter")
    await wait_until(pilot, lambda: not controller(app).busy and app.screen is not app.chat)


async def _queue(pilot: Pilot[int], app: ChatApp) -> None:
    engine = app.engine
    assert isinstance(engine, FakeEngine)
    engine.gate = asyncio.Event()
    engine.answer = lambda request: ["The beginning", " and the end."]
    await pilot.press(*"go", "enter")
    await wait_until(pilot, lambda: controller(app).status.phase is not Phase.READY)
    await pilot.press(*"one", "enter", *"two", "enter")
    await wait_until(pilot, lambda: len(controller(app).queue.items) == 2)
    await pilot.press("up")


SCREENS: dict[str, Open] = {
    "chat": _pressing(),
    "completion": _pressing("/"),
    "message": _message,
    "question": _question,
    "finding": _command("find", "stack"),
    "editing": _command("edit"),
    "chats": _pressing("f2"),
    "no chats": _empty_list_of_chats,
    "models": _pressing("f3"),
    "timing": _pressing("f5"),
    "beams": _pressing("f4"),
    "candidates": _candidates,
    "several answers": _several,
    "sampling": _command("sampling"),
    "sampling of a value": _pressing("f7", "down", "enter"),
    "machines": _pressing("f8"),
    "settings": _pressing("ctrl+s"),
    "personas": _command("persona"),
    "a persona": _pressing(*"/persona", "enter", "ctrl+e"),
    "system prompt": _command("system"),
    "log": _command("log"),
    "status": _command("status"),
    "keys": _command("keys"),
    "help": _pressing("f1"),
    "palette": _pressing("ctrl+p"),
    "rename": _named_chat,
    "confirm": _confirm,
    "told": _told,
    "versions": _versions,
    "temporary": _command("temporary"),
    "queue": _queue,
}
"""What opens a screen, by a name for it. Those that change the chat come last."""


async def back(pilot: Pilot[int], app: ChatApp) -> None:
    """Close whatever is open above or beside the prompt."""
    chat = app.chat
    assert chat is not None
    for _ in range(8):
        if app.screen is chat:
            chat.action_close_panel()
            chat.prompt.done()
            if app.focused is chat.prompt:
                return
        await pilot.press("escape")
    raise AssertionError(f"{app.screen} cannot be left")
