"""The command palette on every screen, and leaving for the shell."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import OptionList

from app.chat.commands.table import COMMANDS
from app.settings.schema import THEMES
from app.tui.application import ChatApp
from app.tui.keymap import use
from app.tui.lending import Events, LendingApp
from app.tui.screens.dialogues import AskText, Confirm, HelpScreen
from app.tui.screens.machines import MachinesScreen
from app.tui.screens.settings import SettingsScreen
from engine.ipc.messages import OpenNetwork
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, ready, wait_until


def offered(app: ChatApp | LendingApp) -> dict[str, str]:
    return {command.title: command.help for command in app.get_system_commands(app.screen)}


async def choose(pilot: Pilot[int], title: str) -> None:
    """Open the palette by its key, type ``title`` and press enter."""
    app = pilot.app
    await pilot.press("ctrl+p")
    await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette) and app.screen.query(OptionList))
    await pilot.press(*title.replace(" ", "_").replace("_", " "))
    await wait_until(pilot, lambda: app.screen.query_one(OptionList).option_count)
    await wait_until(pilot, lambda: title in str(app.screen.query_one(OptionList).get_option_at_index(0).prompt))
    await pilot.press("enter")
    if isinstance(app.screen, CommandPalette):
        await pilot.press("enter")
    await wait_until(pilot, lambda: not isinstance(app.screen, CommandPalette))


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_each_screen_offers_its_own_actions_and_runs_them(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Hello")
        in_chat = offered(app)
        assert {command.title for command in COMMANDS} <= set(in_chat)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert len(titles) == len(set(titles))
        assert "Look" not in in_chat and in_chat["Theme"]
        # A message has actions of its own while it has the focus.
        await pilot.press("shift+tab")
        assert offered(app)["Edit"].startswith("Here: ")
        await choose(pilot, "Machines")
        await wait_until(pilot, lambda: isinstance(app.screen, MachinesScreen))
        machines = offered(app)
        assert {"Look", "Help", "Close", "Quit", "Theme", "Suspend"} <= set(machines)
        assert machines["Look"] == "Here: l"
        assert "New chat" not in machines
        await choose(pilot, "Close")
        await wait_until(pilot, lambda: app.screen is app.chat)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        assert {"Group", "Help"} <= set(offered(app))


@pytest.mark.soak
async def test_dialogues_have_it_too(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        for dialogue, expected in (
            (Confirm("Sure?"), {"Yes", "No"}),
            (AskText("Title"), {"Cancel"}),
            (HelpScreen(None), {"Close"}),
        ):
            results: list[object] = []
            app.push_screen(dialogue, results.append)
            await wait_until(pilot, lambda dialogue=dialogue: app.screen is dialogue)
            found = offered(app)
            assert expected <= set(found) and {"Theme"} <= set(found)
            await choose(pilot, min(expected))
            await wait_until(pilot, lambda results=results: results)
        assert app.screen is app.chat


async def test_a_lent_machine_has_it_and_what_is_typed_there_does_not_end_it(engine: FakeEngine) -> None:
    app = LendingApp(engine, OpenNetwork(id=1), first_wait_s=0.0)
    async with app.run_test(size=(80, 24)) as pilot:
        assert {"Leave", "New code", "Theme"} <= set(offered(app))
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette) and app.screen.query(OptionList))
        await pilot.press("q", "c")
        assert isinstance(app.screen, CommandPalette)


async def test_a_lent_machine_has_the_keys_of_the_person(engine: FakeEngine, home: Path) -> None:
    (home / "config").mkdir()
    (home / "config" / "keymap.toml").write_text('lending.code = "n"\nlending.cod = "x"\n')
    app = LendingApp(engine, OpenNetwork(id=1), first_wait_s=0.0)
    async with app.run_test(size=(80, 24)):
        assert offered(app)["New code"] == "Here: n"
        assert "Did you mean lending.code?" in app.query_one(Events).render().plain
    use({})


async def test_ctrl_z_suspends_and_leaves_the_draft_which_alt_z_undoes(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    monkeypatch.setattr(os, "getsid", lambda process: -1)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None and app._driver is not None
        monkeypatch.setattr(type(app._driver), "can_suspend", True)
        await pilot.press("a", "ctrl+z")
        assert app.chat.prompt.text == "a" and sent == [(os.getpid(), signal.SIGTSTP)]
        await pilot.press("alt+z")
        assert app.chat.prompt.text == ""
        await pilot.press("alt+shift+z")
        assert app.chat.prompt.text == "a"
        # Terminals that do not send alt have the palette.
        assert offered(app)["Undo typing"] == "Here: alt+z"
        await pilot.press(*"bc de", "home", "alt+d")
        assert app.chat.prompt.text.strip() == "de"
        # A question that was asked is not undone.
        app.chat.prompt.done()
        await ask(pilot, app, "Hello")
        await pilot.press("alt+z")
        assert app.chat.prompt.text == "" and len(sent) == 1
        await pilot.press("shift+tab", "ctrl+z", "escape")
        assert len(sent) == 2
        # A terminal that was opened for this program alone has no shell that could continue it.
        monkeypatch.setattr(os, "getsid", lambda process: os.getpgrp())
        await pilot.press("ctrl+z")
        await wait_until(pilot, lambda: "There is no shell to go back to." in [n.message for n in app._notifications])
        assert len(sent) == 2


@pytest.mark.soak
@pytest.mark.usefixtures("few_settings")
async def test_the_palette_shows_first_what_was_run_last(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()

    def shown() -> list[str]:
        found = app.screen.query_one(OptionList)
        return [str(found.get_option_at_index(i).prompt).splitlines()[0] for i in range(found.option_count)]

    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette) and len(shown()) > len(COMMANDS))
        first = shown()
        titles = [command.title for command in COMMANDS]
        # By subject, as in the table, not by the alphabet: a new chat is near the top.
        assert first[: len(titles)] == titles
        assert first.index("New chat") < first.index("Archive the chat")
        await pilot.press("escape")
        await wait_until(pilot, lambda: not isinstance(app.screen, CommandPalette))
        for title in ("Status", "Log"):
            await pilot.press("ctrl+p")
            await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette))
            await pilot.press(*title)
            await wait_until(pilot, lambda title=title: shown()[:1] == [title])
            await pilot.press("enter")
            await wait_until(pilot, lambda: app.screen is not app.chat and not isinstance(app.screen, CommandPalette))
            await pilot.press("escape")
            await wait_until(pilot, lambda: app.screen is app.chat)
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette) and len(shown()) > len(COMMANDS))
        assert shown()[:2] == ["Log", "Status"]
        # A word of a description is found, too; what has it in its title stands first.
        await pilot.press(*"candidates")
        await wait_until(pilot, lambda: shown() == ["Beams"])
        assert app.recent_commands == ["Log", "Status"]


@pytest.mark.usefixtures("few_settings")
async def test_the_marked_command_can_be_seen_without_colours(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette) and app.screen.query(OptionList))
        found = app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: found.option_count > 1)
        await pilot.press("down")

        def underlined() -> list[str]:
            lines = [found.render_line(y) for y in range(found.size.height)]
            return [
                text.strip() for line in lines for text, style, _ in line if style and style.underline and text.strip()
            ]

        await wait_until(pilot, lambda: found.highlighted is not None and underlined())
        marked = str(found.get_option_at_index(found.highlighted or 0).prompt).splitlines()
        assert underlined() == marked


pytestmark = pytest.mark.usefixtures("few_settings")


async def test_a_theme_of_the_palette_is_there_at_the_next_start(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert set(app.available_themes) == set(THEMES)
        app.theme = "nord"
        await pilot.pause()
    again = make_app()
    async with again.run_test() as pilot:
        await ready(pilot, again)
        assert again.theme == "nord"
