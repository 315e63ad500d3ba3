"""The screen of personas: saved, chosen, edited, deleted and brought back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static, TextArea

from app.settings.personas import Persona, open_personas
from app.tui.application import ChatApp
from app.tui.screens.dialogues import EditText
from app.tui.screens.personas import PersonaEditor, PersonasScreen
from app.tui.screens.sampling import SamplingScreen
from app.tui.screens.value_editor import ValueEditor, ValueRow
from engine.ipc.messages import Generate, Sampling
from tests.app.fake_engine import FACTS, FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, wait_until

POET = Persona("Poet", "Answer in rhymes.", "", {"temperature": 1.2})


EDITOR = Persona("Strict editor", "Correct spelling.", "other", {"temperature": 0.0})


async def command(pilot: Pilot[int], app: ChatApp, text: str) -> None:
    assert app.chat is not None
    app.chat.prompt.fill(text)
    await pilot.press("enter")
    await pilot.pause()


def line_of(app: ChatApp, label: str) -> str:
    """The line of the value called ``label`` on the screen of values."""
    values = app.screen.query_one(".values", OptionList)
    lines = [str(values.get_option_at_index(index).prompt) for index in range(values.option_count)]
    return next(" ".join(line.split()) for line in lines if line.startswith(label))


def heading(app: ChatApp) -> str:
    assert app.chat is not None
    return str(app.chat.query_one("#setup", Static).visual) if app.chat.query_one("#heading").display else ""


def toasts(app: ChatApp) -> str:
    return " ".join(notification.message for notification in app._notifications)


@pytest.mark.soak
async def test_the_system_prompt_is_typed_or_edited_in_a_dialogue(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert heading(app) == ""
        await command(pilot, app, "/system Answer in French.")
        assert controller(app).setup.system == "Answer in French." and heading(app) == "system prompt"
        await command(pilot, app, "/system")
        assert isinstance(app.screen, EditText)
        assert app.screen.query_one(TextArea).text == "Answer in French."
        await pilot.press("enter", "B", "e")
        await pilot.press("escape")
        assert isinstance(app.screen, EditText) and "Esc again discards" in toasts(app)
        await pilot.press("!", "ctrl+s")
        assert controller(app).setup.system == "Answer in French.\nBe!"
        await ask(pilot, app, "hello")
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate) and request.messages[0].content == "Answer in French.\nBe!"
        await command(pilot, app, "/system")
        await pilot.press("x", "escape", "escape")
        assert app.screen is app.chat and controller(app).setup.system == "Answer in French.\nBe!"
        await command(pilot, app, "/system")
        app.screen.query_one(TextArea).text = "  "
        await pilot.press("ctrl+s")
        assert controller(app).setup.system == "" and "no system prompt now" in toasts(app)


@pytest.mark.soak
async def test_values_are_changed_in_place(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.facts = msgspec.structs.replace(
        FACTS, sampling=Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.0, repetition_penalty=1.0)
    )
    app = make_app(top_p=0.8)
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+backslash")
        await wait_until(pilot, lambda: isinstance(app.screen, SamplingScreen))
        assert line_of(app, "Temperature") == "Temperature 0.7 from model"
        assert line_of(app, "Top-p") == "Top-p 0.8 settings"
        assert line_of(app, "Beams") == "Beams 1 default"
        assert (
            line_of(app, "Seed") == "Seed – new each time" and line_of(app, "Answer limit") == "Answer limit – no limit"
        )

        await pilot.press("0", ".", "2", "enter")
        assert line_of(app, "Temperature") == "Temperature 0.2 ● chat"
        await pilot.press("9", "9", "enter")
        help_line = app.screen.query_one(".value-help", Static)
        assert str(help_line.visual).startswith("Temperature cannot be 99.0") and help_line.has_class("problem")
        await pilot.press("escape")
        assert isinstance(app.screen, SamplingScreen) and line_of(app, "Temperature") == "Temperature 0.2 ● chat"
        await pilot.press("down", "enter")
        assert app.screen.query_one(".value-field", Input).value == "0.8"
        await pilot.press("escape", "up", "backspace")
        assert line_of(app, "Temperature") == "Temperature 0.7 from model"

        values = app.screen.query_one(".values", OptionList)
        values.highlighted = [setting.setting.key for setting in _rows(app)].index("thinking")
        await pilot.press("left")
        assert line_of(app, "Thinking") == "Thinking off ● chat"
        await pilot.press("enter", "right")
        assert line_of(app, "Thinking") == "Thinking on ● chat"
        await pilot.press("backspace")
        assert line_of(app, "Thinking") == "Thinking auto from model"

        await pilot.press("e")
        assert line_of(app, "Temperature") == "Temperature 0 ● chat"
        assert line_of(app, "Top-p") == "Top-p 0.9 ● chat"
        assert "● exact" in str(app.screen.query_one("#presets", Static).visual)
        await pilot.press("escape")
        assert app.screen is app.chat
        assert heading(app) == "● temperature 0 · ● top-p default"
        await command(pilot, app, "/set max-tokens 40")
        await ask(pilot, app, "hello")
        request = engine.sent(Generate)[-1]
        assert isinstance(request, Generate)
        assert (request.sampling.temperature, request.sampling.top_p, request.max_tokens) == (0.0, None, 40)
        assert controller(app).options.temperature is None

        await command(pilot, app, "/set temperature hot")
        assert "'hot'" in notice(app)
        await command(pilot, app, "/set volume 3")
        assert "A chat has no value 'volume'" in notice(app)
        await command(pilot, app, "/sampling c")
        assert controller(app).setup.options.min_p == 0.1
        await command(pilot, app, "/sampling loud")
        assert "There is no preset 'loud'; there are exact, balanced, creative." in notice(app)
        await command(pilot, app, "/beams 4")
        await command(pilot, app, "/set")
        assert "With 4 beams nothing is sampled" in str(app.screen.query_one("#sampling-note", Static).visual)
        await pilot.press("escape")
        await pilot.press("ctrl+n")
        assert heading(app) == "" and controller(app).status.beams == 1


def _rows(app: ChatApp) -> list[ValueRow]:
    return list(app.screen.query_one(ValueEditor)._values.rows())


@pytest.mark.soak
async def test_a_persona_is_saved_chosen_edited_deleted_and_brought_back(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await command(pilot, app, "/persona Poet")
        assert "There is no persona 'Poet'; there are none yet" in notice(app)
        await command(pilot, app, "/system Answer in rhymes.")
        await command(pilot, app, "/set temperature 1.2")
        await command(pilot, app, "/persona")
        assert isinstance(app.screen, PersonasScreen)
        await pilot.press("ctrl+s", *"Poet", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonasScreen))
        assert open_personas().personas == (Persona("Poet", "Answer in rhymes.", "starter", {"temperature": 1.2}),)
        await pilot.press("escape")
        assert heading(app) == "Poet · system prompt"

        await pilot.press("ctrl+n")
        open_personas().put(EDITOR)
        await command(pilot, app, "/persona strict EDITOR")
        assert controller(app).setup.system == "Correct spelling." and controller(app).options.model == "other"
        assert "other is loaded for it" in toasts(app)
        await ask(pilot, app, "hello")

        await command(pilot, app, "/persona")
        await pilot.press(*"rhym", "ctrl+e")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonaEditor))
        app.screen.query_one("#persona-name", Input).value = "Strict Editor"
        await pilot.press("ctrl+s")
        assert "a persona 'Strict editor' already" in str(app.screen.query_one("#personas-problem", Static).visual)
        app.screen.query_one("#persona-name", Input).value = "Bard"
        app.screen.query_one(".values", OptionList).focus()
        await pilot.press("0", ".", "5", "enter", "ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonasScreen))
        assert open_personas().find("Bard").values == {"temperature": 0.5}
        # A chat that has a persona keeps its values.
        assert controller(app).setup.options.temperature == 0.0

        await pilot.press(*["backspace"] * 4, *"strict", "ctrl+e")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonaEditor))
        app.screen.query_one("#persona-name", Input).value = "Reader"
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonasScreen))
        assert controller(app).setup.values.persona == "Reader" and heading(app).startswith("Reader")
        await pilot.press(*["backspace"] * 6)
        await pilot.press("d")
        assert [persona.name for persona in open_personas().personas] == ["Bard", "Reader"]
        await pilot.press("backspace", "ctrl+d")
        assert [persona.name for persona in open_personas().personas] == ["Reader"]
        await pilot.press("ctrl+r")
        assert {persona.name for persona in open_personas().personas} == {"Bard", "Reader"}
        await pilot.press(*"bard", "enter")
        assert heading(app) == "Bard · system prompt"
        await command(pilot, app, "/persona none")
        assert heading(app) == ""


@pytest.mark.soak
async def test_saving_under_a_name_that_is_taken_asks_first(make_app: MakeApp, home: Path) -> None:
    open_personas().put(POET)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        for answer, system in (("n", "Answer in rhymes."), ("y", "")):
            await command(pilot, app, "/persona")
            await pilot.press("ctrl+s", *"POET", "enter")
            await pilot.press(answer)
            await wait_until(pilot, lambda: isinstance(app.screen, PersonasScreen))
            assert open_personas().find("poet").system == system
            await pilot.press("escape")
        await command(pilot, app, "/persona")
        await pilot.press("ctrl+n")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonaEditor))
        await pilot.press(*"New", "escape")
        assert isinstance(app.screen, PersonaEditor)
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, PersonasScreen))
        assert [persona.name for persona in open_personas().personas] == ["POET"]


async def test_what_is_wrong_in_the_file_is_told_where_a_persona_is_chosen(make_app: MakeApp) -> None:
    path = open_personas().path
    path.parent.mkdir(parents=True)
    path.write_text("[A]\ntemperature = 77\n")
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await command(pilot, app, "/persona")
        assert "temperature cannot be 77" in str(app.screen.query_one("#personas-problem", Static).visual)
        await pilot.press("enter")
        assert heading(app) == "A"
