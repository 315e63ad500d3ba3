"""A fake engine, a real store and real settings in a temporary folder, and screens that are quick to test."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import textual.app
import textual.pilot
from textual._context import active_app
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.message_pump import MessagePump
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from app.conversations.opening import open_store
from app.conversations.store import ConversationStore
from app.settings.file import open_settings
from app.settings.schema import SCHEMA
from app.tui.application import ChatApp
from app.tui.screens import settings
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MACHINE, MakeApp


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVATELLM_HOME", str(tmp_path))
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path


@pytest.fixture
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models that a first start offers depend on the free disk; the tests' are those of a terabyte."""
    monkeypatch.setattr("app.chat.first_run._free_disk", lambda: 10**12)


async def settled(*_: float) -> None:
    """Wait until everything that could be done now is done: callbacks, messages, layouts and drawings of the screen.

    Textual's tests wait until the process uses no processor time, at least 20 ms a key. On a busy machine that is also
    the case while it waits for its turn.
    """
    for _ in range(5):  # a layout may follow a drawing, a callback a layout, another drawing the callback
        # Private, as asyncio offers no other way to ask whether a callback waits.
        ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        for _ in range(100_000):
            if not ready:
                break
            await asyncio.sleep(0)
        app = active_app.get(None)
        if app is None or not app.screen_stack:
            return
        app.screen._on_timer_update()


async def screen_settled(pilot: Pilot[int], *_: float) -> bool:
    """Wait until the screen's widgets have handled what was sent to them; False if the application failed.

    Textual's own waits for at most 30 seconds, also for a widget that was removed meanwhile.
    """
    waiting: set[MessagePump] = set()
    handled = asyncio.Event()

    def has_handled(widget: MessagePump) -> None:
        waiting.discard(widget)
        if not waiting:
            handled.set()

    if not pilot.app.screen_stack:
        return False
    for widget in [pilot.app, *pilot.app.screen.walk_children(with_self=True)]:
        if not _has_nothing_to_do(widget) and widget.call_later(has_handled, widget):
            waiting.add(widget)
    while any(not _has_ended(widget) for widget in waiting):
        if pilot.app._exception is not None:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(handled.wait(), 0.05)
    return True


def _has_ended(widget: MessagePump) -> bool:
    """Whether it handles nothing any more: it was closed, or an exception ended the task that handles its messages."""
    return widget._closed or (widget._task is not None and widget._task.done())


def _has_nothing_to_do(widget: MessagePump) -> bool:
    """Whether it waits for a message, with all earlier ones handled: to send one to every widget takes a third of the
    time of a test of many widgets."""
    queue = widget._message_queue
    # Private, as asyncio offers no other way to ask whether somebody waits; nobody else waits for this event.
    return queue.empty() and any(not waiting.done() for waiting in queue.ready_event._waiters)  # type: ignore[attr-defined]


@pytest.fixture
def no_waiting_for_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pilot, "_wait_for_screen", screen_settled)
    monkeypatch.setattr(textual.pilot, "wait_for_idle", settled)
    monkeypatch.setattr(textual.app, "wait_for_idle", settled)


@pytest.fixture(scope="session")
def stylesheets_parsed_once() -> Iterator[None]:
    """Each application parses the stylesheets of all its widgets: a tenth of the time of a test of one. A set of rules
    is looked for by its identity thousands of times for each widget, which Python's own hash does in half the time."""
    parse = Stylesheet._parse_rules
    parsed: dict[tuple[object, ...], list[RuleSet]] = {}

    def parse_once(sheet: Stylesheet, css: str, **options: object) -> list[RuleSet]:
        key = (css, *options.items(), *sheet._variables.items())
        if key not in parsed:
            parsed[key] = parse(sheet, css, **options)  # type: ignore[arg-type]
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        patch.setattr(RuleSet, "__hash__", object.__hash__)
        yield


@pytest.fixture
def steady_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that blinks is there in some pictures and not in others."""
    monkeypatch.setattr(TextArea, "_toggle_cursor_blink_visible", lambda area: None)
    monkeypatch.setattr(Input, "_toggle_cursor", lambda field: None)


@pytest.fixture
def screens(
    home: Path,
    roomy_disk: None,
    no_waiting_for_idleness: None,
    stylesheets_parsed_once: None,
    steady_cursor: None,
) -> None:
    """What every test of a screen needs."""


FEW_SETTINGS = (
    "runtime", "partitioning", "policy", "gpu_expert_memory", "cpu_threads", "system_prompt", "max_tokens", "ring_mode",
    "ring_shares", "show_timing",
)  # fmt: skip


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A settings screen with some settings of each group: the whole of it takes long to lay out."""
    monkeypatch.setattr(settings, "SCHEMA", tuple(known for known in SCHEMA if known.key in FEW_SETTINGS))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without conversations: each migration costs time, and waits for the disk."""
    path = tmp_path_factory.mktemp("empty") / "conversations.sqlite"
    open_store(path).close()
    return path


@pytest.fixture
def store(home: Path, empty_store: Path) -> Iterator[ConversationStore]:
    opened = open_store(Path(shutil.copy(empty_store, home)))
    yield opened
    opened.close()


@pytest.fixture
def make_app(screens: None, engine: FakeEngine, store: ConversationStore, home: Path) -> MakeApp:
    def make(**values: object) -> ChatApp:
        file = open_settings(home / "settings.toml")
        for key, value in values.items():
            file.change(key, value)
        return ChatApp(engine, store, file, machine=MACHINE, is_missing=lambda model: False)

    return make
