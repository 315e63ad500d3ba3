"""How the screens of a chat's system prompt, persona and sampling look."""

from __future__ import annotations

import msgspec
from textual.pilot import Pilot

from app.settings.personas import Persona, open_personas
from app.tui.screens.chat import ChatScreen
from engine.ipc.messages import Sampling
from tests.app.fake_engine import FACTS, FakeEngine
from tests.app.tui.screen_helpers import MakeApp, wait_until
from tests.app.tui.screens.test_screens_pictures import app_of, ask, at_sizes, ready
from tests.support.kept_screens import CheckScreen

SIZES = at_sizes((80, 24), (40, 20))
POET = Persona("Poet", "Answer in rhymes, whatever is asked.", "", {"temperature": 1.2, "min_p": 0.1})
EDITOR = Persona(
    "Strict editor", "Correct spelling and grammar. Change nothing else.", "qwen3:30b", {"temperature": 0.0}
)


async def chat_of(pilot: Pilot[int]) -> ChatScreen:
    """The chat, whose model is loaded."""
    await ready(pilot)
    chat = app_of(pilot).chat
    assert chat is not None
    return chat


async def shown(pilot: Pilot[int], what: str) -> None:
    await wait_until(pilot, lambda: pilot.app.screen.query(what))


async def personas(pilot: Pilot[int]) -> None:
    """Open the screen of the personas."""
    chat = await chat_of(pilot)
    chat.action_command("persona")
    await shown(pilot, "#personas")


@SIZES
def test_sampling(check_screen: CheckScreen, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    own = Sampling(temperature=0.7, top_p=0.95, top_k=20, min_p=0.0, repetition_penalty=1.0)
    engine.facts = msgspec.structs.replace(FACTS, sampling=own)

    async def before(pilot: Pilot[int]) -> None:
        chat = await chat_of(pilot)
        chat.controller.setup.use_persona(POET)
        chat.controller.setup.change({"top_k": 50})
        await pilot.press("ctrl+backslash", "down", "down")
        await pilot.pause()

    check_screen(make_app(max_tokens=500), size, before)


@at_sizes((80, 24))
def test_a_value_that_is_not_allowed(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        chat = await chat_of(pilot)
        chat.controller.setup.change({"beams": 4})
        await pilot.press("ctrl+backslash", *"-1", "enter")
        await pilot.pause()

    check_screen(make_app(), size, before)


@SIZES
def test_personas(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    open_personas().put(POET)
    open_personas().put(EDITOR)

    async def before(pilot: Pilot[int]) -> None:
        chat = await chat_of(pilot)
        chat.controller.setup.use_persona(POET)
        await personas(pilot)

    check_screen(make_app(), size, before)


@at_sizes((80, 24))
def test_no_persona_yet(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    check_screen(make_app(), size, personas)


@SIZES
def test_a_persona(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    open_personas().put(EDITOR)

    async def before(pilot: Pilot[int]) -> None:
        await personas(pilot)
        await pilot.press("ctrl+e")
        await shown(pilot, "#persona-name")

    check_screen(make_app(), size, before)


@at_sizes((80, 24))
def test_a_system_prompt(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        chat = await chat_of(pilot)
        chat.action_command("system")
        await shown(pilot, ".text-dialogue")

    check_screen(make_app(system_prompt="Be brief.\nNo lists."), size, before)


@SIZES
def test_the_heading_tells_the_setup(check_screen: CheckScreen, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        chat = await chat_of(pilot)
        chat.controller.setup.use_persona(POET)
        chat.controller.setup.change({"seed": 7})
        await ask(pilot, "What is the capital of France, and why is it not Lyon?")

    check_screen(make_app(), size, before)
