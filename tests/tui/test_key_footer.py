"""The footer is mounted anew when its keys change, and only then."""

from __future__ import annotations

from screen_helpers import MakeApp, ask, ready
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey

from app.tui.render.key_footer import KeyFooter


def keys(pilot: Pilot[int]) -> list[FooterKey]:
    return list(pilot.app.screen.query_one(KeyFooter).query(FooterKey))


async def test_keys_that_stay_are_not_mounted_again(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        before = keys(pilot)
        assert before and all(key.has_class("-compact") for key in before)
        app.screen.refresh_bindings()
        await pilot.pause()
        assert [id(key) for key in keys(pilot)] == [id(key) for key in before]


async def test_other_keys_are_shown_where_the_focus_has_others(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "q")
        before = [key.description for key in keys(pilot)]
        await pilot.press("shift+up")
        focused = [key.description for key in keys(pilot)]
        assert focused != before
        await pilot.press("escape")
        assert [key.description for key in keys(pilot)] == before


async def test_an_action_on_another_key_is_shown_with_it(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot, app)
        (first, *_) = keys(pilot)
        app.set_keymap({binding.id: "f12" for _, binding, _, _ in app.screen.active_bindings.values()
                        if binding.id and binding.action == first.action})  # fmt: skip
        app.screen.refresh_bindings()
        await pilot.pause()
        assert "f12" in [key.key_display for key in keys(pilot)]
