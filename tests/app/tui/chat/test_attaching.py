"""Files attached in the chat: shown before sending, sent to the model, kept by their content, opened by a key."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path

import pytest
from textual.events import AppBlur, AppFocus
from textual.widget import Widget

from app.attachments.attachment import Attachment
from app.attachments.references import Resolved
from app.chat.state import Entry, NewQuestion
from app.chat.thread import export_thread, prompt_messages
from app.conversations.drafts import Draft
from app.conversations.store import ConversationStore
from app.tui.chat import attaching
from app.tui.chat.attaching import AttachmentLine
from app.tui.chat.message import MessageView
from app.tui.render.attachments import SHOWN_LINES, attached, to_be_attached
from app.tui.terminal.graphics import Graphics, TerminalReport
from engine.ipc.messages import Generate, Message, PictureFile
from tests.app.attachments.pictures import SEEING, png
from tests.app.chat_helpers import Chat, on_disk, running
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, notice, ready, shown, wait_until

KITTY = ("\x1b[6;20;10t", "\x1b_Gi=31;OK\x1b\\")
SIXEL = ("\x1b[6;20;10t", "\x1b[?62;4c")
ASKED = "explain @a.py\n\nFile `a.py`:\n```\nprint(1)\n```"


@pytest.fixture(autouse=True)
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "work"
    path.mkdir()
    (path / "a.py").write_text("print(1)\n")
    (path / "data.bin").write_bytes(b"\0")
    monkeypatch.chdir(path)
    return path


async def test_attachments_are_kept_by_content_and_asked_again(
    engine: FakeEngine, store: ConversationStore, home: Path
) -> None:
    file = Attachment("a.py", "print(1)\n")
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("explain @a.py", [file])
        await chat.answered()
        assert on_disk(store, chat)[0].attachments == (file,)
        chat.controller.regenerate()
        await chat.answered()
        asked = [request for request in engine.sent(Generate) if isinstance(request, Generate)]
        assert [request.messages for request in asked] == [[Message("user", ASKED)]] * 2
        again = [Entry.of(record) for record in on_disk(store, chat)]
        assert prompt_messages("", again)[0].content == ASKED
        for name, text in (("out.md", ASKED), ("out.json", '"attachments": [')):
            assert text in export_thread(store, chat.controller.thread, home / name).read_text()
        assert chat.controller.context_to_come > len(ASKED) // 4


async def test_a_queued_question_keeps_its_files(engine: FakeEngine, store: ConversationStore) -> None:
    file = Attachment("a.py", "print(1)\n")
    async with running(Chat(engine, store)) as chat:
        chat.controller.submit("first")
        chat.controller.submit("explain @a.py", [file])
        assert chat.controller.queue.items == (NewQuestion("explain @a.py", (file,)),)
        await chat.answered()
        assert chat.path[2].attachments == (file,)


@pytest.mark.soak
async def test_a_file_is_announced_sent_folded_and_opened(make_app: MakeApp, engine: FakeEngine, folder: Path) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        line = app.chat.query_one(AttachmentLine)
        await pilot.press(*"explain @a.py")
        await wait_until(pilot, lambda: line.display)
        assert str(line.visual) == "+ a.py 9 B ~3 tokens   2,048 tokens of context are free"
        assert controller(app).status.draft_tokens == 4 + 3
        await pilot.press("enter")
        await wait_until(pilot, lambda: engine.sent(Generate) and not controller(app).busy)
        request = engine.sent(Generate)[0]
        assert isinstance(request, Generate) and request.messages == [Message("user", ASKED)]
        assert not line.display and controller(app).status.draft_tokens == 0
        assert "▸ a.py · 9 B · ~3 tokens" in shown(app)[0] and "print(1)" not in shown(app)[0]
        await pilot.press("shift+up", "up", "t")
        assert isinstance(app.focused, MessageView) and "▾ a.py" in shown(app)[0] and "print(1)" in shown(app)[0]
        # The file is gone: the edited question keeps what was attached.
        (folder / "a.py").unlink()
        await pilot.press("e", "!", "enter")
        await wait_until(pilot, lambda: len(engine.sent(Generate)) == 2 and not controller(app).busy)
        assert controller(app).thread.path[0].attachments == (Attachment("a.py", "print(1)\n"),)


@pytest.mark.soak
async def test_a_file_that_changes_before_it_is_sent_is_announced_as_it_is_now(
    make_app: MakeApp, engine: FakeEngine, folder: Path
) -> None:
    engine.counts = len
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        line, prompt = app.chat.query_one(AttachmentLine), app.chat.prompt
        await pilot.press(*"explain @a.py and @new.py")
        await wait_until(pilot, lambda: "a.py 9 B 9 tokens" in str(line.visual))
        (folder / "a.py").write_text("print(1, 2)\n")
        # The terminal had not the focus.
        app.post_message(AppBlur())
        await wait_until(pilot, lambda: app.focused is None)
        app.post_message(AppFocus())
        await wait_until(pilot, lambda: "a.py 12 B 12 tokens" in str(line.visual))
        (folder / "new.py").write_text("new\n")
        await pilot.press("space")
        await wait_until(pilot, lambda: "new.py 4 B 4 tokens" in str(line.visual))
        assert controller(app).status.draft_tokens == len(prompt.text) + 12 + 4


async def test_a_look_that_another_one_replaces_leaves_no_warning(
    make_app: MakeApp, recwarn: pytest.WarningsRecorder
) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        line = app.chat.query_one(AttachmentLine)
        line.draft_changed("one", "one")
        for _ in range(2):
            line._look_in_background()
        await pilot.pause()
    gc.collect()
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


async def test_what_cannot_be_attached_is_said_and_the_question_stays(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press(*"see @data.bin", "enter")
        await wait_until(pilot, lambda: "data.bin is a binary file" in notice(app))
        assert prompt.text == "see @data.bin" and not controller(app).thread.path
        prompt.fill("what is @property?")
        await pilot.press("enter")
        await wait_until(pilot, lambda: engine.sent(Generate))
        assert controller(app).thread.path[0].attachments == ()


async def test_a_pasted_picture_is_announced_with_its_tokens_and_sent(
    make_app: MakeApp, engine: FakeEngine, folder: Path
) -> None:
    engine.facts = SEEING
    (folder / "my photo.png").write_bytes(png(320, 128))
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        line, prompt = app.chat.query_one(AttachmentLine), app.chat.prompt
        prompt.fill("what is ")
        prompt.paste("'my photo.png'")
        assert prompt.text == 'what is @"my photo.png" '
        await wait_until(pilot, lambda: line.display)
        assert str(line.visual) == "+ my photo.png 320×128 40 tokens   2,048 tokens of context are free"
        assert controller(app).status.draft_tokens == 6 + 40
        await pilot.press("enter")
        await wait_until(pilot, lambda: engine.sent(Generate) and not controller(app).busy)
        request = engine.sent(Generate)[0]
        assert isinstance(request, Generate)
        assert request.messages == [Message("user", 'what is @"my photo.png" ', pictures=[PictureFile(png(320, 128))])]
        assert "▪ my photo.png · 320×128 · " in shown(app)[0]
        assert not app.chat.transcript.views[0].check_action("files", ()), "there is no text to open"


@pytest.mark.parametrize("reports", [KITTY, SIXEL], ids=["kitty", "sixel"])
async def test_a_picture_is_drawn_before_it_is_sent_and_in_the_conversation(
    make_app: MakeApp, engine: FakeEngine, folder: Path, reports: tuple[str, ...]
) -> None:
    engine.facts = SEEING
    (folder / "a.png").write_bytes(png(320, 128))
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.graphics = Graphics(true_colours=True)
        for report in reports:
            app.post_message(TerminalReport(report))
        line = app.chat.query_one(AttachmentLine)
        app.chat.prompt.fill("what is @a.png ")
        cell = "\U0010eeee" if reports is KITTY else "\U00108000"

        def drawn(widget: Widget) -> list[int]:
            """The rows of ``widget`` with cells of a picture."""
            rows = range(widget.size.height)
            return [row for row in rows if cell in widget.render_line(row).text]

        await wait_until(pilot, lambda: drawn(line) == [0, 1, 2, 3], "the picture above its name")
        assert line.size.height == 5 and "+ a.png 320×128 40 tokens" in str(line.visual)
        assert app.chat.prompt.region.bottom <= 24
        await pilot.press("enter")
        await wait_until(pilot, lambda: engine.sent(Generate) and not controller(app).busy)
        view = app.chat.transcript.views[0]
        await wait_until(pilot, lambda: len(drawn(view)) == 4, "the picture below its name")
        first = drawn(view)[0]
        assert "a.png · 320×128" in view.render_line(first - 1).text and drawn(view) == [*range(first, first + 4)]
        assert not controller(app).change_settings({"drawn_pictures": False})
        await wait_until(pilot, lambda: not drawn(view) and view.size.height == first, "no picture")
        assert not controller(app).change_settings({"drawn_pictures": True})
        await wait_until(pilot, lambda: len(drawn(view)) == 4, "the picture again")
        await pilot.resize_terminal(80, 18)
        app.chat.prompt.fill("what is @a.png ")
        await wait_until(pilot, lambda: line.display and not drawn(line), "on a low screen only its name")


async def test_a_model_that_sees_nothing_is_said_before_and_the_question_stays(
    make_app: MakeApp, engine: FakeEngine, folder: Path
) -> None:
    (folder / "a.png").write_bytes(png())
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        line, prompt = app.chat.query_one(AttachmentLine), app.chat.prompt
        prompt.fill("see @a.png")
        await wait_until(pilot, lambda: line.display)
        sentence = "starter sees no pictures: leave a.png out, or load a model that sees."
        assert f"! {sentence}" in str(line.visual) and "a.png 64×32 " in str(line.visual)
        await pilot.press("enter")
        await wait_until(pilot, lambda: sentence in notice(app))
        assert prompt.text == "see @a.png" and not controller(app).thread.path and not engine.sent(Generate)


def test_the_line_of_many_files_is_short_and_says_when_they_are_too_much() -> None:
    files = tuple(Attachment(f"{number}.txt", "x" * 4000) for number in range(9))
    line = to_be_attached(Resolved(files, left_out=("x.bin is a binary file.",)), 2000).plain
    assert line.splitlines() == [
        "+ 9 files 36 kB ~9,000 tokens   only 2,000 tokens of context are free", "! x.bin is a binary file.",
    ]  # fmt: skip
    assert to_be_attached(Resolved(), 2000).plain == ""


def test_an_open_file_is_shown_safely_and_not_without_end() -> None:
    closed, opened = attached([Attachment("a\x1b[2J", "\x1b[31mred\n" + "line\n" * 1000)], is_open=True)
    assert "\x1b" not in closed.plain + opened.plain and opened.plain.startswith("red\nline")
    assert len(opened.plain.splitlines()) == SHOWN_LINES + 1 and opened.plain.endswith("more")


@pytest.mark.parametrize("temporary", [False, True])
async def test_a_question_whose_files_are_read_too_late_is_not_asked_in_another_chat(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, temporary: bool
) -> None:
    read, done = threading.Event(), threading.Event()

    def slow(*arguments: object) -> Resolved:
        assert read.wait(60)
        done.set()
        return Resolved()

    monkeypatch.setattr(attaching, "resolve", slow)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        controller(app).new_conversation(temporary=temporary)
        await pilot.pause()
        app.chat.prompt.fill("explain @a.py")
        await pilot.press("enter")
        controller(app).new_conversation()
        read.set()
        await wait_until(pilot, lambda: done.is_set() and (temporary or "was not sent" in notice(app)))
        assert not controller(app).thread.path
        # Nothing of a temporary chat goes on.
        assert app.chat.prompt.text == ("" if temporary else "explain @a.py")


async def test_a_question_whose_files_are_being_read_is_kept_at_the_end(
    make_app: MakeApp, store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    monkeypatch.setattr(attaching, "resolve", lambda *arguments: Resolved() if read.wait(60) else None)
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        app.chat.prompt.fill("explain @a.py")
        await pilot.press("enter", *"typed")
        app.chat.drafting.write()
        read.set()
        assert store.draft(0) == Draft("explain @a.py\n\ntyped")


async def test_a_question_is_sent_from_a_folder_that_is_gone(
    make_app: MakeApp, engine: FakeEngine, folder: Path
) -> None:
    engine.counts = len
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        shutil.rmtree(folder)
        await pilot.press(*"explain @a.py")
        await wait_until(pilot, lambda: controller(app).status.draft_counted)
        await pilot.press("enter")
        await wait_until(pilot, lambda: controller(app).thread.path)
        assert controller(app).thread.path[0].content == "explain @a.py"


async def test_the_model_counts_the_tokens_when_the_typing_pauses(
    make_app: MakeApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return 1000 * len(text.split())

    engine.counts = count
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        status = controller(app).status
        pause = attaching.LOOK_S
        monkeypatch.setattr(attaching, "LOOK_S", 3600.0)
        await pilot.press(*"explain @a.p")
        assert not status.draft_counted
        monkeypatch.setattr(attaching, "LOOK_S", pause)
        await pilot.press("y")
        await wait_until(pilot, lambda: status.draft_counted and status.draft_tokens == 3000)
        assert "a.py 9 B 1,000 tokens" in str(app.chat.query_one(AttachmentLine).visual)
        monkeypatch.setattr(attaching, "LOOK_S", 3600.0)
        await pilot.press("!")
        assert not status.draft_counted and status.draft_tokens == 4 + 3
        monkeypatch.setattr(attaching, "LOOK_S", pause)
        await pilot.press("!")
        # The text of a file is not sent to the engine again with each change of the draft.
        await wait_until(pilot, lambda: status.draft_counted)
        assert counted[-3:] == ["explain @a.py", "print(1)\n", "explain @a.py!!"]
        assert status.draft_tokens == 3000
