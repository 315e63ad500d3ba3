"""An error in whatever the program does is a sentence and a log entry, and the chat goes on."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable

import pytest
from textual import events
from textual.app import ComposeResult, RenderResult
from textual.dom import DOMNode
from textual.message import Message
from textual.message_pump import MessagePump
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Static

from app.conversations.store import ConversationStore
from app.log_tail import log_path
from app.tui.actions import all_actions
from app.tui.application import ChatApp
from app.tui.screens.chat import ChatScreen
from app.tui.terminal.guarded import MOST_FAILURES, GuardedApp
from tests.app.fake_engine import FakeEngine
from tests.app.tui.every_screen import SCREENS, back, prepare
from tests.app.tui.screen_helpers import MakeApp, ask, controller, ready, shown, wait_until

SENTENCE = "Something went wrong; your chats are saved. Go on as before; details are in the log: /log."

LAST_WORDS = "Something went wrong; your chats are saved. Start the program again; details are in {}."


class Broken(Exception):
    """What the tests raise."""


def fail(*_: object) -> None:
    raise Broken("a handler failed")


async def fail_later() -> None:
    fail()


class FailsToCompose(Static):
    def compose(self) -> ComposeResult:
        fail()
        yield Static()


class FailsToMount(Static):
    def on_mount(self) -> None:
        fail()


class FailsToRender(Widget):
    """Cannot be drawn once."""

    failed = False

    def render(self) -> RenderResult:
        if not self.failed:
            self.failed = True
            fail()
        return ""


class Unhandled(Message):
    """A message whose handler fails."""


def by_message(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(widget), "on_unhandled", fail, raising=False)
    widget.post_message(Unhandled())


def by_event(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.call_later(fail)


def by_next_callback(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.call_next(fail)


def by_drawing(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.call_after_refresh(fail)


def by_timer(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.set_timer(0.001, fail)


def by_worker(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.run_worker(fail_later())


def by_thread(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.run_worker(fail, thread=True)


def by_task(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().create_task(fail_later())


def by_loop(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().call_soon(fail)


def by_action(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget, "action_fail", fail, raising=False)
    widget.app.call_later(widget.run_action, "fail")


def by_check_action(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = []
    check = widget.check_action

    def fail_once(action: str, parameters: tuple[object, ...]) -> bool | None:
        if not failed:
            failed.append(True)
            fail()
        return check(action, parameters)

    monkeypatch.setattr(widget, "check_action", fail_once)
    widget.screen.refresh_bindings()
    widget.app.call_later(lambda: widget.screen.active_bindings)


def by_render(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = FailsToRender()
    drawn.styles.overlay, drawn.styles.position, drawn.styles.width, drawn.styles.height = "screen", "absolute", 1, 1
    widget.screen.mount(drawn)


def by_compose(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.screen.mount(FailsToCompose())


def by_mount(widget: Widget, monkeypatch: pytest.MonkeyPatch) -> None:
    widget.screen.mount(FailsToMount())


WAYS: tuple[Callable[[Widget, pytest.MonkeyPatch], None], ...] = (
    by_message, by_event, by_next_callback, by_drawing, by_timer, by_worker, by_thread, by_task, by_loop, by_action,
    by_check_action, by_render,
)  # fmt: skip
WAYS_TO_BUILD = (by_compose, by_mount)


def forgive(app: GuardedApp) -> None:
    """As Textual's tests end with the first error: forget it."""
    assert isinstance(app._exception, Broken)
    app._exception = None
    app._exception_event.clear()
    app._failed.clear()


def said(app: ChatApp) -> list[str]:
    return [notice.message for notice in app._notifications]


def logged() -> int:
    path = log_path("screen")
    return path.read_text().count(f"{Broken.__module__}.Broken: a handler failed") if path.exists() else 0


async def failed(app: ChatApp, before: int) -> None:
    """Wait for an error to be logged. The pilot's waiting ends with the first one."""
    for _ in range(400):
        if logged() > before:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing failed")


