"""A model that was wanted and cannot be used is no reason to fetch another one: nothing opens a socket unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from screen_helpers import MACHINE, controller, wait_until

from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.tui.application import ChatApp
from engine.ipc.messages import Load, Pull


@pytest.mark.parametrize(
    "written",
    ["[model]\nmodel = 3\n", "model = 'mine'\n", "[model\n", "[model]\nmodel = ''\n"],
    ids=["number", "no table", "damaged", "empty"],
)
async def test_a_refused_model_fetches_nothing(
    engine: FakeEngine, store: ConversationStore, home: Path, written: str
) -> None:
    path = home / "settings.toml"
    path.write_text(written)
    app = ChatApp(engine, store, open_settings(path), machine=MACHINE, is_missing=lambda model: True)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.chat is not None and engine.sent(Load))
        assert not engine.sent(Pull)
        # Asked for by name it is fetched.
        controller(app).change_settings({"model": "starter"})
        controller(app).load_again()
        await wait_until(pilot, lambda: engine.sent(Pull))


async def test_without_any_setting_the_starter_is_fetched(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    app = ChatApp(engine, store, open_settings(home / "none.toml"), machine=MACHINE, is_missing=lambda model: True)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.chat is not None and engine.sent(Pull))
