"""The chat screen under the keys of a person."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import sqlite3
import struct
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path

import pytest
from textual.content import Content
from textual.events import Key

from app.chat.state import Entry
from app.conversations.exporting import export_problem
from app.conversations.store import ConversationStore
from app.tui.chat.message import FAST, STEP, LiveTail, MessageView
from app.tui.chat.status import StatusLine
from app.tui.render.highlighting import Highlighter
from app.tui.screens.chats_side import ConversationsScreen
from engine.ipc.messages import Generate
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, ask, controller, notice, ready, shown, wait_until


async def test_a_question_is_answered(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"Hi", "enter")
        await wait_until(pilot, lambda: len(shown(app)) == 2 and "Paris is the capital." in shown(app)[1])
        assert app.chat is not None
        assert app.chat.prompt.text == ""
        assert not app.chat.query_one("#welcome").display


@pytest.mark.sampled
@pytest.mark.parametrize("update_s", [0.0, 0.02])
async def test_text_is_shown_while_it_arrives(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, update_s: float
) -> None:
    from app.tui.chat import transcript

    monkeypatch.setattr(transcript, "UPDATE_S", update_s)
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"go", "enter")
        assert app.chat is not None
        tail = app.chat.transcript.query_one(".tail")
        await wait_until(pilot, lambda: tail.display and "Paris" in str(tail.render()))
        assert controller(app).busy


async def test_keys_that_come_all_at_once_keep_their_order(make_app: MakeApp) -> None:
    """As a terminal sends what is typed fast: nothing is waited for between two keys."""
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        for name, character in (("a", "a"), ("alt+enter", None), ("b", "b"), ("left", None), ("c", "c"), ("d", "d"),
                                ("backspace", None), ("e", "e")):  # fmt: skip
            app.post_message(Key(name, character))
        await wait_until(pilot, lambda: app.chat and "e" in app.chat.prompt.text)
        await pilot.pause()
        assert app.chat is not None and app.chat.prompt.text == "a\nceb"


async def test_what_is_typed_just_behind_enter_stays_out_of_the_question(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        for character in "one\r/beams 2\rtwo\rrest":
            app.post_message(Key("enter", None) if character == "\r" else Key(character, character))
        await wait_until(pilot, lambda: app.chat and app.chat.prompt.text == "rest")
        await wait_until(pilot, lambda: len(controller(app).thread.path) == 4)
        assert [entry.content for entry in controller(app).thread.path[::2]] == ["one", "two"]


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter", "alt+enter"])
async def test_keys_that_break_the_line(make_app: MakeApp, engine: FakeEngine, key: str) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press("a", key, "b", "enter")
        await wait_until(pilot, lambda: engine.sent(Generate))
        assert controller(app).thread.path[0].content == "a\nb"


async def test_pasted_lines_stay_lines_and_the_field_grows(make_app: MakeApp) -> None:
    from textual.events import Paste

    app = make_app()
    async with app.run_test(size=(80, 30)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.post_message(Paste("\n".join(f"line {number}" for number in range(10))))
        await wait_until(pilot, lambda: app.chat and "line 9" in app.chat.prompt.text)
        assert controller(app).thread.path == []
        await wait_until(pilot, lambda: app.chat and app.chat.prompt.size.height == 10)


@pytest.mark.parametrize("stop", ["escape", "ctrl+c"])
async def test_esc_stops_and_keeps_the_text(make_app: MakeApp, engine: FakeEngine, stop: str) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"go", "enter")
        await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)
        await pilot.press(stop)
        await wait_until(pilot, lambda: not controller(app).busy)
        assert "Paris" in shown(app)[1]
        assert "Stopped." in shown(app)[1]
        # With nothing to stop and nothing selected, ctrl+c says how to leave.
        await pilot.press("ctrl+c")
        assert [notice.message for notice in app._notifications] == ["Press ctrl+q to quit."]


async def test_an_early_question_waits_visibly(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.load_gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.chat is not None and app.chat.is_mounted)
        assert app.chat is not None
        await pilot.press(*"early", "enter")
        tail = app.chat.transcript.query_one(".tail")
        await wait_until(pilot, lambda: tail.display and "Waiting for the model." in str(tail.render()))
        engine.load_gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        assert "Paris is the capital." in shown(app)[1]


async def test_up_recalls_earlier_questions(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "one")
        await ask(pilot, app, "two")
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press("up")
        assert prompt.text == "two"
        await pilot.press("up")
        assert prompt.text == "one"
        await pilot.press("down", "down")
        assert prompt.text == ""
        await pilot.press("x", "up")
        assert prompt.text == "x"


@pytest.mark.soak
async def test_messages_can_be_walked_edited_and_switched(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.answer = lambda request: [f"to {request.messages[-1].content if request.messages else ''}"]
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "a")
        await pilot.press("shift+up")
        assert isinstance(app.focused, MessageView)
        assert app.focused.entry.role == "assistant"
        await pilot.press("up", "e")
        assert app.chat is not None
        assert app.chat.prompt.text == "a" and app.chat.prompt.border_title == "Editing a question · esc cancels"
        await pilot.press("b", "enter")
        await wait_until(pilot, lambda: [e.content for e in controller(app).thread.path] == ["ab", "to ab"])
        assert app.chat.prompt.border_title == ""
        await pilot.press("shift+up", "up", "left")
        await wait_until(pilot, lambda: [e.content for e in controller(app).thread.path] == ["a", "to a"])
        await wait_until(pilot, lambda: isinstance(app.focused, MessageView) and app.focused.entry.content == "a")


async def test_leaving_an_edit_changes_nothing(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "a")
        await pilot.press(*"/edit", "enter")
        assert app.chat is not None
        assert app.chat.prompt.text == "a"
        await pilot.press("escape")
        assert app.chat.prompt.text == ""
        assert len(controller(app).thread.path) == 2


async def test_a_crash_is_said_and_the_next_question_works(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.dies_at = 2
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"crash", "enter")
        await wait_until(pilot, lambda: "is restarting" in notice(app))
        assert "Paris" in shown(app)[1]
        await ready(pilot, app)
        await ask(pilot, app, "again")
        assert "Paris is the capital." in shown(app)[3]
        assert notice(app) == ""


async def test_escape_sequences_never_reach_the_screen(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.answer = lambda request: ["\x1b]0;title\x07", "\x1b[2J[bold]x[/] ", "\x9b31m", "[@click=app.quit]y[/]"]
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "q")
        assert "[bold]x[/] [@click=app.quit]y[/]" in shown(app)[1]
        drawn = app.export_screenshot()
        assert "\x1b" not in drawn
        assert "\x9b" not in drawn


async def test_slash_commands(make_app: MakeApp, home: Path) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"/nosuch", "enter")
        assert "no command /nosuch" in notice(app)
        assert app.chat is not None
        assert app.chat.prompt.text == "/nosuch"
        app.chat.prompt.clear()
        await ask(pilot, app, "keep me")
        target = home / "out.md"
        app.chat.prompt.fill(f"/export {target}")
        await pilot.press("enter")
        assert "keep me" in target.read_text()
        app.chat.prompt.fill(f"/export {target}")
        await pilot.press("enter")
        assert "already exists" in notice(app)
        app.chat.prompt.fill("/beams 40")
        await pilot.press("enter")
        assert "from 1 to 16" in notice(app)


async def test_a_question_asked_just_after_a_change_of_chats_is_shown_once(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        controller(app).new_conversation()
        controller(app).submit("What is the capital?")
        await wait_until(pilot, lambda: not controller(app).busy and shown(app))
        await pilot.pause()
        assert len(shown(app)) == 2


@pytest.mark.soak
async def test_a_long_history_is_windowed(make_app: MakeApp, store: ConversationStore) -> None:
    conversation = store.create(model="starter")
    parent: int | None = None
    for number in range(100):
        role = "user" if number % 2 == 0 else "assistant"
        parent = store.add(conversation.id, role, f"message {number}", parent=parent).id  # type: ignore[arg-type]
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        controller(app).open_conversation(conversation.id)
        await wait_until(pilot, lambda: len(shown(app)) == 30)
        assert "message 99" in shown(app)[-1]
        assert app.chat is not None
        transcript = app.chat.transcript

        def top() -> str:
            return next(
                view.entry.content for view in transcript.views if view.virtual_region.bottom > transcript.scroll_y
            )

        for number in range(60):
            before, there = transcript.scroll_y, top()
            counted = len(shown(app))
            transcript.scroll_to(y=before - 3, animate=False, immediate=True)
            await pilot.pause()
            if transcript.scroll_y > before:
                assert len(shown(app)) > counted or transcript.window.newer, "older messages were loaded"
            assert int(there.split()[1]) - int(top().split()[1]) in (0, 1), f"step {number}: the reader was moved"
            assert not transcript.following
        await pilot.press("shift+tab", "g")
        await wait_until(pilot, lambda: "message 0" in shown(app)[0] and app.focused is transcript.views[0])
        assert transcript.scroll_y <= 1 and len(shown(app)) <= 90
        await pilot.press("G")
        await wait_until(pilot, lambda: app.focused is transcript.views[-1] and "message 99" in shown(app)[-1])
        await pilot.press("g")
        await wait_until(pilot, lambda: app.focused is transcript.views[0])
        for number in range(70):
            there = int(top().split()[1])
            transcript.scroll_to(y=transcript.scroll_y + 5, animate=False, immediate=True)
            await pilot.pause()
            assert int(top().split()[1]) - there in (0, 1, 2), f"step {number}: the reader was moved"
        await wait_until(pilot, lambda: "message 99" in shown(app)[-1] and len(shown(app)) <= 90)
        await pilot.press("g")
        await wait_until(pilot, lambda: "message 0" in shown(app)[0] and app.focused is transcript.views[0])
        await pilot.press("escape", "ctrl+end")
        await wait_until(pilot, lambda: transcript.following and "message 99" in shown(app)[-1])


async def test_the_reader_is_left_alone_while_text_arrives(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    engine.answer = lambda request: ["line\n\n" * 60, "the end"]
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"go", "enter")
        assert app.chat is not None
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: transcript.max_scroll_y > 40)
        await wait_until(pilot, lambda: transcript.scroll_y >= transcript.max_scroll_y - 1)
        await pilot.press("pageup", "pageup")
        await wait_until(pilot, lambda: not transcript.following)
        before = transcript.scroll_y
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        await pilot.pause()
        assert transcript.scroll_y == before
        await pilot.press("ctrl+end")
        await wait_until(pilot, lambda: transcript.following)
        assert "the end" in shown(app)[1]


async def test_a_terminal_without_size_does_not_matter(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "q")
        for columns, rows in ((0, 0), (1, 1), (3, 2), (80, 24)):
            await pilot.resize_terminal(columns, rows)
            await pilot.pause()
        assert "Paris is the capital." in shown(app)[1]


async def test_help_is_about_what_has_the_focus(make_app: MakeApp) -> None:
    app = make_app()
    async with app.run_test(size=(100, 50)) as pilot:
        await ready(pilot, app)
        await pilot.press("f1")
        await wait_until(pilot, lambda: app.screen.query(".help-text"))
        assert "Type a question" in str(app.screen.query_one(".help-text").render())
        await pilot.press("escape", "f2")
        await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        await pilot.press("f1")
        await wait_until(pilot, lambda: app.screen.query(".help-text"))
        assert "Type to search" in str(app.screen.query_one(".help-text").render())


async def test_every_command_of_the_palette_exists(make_app: MakeApp) -> None:
    from app.chat.commands.table import COMMANDS

    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        titles = [command.title for command in app.get_system_commands(app.chat)]
        assert titles[: len(COMMANDS)] == [command.title for command in COMMANDS]
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: app.screen is not app.chat)


async def test_quitting_saves_what_there_is(make_app: MakeApp, engine: FakeEngine, store: ConversationStore) -> None:
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await pilot.press(*"go", "enter")
        await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)
        await pilot.press("ctrl+q")
        await pilot.pause()
    record = store.shown(store.conversations()[0].id)[-1]
    assert (record.content, record.state) == ("Paris", "stopped")


def test_stray_output_does_not_reach_the_terminal(tmp_path: Path) -> None:
    script = (
        "import os, shutil, sys\n"
        "from pathlib import Path\n"
        "from app.tui.terminal.output import guarded_output\n"
        f"with guarded_output(Path({str(tmp_path / 'log')!r})):\n"
        "    os.write(1, b'stray one'); os.write(2, b'stray two')\n"
        "    print('the screen', *shutil.get_terminal_size(), file=sys.__stderr__, flush=True)\n"
        "os.write(1, b'afterwards')\n"
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen([sys.executable, "-c", script], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    assert process.wait(60) == 0
    seen = os.read(master, 4096)
    os.close(master)
    assert b"the screen 111 33" in seen
    assert b"afterwards" in seen
    assert b"stray" not in seen
    assert (tmp_path / "log").read_bytes() == b"stray onestray two"


def test_a_fast_answer_grows_by_several_lines_at_a_time() -> None:
    tail = LiveTail(Highlighter())
    content = Content("\n".join(["line"] * (STEP + 1)))
    assert tail.height_of(content, 40) == STEP + 1
    entry = Entry("assistant", "text", state="writing", tokens_per_s=FAST)
    tail.show(entry)
    assert tail.height_of(content, 40) == 2 * STEP
    entry.tokens_per_s = FAST / 2
    tail.show(entry)
    assert tail.height_of(content, 40) == STEP + 1


@pytest.mark.soak
async def test_a_fast_answer_is_shown_whole_with_few_drawings_of_the_status(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.speed = 200.0
    engine.answer = lambda request: [f"word{count} " for count in range(400)]
    drawn = 0
    update = StatusLine.update

    def counted(line: StatusLine) -> None:
        nonlocal drawn
        drawn += 1
        update(line)

    monkeypatch.setattr(StatusLine, "update", counted)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        drawn = 0
        await ask(pilot, app, "count")
        assert "word399" in shown(app)[1]
        assert app.chat is not None
        assert app.chat.controller.status.tokens_per_s == 200.0
        assert 0 < drawn < 100


pytestmark = pytest.mark.usefixtures("few_settings")


async def test_the_notice_of_text_not_saved_goes_when_it_is_saved(make_app: MakeApp, store: ConversationStore) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:  # type: ignore[attr-defined]
            other.execute("BEGIN IMMEDIATE")
            await ask(pilot, app, "hello")
            await wait_until(pilot, lambda: "locked by another program" in notice(app))
            other.execute("ROLLBACK")
            controller(app)._saver.retry()
            await wait_until(pilot, lambda: not notice(app))
            assert "not saved" not in "".join(shown(app))


async def test_leaving_waits_for_a_short_lock_of_the_store(make_app: MakeApp, store: ConversationStore) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        await ask(pilot, app, "hello")
        chat = controller(app)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:  # type: ignore[attr-defined]
            other.execute("BEGIN IMMEDIATE")
            chat.submit("again")
            assert chat.unsaved
            asyncio.get_running_loop().call_later(0.3, other.execute, "ROLLBACK")
            await app.action_quit_chat()
        assert app.return_code == 0
        assert not chat.unsaved and "not saved" not in notice(app)


def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    path = tmp_path / "nope" / "x.md"
    with pytest.raises(OSError) as failed:
        path.open("x")
    assert export_problem(path, failed.value) == f"Export failed: the folder {path.parent} does not exist."
    there = tmp_path / "x.md"
    there.touch()
    with pytest.raises(OSError) as failed:
        there.open("x")
    assert export_problem(there, failed.value) == f"Export failed: {there} already exists; choose another name."
