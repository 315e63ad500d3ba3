"""The line of keys: what is shown of it fits at every width, and it is mounted anew when its keys change only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static
from textual.widgets._footer import FooterKey

from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.tui import keymap
from app.tui.application import ChatApp
from app.tui.lending import LendingApp
from app.tui.render.key_footer import KeyFooter
from engine.ipc.messages import OpenNetwork
from tests.app.fake_engine import FakeEngine
from tests.app.tui.every_screen import SCREENS, back, prepare
from tests.app.tui.screen_helpers import MACHINE, MakeApp, ask, ready, until, wait_until

NO_HELP = {"system prompt", "status", "help", "rename", "confirm", "told"}
"""What is modal and says all that can be done in it."""


def all_fit(app: App[Any], width: int) -> bool:
    """Whether no key and no title of the shown screen is cut."""
    titles = list(app.screen.query(".screen-title").results(Static))
    whole = all(title.size.height >= len(Content(str(title.content)).wrap(title.size.width or 1)) for title in titles)
    return whole and all(0 < key.region.width <= key.region.right <= width for key in shown_keys(app))


def shown_keys(app: App[Any]) -> list[FooterKey]:
    return [key for footer in app.screen.query(KeyFooter) for key in footer.query(FooterKey)]


@pytest.mark.parametrize("widths", [(40,), pytest.param((200, 120, 80, 40), marks=pytest.mark.soak)], ids=str)
@pytest.mark.usefixtures("few_settings")
async def test_no_key_is_cut_on_any_screen(make_app: MakeApp, engine: FakeEngine, widths: Sequence[int]) -> None:
    prepare(engine)
    app = make_app()
    async with app.run_test(size=(widths[0], 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Explain stacks and queues, please.")
        for name, open in SCREENS.items():
            await open(pilot, app)
            for width in widths:
                if width != app.size.width:
                    await pilot.resize_terminal(width, 24)
                if not app.screen.query(KeyFooter):
                    break
                where = f"{name} at {width} columns"
                await wait_until(pilot, lambda width=width: all_fit(app, width), where, 2_000)  # type: ignore[misc]
                shown = [key.description for key in shown_keys(app)]
                assert name in NO_HELP or "Help" in shown, f"{where}: {shown}"
                bindings = [active.binding for active in app.screen.active_bindings.values() if active.binding.show]
                assert {binding.description for binding in bindings if binding.key == "escape"} <= set(shown), where
            await back(pilot, app)


@pytest.mark.parametrize("widths", [(40,), pytest.param((200, 120, 80, 40), marks=pytest.mark.soak)], ids=str)
async def test_no_key_is_cut_before_there_is_a_chat(
    engine: FakeEngine, store: ConversationStore, home: Path, widths: Sequence[int]
) -> None:
    first = ChatApp(engine, store, open_settings(home / "s.toml"), machine=MACHINE, is_missing=lambda model: True)
    for app in (first, LendingApp(engine, OpenNetwork(id=0, lend=True))):
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until(pilot, lambda app=app: shown_keys(app))  # type: ignore[misc]
            for width in widths:
                await pilot.resize_terminal(width, 24)
                where = f"{app.screen} at {width} columns"
                await wait_until(pilot, lambda app=app, width=width: all_fit(app, width), where, 2_000)  # type: ignore[misc]


async def test_keys_come_in_the_order_in_which_they_are_declared(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(60, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.action_command("persona")
        await pilot.pause()
        assert [key.description for key in shown_keys(app)] == ["Use", "Save this chat as", "New", "Close", "Help"]


async def test_keys_that_stay_are_not_mounted_again(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        before = shown_keys(app)
        assert before and all(key.has_class("-compact") for key in before)
        app.screen.refresh_bindings()
        await pilot.pause()
        assert [id(key) for key in shown_keys(app)] == [id(key) for key in before]


async def test_other_keys_are_shown_where_the_focus_has_others(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "q")
        before = [key.description for key in shown_keys(app)]
        await pilot.press("shift+up")
        focused = [key.description for key in shown_keys(app)]
        assert focused != before
        await pilot.press("escape")
        assert [key.description for key in shown_keys(app)] == before


async def test_an_action_on_another_key_is_shown_with_it(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        (first, *_) = shown_keys(app)
        app.set_keymap({binding.id: "f12" for _, binding, _, _ in app.screen.active_bindings.values()
                        if binding.id and binding.action == first.action})  # fmt: skip
        app.screen.refresh_bindings()
        await pilot.pause()
        assert "f12" in [key.key_display for key in shown_keys(app)]


async def test_of_several_keys_the_one_that_the_person_names_first_is_shown(make_app: MakeApp, home: Path) -> None:
    (home / "keymap.toml").write_text('chat.beams = "f4,ctrl+y"\nchat.timing = "ctrl+e,f5"')
    try:
        app = make_app()
        async with app.run_test(size=(120, 24)) as pilot:
            await ready(pilot, app)
            shown = {key.description: key.key_display for key in shown_keys(app)}
            assert (shown["Beams"], shown["Timing"]) == ("f4", "^e")
    finally:
        keymap.use({})


class ScreenThatAsksAWidget(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("a", "ask", "Ask")]

    def compose(self) -> ComposeResult:
        yield Static(id="asked")
        yield FooterThatOutlivesIt()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "ask" or self.query_one("#asked").display


class FooterThatOutlivesIt(KeyFooter):
    outlived = False

    async def on_unmount(self) -> None:
        await until(lambda: not self.screen.query("#asked"))
        await self.recompose()
        type(self).outlived = True


async def test_a_screen_that_is_being_removed_is_not_asked_for_its_keys() -> None:
    app = App[None]()
    async with app.run_test() as pilot:
        app.push_screen(ScreenThatAsksAWidget())
        await wait_until(pilot, lambda: [key.description for key in shown_keys(app)] == ["Ask"])
        app.pop_screen()
        await wait_until(pilot, lambda: FooterThatOutlivesIt.outlived)
