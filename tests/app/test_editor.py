"""The draft in the person's own editor."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from app import editor
from app.editor import EditorProblem, edited, editor_command
from tests.app.fake_engine import FakeEngine
from tests.app.tui.screen_helpers import MakeApp, controller, notice, ready, shown, wait_until
from tests.support.eventually import eventually

LONG = "line\n" * 20
UseEditor = Callable[[str], Path]


@pytest.fixture
def use_editor(home: Path, monkeypatch: pytest.MonkeyPatch) -> UseEditor:
    """Makes a Python script, in which ``path`` is the file, the editor. Returns where its notes are."""

    def use(script: str) -> Path:
        notes, program = home / "notes", home / "an editor.py"
        beginning = f"import os, pathlib, sys\npath, notes = pathlib.Path(sys.argv[-1]), pathlib.Path({str(notes)!r})\n"
        program.write_text(beginning + script)
        monkeypatch.setenv("VISUAL", f"{sys.executable} '{program}' --wait")
        return notes

    # Under pytest standard output has no descriptor that a program could write to.
    monkeypatch.setattr(editor.sys, "__stdout__", None)
    return use


async def test_the_text_is_edited_in_a_private_file_that_is_removed(use_editor: UseEditor) -> None:
    notes = use_editor(
        "notes.write_text(f'{path}\\n{path.stat().st_mode}\\n{path.parent.stat().st_mode}\\n{path.read_text()}')\n"
        "path.with_name('backup~').write_text('kept')\n"
        "path.write_text(path.read_text().upper() + '\\x1b[31mred\\r\\n\\n')\n"
    )
    assert await edited("grüße\nline", nullcontext) == "GRÜSSE\nLINE\nred"
    path, file_mode, folder_mode, text = notes.read_text().split("\n", 3)
    assert text == "grüße\nline\n"
    assert stat.S_IMODE(int(file_mode)) == 0o600 and stat.S_IMODE(int(folder_mode)) == 0o700
    assert not Path(path).parent.exists()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("sys.exit(3)", "ended with status 3"),
        ("path.write_bytes(b'\\xff')", "no UTF-8 text"),
        ("path.unlink()", "could not be used: No such file"),
    ],
)
async def test_what_goes_wrong_is_one_sentence_and_the_terminal_is_taken_back(
    use_editor: UseEditor, script: str, sentence: str
) -> None:
    use_editor(script)
    taken_back = []

    @contextmanager
    def suspend() -> Iterator[None]:
        # As Textual's: it does not come to this line if an exception passes.
        yield
        taken_back.append(True)

    with pytest.raises(EditorProblem, match=sentence):
        await edited("text", suspend)
    assert taken_back


def test_without_an_editor_it_is_said_which_variable_to_set() -> None:
    with pytest.raises(EditorProblem, match="set VISUAL or EDITOR"):
        editor_command({"EDITOR": " "})
    with pytest.raises(EditorProblem, match="no-such-editor was not found"):
        editor_command({"EDITOR": "no-such-editor -w"})
    with pytest.raises(EditorProblem, match="cannot be understood"):
        editor_command({"VISUAL": "vi '"})
    assert editor_command({"VISUAL": "sh -c", "EDITOR": "other"}) == ["sh", "-c"]


@pytest.mark.soak
async def test_answers_go_on_while_the_editor_is_open_and_no_question_is_lost(
    make_app: MakeApp, engine: FakeEngine, use_editor: UseEditor, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    os.mkfifo(home / "close")
    close = os.open(home / "close", os.O_RDWR)
    notes = use_editor(
        "import signal; signal.alarm(30); notes.write_text('open'); line = open(notes.with_name('close')).readline()\n"
        "path.write_text(path.read_text() + line)\n"
    )
    engine.gate = asyncio.Event()
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        monkeypatch.setattr(app, "suspend", nullcontext)
        await pilot.press(*"go", "enter")
        await wait_until(pilot, lambda: controller(app).thread.path and controller(app).thread.path[-1].content)
        await pilot.press(*"queued", "enter", *"draft", "ctrl+x")
        await wait_until(pilot, notes.exists)
        engine.dies_at = 2
        engine.gate.set()
        await wait_until(pilot, lambda: not controller(app).busy)
        assert prompt.text == "queued\n\ndraft"
        engine.gate = None
        controller(app).submit("again")
        await wait_until(pilot, lambda: "Paris is the capital." in shown(app)[-1])
        os.write(close, b"more\n")
        await wait_until(pilot, lambda: prompt.text == "queued\n\ndraft\nmore")
        # A chat that is opened late has a draft of its own.
        notes.unlink()
        await pilot.press("ctrl+x")
        await wait_until(pilot, notes.exists)
        controller(app).new_conversation()
        await wait_until(pilot, lambda: prompt.text == "")
        prompt.fill("other")
        os.write(close, b"end\n")
        await wait_until(pilot, lambda: prompt.text == "queued\n\ndraft\nmore\nend\n\nother")
    os.close(close)


async def test_an_editor_that_is_open_ends_with_the_application(use_editor: UseEditor) -> None:
    notes = use_editor("import signal; notes.write_text(str(os.getpid())); signal.pause()")
    taken_back = []

    @contextmanager
    def suspend() -> Iterator[None]:
        yield
        taken_back.append(True)

    editing = asyncio.create_task(edited("text", suspend))
    await asyncio.to_thread(eventually, lambda: notes.exists() and notes.read_text())
    editing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await editing
    assert not psutil.pid_exists(int(notes.read_text())) and not taken_back


async def test_a_key_opens_the_draft_and_pastes_stay_folded(
    make_app: MakeApp, use_editor: UseEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = use_editor("notes.write_text(path.read_text()); path.write_text('now: ' + path.read_text() + 'more')")
    app = make_app()
    async with app.run_test() as pilot:
        await ready(pilot, app)
        assert app.chat is not None
        prompt = app.chat.prompt
        await pilot.press("a", "ctrl+x")
        await wait_until(pilot, lambda: "cannot be opened on this terminal" in notice(app))
        monkeypatch.setattr(app, "suspend", nullcontext)
        prompt.paste(LONG)
        await pilot.press("ctrl+x")
        await wait_until(pilot, lambda: prompt.text == "now: a[Pasted 20 lines]\nmore")
        assert notes.read_text() == f"a{LONG}\n" and prompt.whole_text == f"now: a{LONG}\nmore"
        # With a selection the key cuts, as in other fields.
        await pilot.press("shift+left", "shift+left", "ctrl+x")
        assert prompt.text == "now: a[Pasted 20 lines]\nmo" and app.clipboard == "re"
        monkeypatch.delenv("VISUAL")
        monkeypatch.delenv("EDITOR", raising=False)
        prompt.fill("/editor")
        await pilot.press("enter")
        await wait_until(pilot, lambda: "No editor is set" in notice(app))
    assert "VISUAL" not in os.environ
