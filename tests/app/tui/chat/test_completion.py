"""Completion: what sources offer, and the popup of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from app.chat.commands.table import COMMANDS, parse
from app.tui.chat.completion import Completer, Completion, CompletionPopup, Suggestion
from app.tui.chat.prompt import Prompt
from app.tui.screens.dialogues import HelpScreen
from app.tui.screens.slash_completion import SlashCommands, matching
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ready, wait_until


def names(typed: str) -> list[str]:
    return [command.name for command in matching(typed)]


def test_commands_are_found_by_name_alias_title_and_key() -> None:
    assert names("") == [command.name for command in COMMANDS]
    assert names("mod")[0] == "model"
    assert names("regen")[0] == "again" and names("resume")[0] == "chats"
    assert names("block")[0] == "code"
    assert "settings" in names("ctrl+s")
    assert names("xyzzy") == []
    assert names("quit")[0] == "quit"


def test_what_was_run_last_stands_first_among_equals() -> None:
    recent = ["Quit", "Chats"]
    everything = [command.title for command in matching("", recent)]
    assert everything[:3] == ["Quit", "Chats", "Help"] and len(everything) == len(COMMANDS)
    assert names("st")[:2] == ["status", "stop"] and matching("st", ["Stop the answer"])[0].name == "stop"
    # A name that begins so is more than what was run last.
    assert matching("mod", recent)[0].name == "model"


def test_letters_in_between_may_be_left_out_and_enter_runs_nothing_found_that_way() -> None:
    assert names("tmpry")[0] == "temporary"
    found = SlashCommands().complete("/tmpry", "")
    assert found is not None and not found.preselected
    named = SlashCommands().complete("/temp", "")
    assert named is not None and named.preselected


@given(st.text(max_size=12), st.text(max_size=6))
def test_what_is_offered_is_a_command(typed: str, after: str) -> None:
    found = SlashCommands({"model": lambda: [("one", ""), ("/two", "")]}).complete(f"/{typed}", after)
    for candidate in found.candidates if found is not None else ():
        assert parse(candidate.replacement.rstrip()) is not None
        assert not after.strip()


def test_arguments_are_offered_the_exact_one_first_and_taken_only_if_chosen() -> None:
    source = SlashCommands({"beams": lambda: [(str(width), "") for width in (12, 2, 1)]})
    found = source.complete("/beams 1", "")
    assert found is not None and not found.preselected
    assert [candidate.replacement for candidate in found.candidates] == ["/beams 1", "/beams 12"]
    assert source.complete("/rename a", "") is None
    assert source.complete("/usr/bin", "") is None
    assert source.complete("what /b", "") is None
    assert source.complete("/b", " and more") is None


class Words:
    """Offers three words after a hash, where the last one began."""

    def complete(self, before: str, after: str) -> Completion | None:
        start = before.rfind("#")
        if start < 0 or " " in before[start:]:
            return None
        return Completion(start, tuple(Suggestion(word, "", word) for word in ("one", "two", "three")))


def test_a_closed_popup_stays_closed_for_the_word() -> None:
    completer = Completer([Words()])
    assert completer.at("a #", "") is not None
    completer.close()
    assert completer.at("a #o", "") is None
    assert completer.at("a #o b #", "") is not None
    completer.close()
    assert completer.at("a ", "") is None
    assert completer.at("a #", "") is not None


def test_marks_go_round_and_begin_again_with_each_text() -> None:
    completer = Completer([Words()])
    completer.at("#", "")
    completer.move(-1)
    assert completer.marked == 2
    completer.move(1)
    assert completer.marked == 0
    completer.move(1)
    completer.at("#t", "")
    assert completer.marked == 0
    completer.at("none", "")
    assert completer.marked is None


@pytest.mark.soak
async def test_typing_a_slash_offers_commands_and_the_keys_choose(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt, popup = app.chat.prompt, app.chat.query_one(CompletionPopup)
        await pilot.press("slash")
        await wait_until(pilot, lambda: popup.display)
        assert popup.region.bottom == prompt.region.y and popup.option_count == len(COMMANDS)
        await pilot.press("b", "tab")
        assert prompt.text == "/beams "
        await wait_until(pilot, lambda: popup.display and popup.option_count == 16)
        await pilot.press("down", "down", "enter")
        await wait_until(pilot, lambda: any("uses 2 beams" in said.message for said in app._notifications))
        assert prompt.text == "" and not popup.display
        # esc closes the popup, and nothing else: the text stays, and arrows move in it again.
        await pilot.press("slash", "escape", "h")
        assert prompt.text == "/h" and not popup.display
        prompt.clear()
        await pilot.press("slash", "h", "e", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert prompt.text == ""
        await pilot.press("escape")
        await wait_until(pilot, lambda: not isinstance(app.screen, HelpScreen))
        prompt.focus()
        await pilot.press(*"/quit")
        await wait_until(pilot, lambda: popup.display)
        await pilot.press("up", "down", "space", "x")
        assert prompt.text == "/quit x" and not popup.display


class FieldApp(App[None]):
    """A prompt with its popup, and what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def compose(self) -> ComposeResult:
        yield CompletionPopup("completions")
        yield Prompt("prompt")

    def on_mount(self) -> None:
        prompt = self.query_one(Prompt)
        prompt.popup = self.query_one(CompletionPopup)
        prompt.completer.sources += [SlashCommands({"model": lambda: [("one/model", ""), ("two", "")]}), Words()]
        prompt.send = self._keep
        prompt.focus()

    def _keep(self, text: str, draft: str) -> None:
        self.sent.append(text)
        self.query_one(Prompt).clear()


@pytest.mark.parametrize("typed", ["/rename A title", "/model one", "/model nobody/knows-this", "what is /b", "//b"])
async def test_what_is_typed_is_sent_as_it_stands(typed: str) -> None:
    app = FieldApp()
    async with app.run_test() as pilot:
        await pilot.press(*typed, "enter")
        assert app.sent == [typed]


async def test_a_candidate_can_be_put_in_amid_the_text_and_in_later_lines() -> None:
    app = FieldApp()
    async with app.run_test() as pilot:
        await pilot.press(*"see", "ctrl+j", *"the # one", *["left"] * 4, "down", "enter")
        assert app.query_one(Prompt).text == "see\nthe two one" and not app.sent
        await pilot.press("alt+z", "enter")
        assert app.query_one(Prompt).text == "see\nthe one one"


@pytest.mark.parametrize(("typed", "completed"), [("/model start", "/model starter"), ("/persona no", "/persona none")])
async def test_models_and_personas_are_offered_by_name(make_app: MakeApp, typed: str, completed: str) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        popup = app.chat.query_one(CompletionPopup)
        await pilot.press(*typed)
        await wait_until(pilot, lambda: popup.display)
        await pilot.press("tab")
        assert app.chat.prompt.text == completed


async def test_a_click_does_what_enter_does(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        popup = app.chat.query_one(CompletionPopup)
        await pilot.press("slash")
        await wait_until(pilot, lambda: popup.display)
        await pilot.click(popup, offset=(6, 1))
        await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert app.chat.prompt.text == ""