@pytest.fixture
def asked_early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actions about which each widget was asked before its children were there: whether their keys count."""
    start, asked = ChatApp._register_child, []

    def start_and_ask(
        app: ChatApp, parent: DOMNode, child: Widget, before: int | None = None, after: int | None = None
    ) -> None:
        start(app, parent, child, before, after)
        for _, binding in child._bindings:
            _, action, parameters = app._parse_action(binding.action, child)
            child.check_action(action, parameters)
            asked.append(action)

    monkeypatch.setattr(ChatApp, "_register_child", start_and_ask)
    return asked


async def goes_wrong(pilot: Pilot[int], app: ChatApp, way: Callable[[Widget, pytest.MonkeyPatch], None]) -> None:
    """Let something fail, and see that it is said and logged."""
    app.clear_notifications()
    before = logged()
    with pytest.MonkeyPatch.context() as patch:
        way(app.focused or app.screen, patch)
        await failed(app, before)
        await asyncio.sleep(0)
    forgive(app)
    await pilot.pause()
    assert SENTENCE in said(app), way


@pytest.mark.sampled(least=3)
@pytest.mark.parametrize("name", SCREENS)
async def test_no_error_on_any_screen_ends_the_chat(
    name: str, make_app: MakeApp, engine: FakeEngine, few_settings: None, asked_early: list[str]
) -> None:
    prepare(engine)
    app = make_app()
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Explain stacks and queues")
        await SCREENS[name](pilot, app)
        await pilot.pause()
        opened, focused = app.screen, app.focused
        for way in WAYS:
            await goes_wrong(pilot, app, way)
            assert (app.screen, app.focused) == (opened, focused), way
        if opened is not app.chat:
            for way in WAYS_TO_BUILD:
                if app.screen is app.chat:
                    await SCREENS[name](pilot, app)
                    await pilot.pause()
                await goes_wrong(pilot, app, way)
                assert app.screen is not opened
        if engine.gate is not None:
            engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        app.clear_notifications()
        await back(pilot, app)
        assert app.chat is not None
        app.chat.editing.end()
        await ask(pilot, app, "And now?")
        *_, question, answer = controller(app).thread.path
        assert (question.content, answer.state, bool(answer.content)) == ("And now?", "complete", True)
    assert not app.last_words
    assert asked_early


@pytest.mark.soak
@pytest.mark.parametrize("name", ["chat", "chats", "timing", "sampling", "a persona", "palette", "help", "confirm"])
async def test_a_screen_that_is_closed_twice_closes_no_other(
    name: str, make_app: MakeApp, engine: FakeEngine, few_settings: None
) -> None:
    prepare(engine)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "Explain stacks and queues")
        await SCREENS[name](pilot, app)
        await pilot.pause()
        screen, below = app.screen, app.screen_stack[:-1]
        screen.dismiss(None)
        screen.dismiss(None)
        assert app.screen_stack == ([*below, screen] if screen is app.chat else below)
        if engine.gate is not None:
            engine.gate.set()
        await pilot.pause()
        assert app.chat in app.screen_stack


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
async def test_keys_in_a_burst_never_close_the_chat(make_app: MakeApp, every: int) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        for place, first in enumerate(("f5", "f4", "f7", "f3", "f2", "f8", "ctrl+s")):
            bursts = ((first, first, "escape", "f7"), (first, "escape", "escape"), (first, first, first, "escape"))
            for keys in bursts[place % every :: every]:
                for key in keys:
                    app.post_message(events.Key(key, None))
                await pilot.pause()
                assert app.chat in app.screen_stack, keys
                while app.screen is not app.chat:
                    await pilot.press("escape")
                app.chat.action_close_panel()
                await pilot.pause()


@pytest.mark.soak
def test_no_attribute_of_ours_is_one_of_textual_s_own() -> None:
    """A widget that sets `_running` for itself does not run for Textual."""
    all_actions()  # imports all screens
    pattern = re.compile(r"self\.(_\w+)\s*(?::[^=\n]+)?=[^=]")

    @functools.cache
    def set_by(kind: type) -> frozenset[str]:
        return frozenset(pattern.findall(inspect.getsource(kind)))

    allowed = {"_exception", "_return_code", "_clipboard", "_button"}
    left, ours = list(MessagePump.__subclasses__()), 0
    for kind in left:
        left += [found for found in kind.__subclasses__() if found not in left]
        if kind.__module__.startswith("app."):
            ours += 1
            bases = [base for base in kind.__mro__ if base.__module__.startswith("textual.")]
            clash = set_by(kind) & frozenset().union(*map(set_by, bases)) - allowed
            assert not clash, (kind, clash)
    assert ours > 40


async def test_a_screen_that_fails_twice_is_closed(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(notifications=True) as pilot:
        await ready(pilot, app)
        await SCREENS["status"](pilot, app)
        for _ in range(2):
            assert app.screen is not app.chat
            before = logged()
            app.screen.call_later(fail)
            await failed(app, before)
        assert isinstance(app._exception, Broken)
        app._exception = None
        await wait_until(pilot, lambda: app.screen is app.chat)


async def test_an_error_while_answering_fails_that_answer_only(
    make_app: MakeApp, engine: FakeEngine, store: ConversationStore
) -> None:
    def answer(request: object) -> list[str]:
        fail()
        return []

    engine.answer = answer
    app = make_app()
    async with app.run_test(notifications=True) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.fill("One?")
        await pilot.press("enter")
        await failed(app, 0)
        forgive(app)
        await wait_until(pilot, lambda: not controller(app).busy)
        assert controller(app).thread.path[-1].state == "failed"
        assert any("/again answers the question again." in text for text in shown(app))
        engine.answer = lambda request: ["It goes on."]
        await ask(pilot, app, "Two?")
        assert any("It goes on." in text for text in shown(app))
    assert [message.content for message in store.shown(1)] == ["One?", "", "Two?", "It goes on."]


async def test_an_error_that_repeats_for_ever_ends_the_chat_and_keeps_its_text(
    make_app: MakeApp, engine: FakeEngine, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    monkeypatch.setattr(app, "end_in_time", lambda status: None)
    async with app.run_test(notifications=True) as pilot:
        await ready(pilot, app)
        chat = app.chat
        assert chat is not None
        chat.prompt.fill("Which city?")
        await pilot.press("enter")
        await wait_until(pilot, lambda: controller(app).thread.path[-1:] and controller(app).thread.path[-1].content)
        chat.prompt.fill("a draft")
        await pilot.pause()

        def fail_again() -> None:
            chat.call_later(fail_again)
            fail()

        chat.call_later(fail_again)
        for _ in range(2000):
            if app._exit:
                break
            await asyncio.sleep(0.005)
        app._exception = None
    assert app.return_value == 1
    assert app.last_words == LAST_WORDS.format(log_path("screen"))
    assert logged() > MOST_FAILURES
    assert [(message.content, message.state) for message in store.shown(1)] == [
        ("Which city?", "complete"), ("Paris", "stopped")
    ]  # fmt: skip
    draft = store.draft(1)
    assert draft is not None and draft.text == "a draft"


async def test_a_chat_that_cannot_be_built_ends_with_a_sentence(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatScreen, "compose", fail)
    app = make_app()
    monkeypatch.setattr(app, "end_in_time", lambda status: None)
    async with app.run_test():
        for _ in range(2000):
            if app._exit:
                break
            await asyncio.sleep(0.005)
        app._exception = None
    assert (app.return_value, app.last_words) == (1, LAST_WORDS.format(log_path("screen")))
    assert logged()
