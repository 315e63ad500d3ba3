"""How the screens of a chat's system prompt, persona and sampling look."""

from __future__ import annotations

import msgspec
from fake_engine import FACTS, FakeEngine
from screen_helpers import MakeApp, wait_until
from test_snapshots import Compare, app_of, ask, at_sizes, ready
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from app.settings.personas import Persona, open_personas
from engine.ipc.messages import Sampling

SIZES = at_sizes((80, 24), (40, 20))
POET = Persona("Poet", "Answer in rhymes, whatever is asked.", "", {"temperature": 1.2, "min_p": 0.1})
EDITOR = Persona(
    "Strict editor", "Correct spelling and grammar. Change nothing else.", "qwen3:30b", {"temperature": 0.0}
)


def still(pilot: Pilot[int]) -> None:
    """No cursor blinks."""
    for area in pilot.app.screen.query(TextArea):
        area.cursor_blink = False
    for field in pilot.app.screen.query(Input):
        field.cursor_blink = False


@SIZES
def test_sampling(snap_compare: Compare, make_app: MakeApp, engine: FakeEngine, size: tuple[int, int]) -> None:
    own = Sampling(temperature=0.7, top_p=0.95, top_k=20, min_p=0.0, repetition_penalty=1.0)
    engine.facts = msgspec.structs.replace(FACTS, sampling=own)

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.setup.use_persona(POET)
        chat.controller.setup.change({"top_k": 50})
        await pilot.press("ctrl+backslash", "down", "down")
        await pilot.pause()

    assert snap_compare(make_app(max_tokens=500), terminal_size=size, run_before=before)


@at_sizes((80, 24))
def test_a_value_that_is_not_allowed(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.setup.change({"beams": 4})
        await pilot.press("ctrl+backslash", *"-1", "enter")
        still(pilot)
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@SIZES
def test_personas(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    open_personas().put(POET)
    open_personas().put(EDITOR)

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.setup.use_persona(POET)
        chat.setup.persona()
        await wait_until(pilot, lambda: pilot.app.screen.query("#personas"))
        still(pilot)
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@at_sizes((80, 24))
def test_no_persona_yet(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.setup.persona()
        await wait_until(pilot, lambda: pilot.app.screen.query("#personas"))
        still(pilot)
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@SIZES
def test_a_persona(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    open_personas().put(EDITOR)

    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.setup.persona()
        await wait_until(pilot, lambda: pilot.app.screen.query("#personas"))
        await pilot.press("ctrl+e")
        await wait_until(pilot, lambda: pilot.app.screen.query("#persona-name"))
        still(pilot)
        await pilot.pause()

    assert snap_compare(make_app(), terminal_size=size, run_before=before)


@at_sizes((80, 24))
def test_a_system_prompt(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.setup.system()
        await wait_until(pilot, lambda: pilot.app.screen.query(".text-dialogue"))
        still(pilot)
        await pilot.pause()

    assert snap_compare(make_app(system_prompt="Be brief.\nNo lists."), terminal_size=size, run_before=before)


@SIZES
def test_the_heading_tells_the_setup(snap_compare: Compare, make_app: MakeApp, size: tuple[int, int]) -> None:
    async def before(pilot: Pilot[int]) -> None:
        await ready(pilot)
        chat = app_of(pilot).chat
        assert chat is not None
        chat.controller.setup.use_persona(POET)
        chat.controller.setup.change({"seed": 7})
        await ask(pilot, "What is the capital of France, and why is it not Lyon?")

    assert snap_compare(make_app(), terminal_size=size, run_before=before)
