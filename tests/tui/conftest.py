"""Fixtures for the screen: a fake engine, a real store and real settings in a temporary folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from screen_helpers import MACHINE, MakeApp
from textual.widgets import Input, TextArea

from app.conversations.opening import open_store
from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.tui.application import ChatApp


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def steady_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that blinks is there in some pictures and not in others."""
    monkeypatch.setattr(TextArea, "_toggle_cursor_blink_visible", lambda area: None)
    monkeypatch.setattr(Input, "_toggle_cursor", lambda field: None)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def store(home: Path) -> Iterator[ConversationStore]:
    opened = open_store(home / "conversations.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def make_app(engine: FakeEngine, store: ConversationStore, home: Path) -> MakeApp:
    def make(**settings: object) -> ChatApp:
        file = open_settings(home / "settings.toml")
        for key, value in settings.items():
            file.change(key, value)
        return ChatApp(engine, store, file, machine=MACHINE, is_missing=lambda model: False)

    return make
