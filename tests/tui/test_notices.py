"""Notices that pass: they leave free what is typed, however many there are."""

from __future__ import annotations

import pytest
from screen_helpers import MakeApp, ask, ready, wait_until
from textual.widgets._toast import Toast


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
