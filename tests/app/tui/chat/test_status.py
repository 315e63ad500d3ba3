"""Notices that pass: they leave free what is typed, however many there are."""

from __future__ import annotations

import pytest
from textual.widgets._toast import Toast

from tests.app.fake_engine import FakeEngine
from tests.app.tui.every_screen import SCREENS, prepare
from tests.app.tui.screen_helpers import MakeApp, ask, notice, ready, wait_until


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(40, 20), (80, 24)])
async def test_notices_never_cover_the_prompt(make_app: MakeApp, size: tuple[int, int]) -> None:
    app = make_app()
    async with app.run_test(size=size, notifications=True) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "a")
        for number in range(6):
            text = f"{number} Also in tmux's buffer. Sent to the terminal's clipboard. Nothing to paste? Select it."
            app.notify(text, timeout=600)
        newest = f"{number} Also"
        await wait_until(
            pilot, lambda: any(newest in str(toast.render()) for toast in app.screen.query(Toast)), steps=2000
        )
        await wait_until(pilot, lambda: all(toast.region.height for toast in app.screen.query(Toast)))
        assert app.chat is not None
        for toast in app.screen.query(Toast):
            assert toast.region.bottom <= app.chat.prompt.region.y


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "key", "why"),
    [
        (-1, "b", "This message has no code block."),
        (-1, "t", "This answer has no thoughts."),
        (-2, "t", "This question has no files, and it is shown whole."),
        (-1, "left", "This message has no other versions."),
        (-1, "right", "This message has no other versions."),
        (-2, "m", "There is no answer to go on with; only an answer can be continued."),
    ],
)
async def test_a_key_that_is_not_possible_says_why(make_app: MakeApp, place: int, key: str, why: str) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "a")
        assert app.chat is not None
        app.chat.show_notice("A warning.", "warning")
        app.chat.transcript.views[place].focus()
        await pilot.press(key)
        assert notice(app).splitlines() == ["! A warning.", why]
        app.chat.notice._end_whisper()
        assert notice(app) == "! A warning."
        # Alone it passes, and leaves no empty line.
        app.chat.notice.hide()
        await pilot.press(key)
        assert notice(app) == why
        app.chat.notice._end_whisper()
        assert not app.chat.notice.display


@pytest.mark.sampled(least=3)
@pytest.mark.parametrize("name", [name for name in SCREENS if name not in ("palette", "queue")])
async def test_every_key_that_is_not_possible_says_something(
    make_app: MakeApp, engine: FakeEngine, few_settings: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(engine)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Explain stacks and queues")
        await SCREENS[name](pilot, app)
        await pilot.pause()
        said: list[str] = []
        monkeypatch.setattr(app, "_whisper", said.append)
        impossible = [
            key
            for node, bindings in app.screen._modal_binding_chain
            for key, bound in bindings
            if node.check_action(*app._parse_action(bound.action, node)[1:]) is False and not bound.priority
        ]
        expected = 0
        for key in impossible:
            # Another binding of the same key may be possible.
            if key not in app.screen.active_bindings:
                app._say_why_not(key)
                expected += 1
        assert len(said) == expected and all(line.endswith((".", "?")) for line in said), said
