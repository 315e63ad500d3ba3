"""The chat in lines as a process: through pipes, on a terminal, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.conversations.opening import open_store
from app.conversations.records import MessageRecord
from app.settings.personas import Persona, open_personas
from tests.app.scripted import SCRIPT, install
from tests.app.terminals import ROOT, WAIT_S, Terminal
from tests.support.eventually import has_ended

Open = Callable[..., Terminal]
_PIPED = f"""
import sys
from app import engine_process
engine_process.host_command = lambda: (sys.executable, {str(SCRIPT)!r}, "")
from app.cli import main
status = main()
assert "textual" not in sys.modules and "rich" not in sys.modules
sys.exit(status)
"""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    terminals: list[Terminal] = []
    install(tmp_path)

    def open_terminal(*arguments: str, term: str = "xterm-256color", **options: Any) -> Terminal:
        terminals.append(Terminal(tmp_path, *arguments, term=term, **options))
        return terminals[-1]

    yield open_terminal
    for terminal in terminals:
        terminal.close()


def messages(home: Path) -> list[MessageRecord]:
    store = open_store(home / "data" / "conversations.sqlite")
    try:
        return [message for known in store.conversations() for message in store.shown(known.id)]
    finally:
        store.close()


def piped(home: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", _PIPED, "--plain"], input=text, capture_output=True, text=True, cwd=ROOT,
        timeout=WAIT_S, check=False, env={**os.environ, "PRIVATELLM_HOME": str(home), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.soak
def test_a_script_sends_questions_line_by_line(tmp_path: Path) -> None:
    install(tmp_path)
    result = piped(tmp_path, "say:one two\nraw:\n")
    assert result.returncode == 0, result.stderr
    assert "You: say:one two\n" in result.stdout and "\nModel: one two\n" in result.stdout
    assert "You: raw:\nModel: ared end\n" in result.stdout
    assert "\x1b" not in result.stdout and result.stderr == ""
    assert [message.content for message in messages(tmp_path)] == ["say:one two", "one two", "raw:", "ared end"]


def test_a_script_downloads_nothing_unasked(tmp_path: Path) -> None:
    result = piped(tmp_path, "/quit\n")
    assert result.returncode == 0, result.stderr
    assert "ownload" not in result.stdout


@pytest.mark.soak
@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_on_a_terminal_nothing_is_drawn_over(opened: Open, tmp_path: Path, term: str) -> None:
    terminal = opened("--plain", term=term)
    terminal.until_drawn("You: ")
    terminal.type(b"say:hello there\n")
    terminal.until_drawn("Model: hello there")
    terminal.type(b"wait:\n")
    terminal.until(
        lambda: [message.content for message in messages(tmp_path)][3:] == ["unended"], "the words of the answer"
    )
    terminal.type(b"\x03")
    terminal.until_drawn("Notice: Stopped.")
    terminal.type(b"\x03")
    terminal.until_drawn("ctrl+d or /quit leaves.")
    terminal.type(b"\x04")
    assert terminal.end() == 0
    assert [message.state for message in messages(tmp_path)] == ["complete"] * 3 + ["stopped"]
    escapes = set(re.findall(rb"\x1b\[?[?0-9;]*[A-Za-z]", terminal.drawn))
    assert escapes <= (set() if term == "dumb" else {b"\x1b[?2004h", b"\x1b[?2004l", b"\x1b[?1034h"})


@pytest.mark.soak
def test_up_brings_back_the_questions_of_earlier_chats(opened: Open, tmp_path: Path) -> None:
    store = open_store(tmp_path / "data" / "conversations.sqlite")
    for question in ("say:older", "say:newest"):
        store.add(store.create(model="m").id, "user", question, parent=None)
    store.close()
    terminal = opened("--plain")
    terminal.until_drawn("You: ")
    terminal.type(b"\x10\x10\n")  # ctrl+p, as up
    terminal.until_drawn("Model: older")
    terminal.type(b"\x04")
    assert terminal.end() == 0


@pytest.mark.soak
def test_a_dumb_terminal_gets_lines_by_itself(opened: Open) -> None:
    terminal = opened(term="dumb")
    terminal.until_drawn("privatellm in plain lines.")
    terminal.type(b"/quit\n")
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.drawn


@pytest.mark.soak
@pytest.mark.parametrize("hang_up", [False, True], ids=["SIGTERM", "closed"])
def test_it_ends_with_its_terminal_and_keeps_the_answer(opened: Open, tmp_path: Path, hang_up: bool) -> None:
    terminal = opened("--plain")
    terminal.until_drawn("You: ")
    terminal.type(b"wait:\n")
    terminal.until(
        lambda: [message.content for message in messages(tmp_path)][1:] == ["unended"], "the words of the answer"
    )
    engines = terminal.engines
    if hang_up:
        terminal.hang_up()
    else:
        terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == (129 if hang_up else 143)
    _, alive = psutil.wait_procs(engines, timeout=WAIT_S)
    assert engines and all(map(has_ended, alive))
    assert (messages(tmp_path)[-1].state, messages(tmp_path)[-1].content) == ("stopped", "unended")


def test_plain_is_no_flag_of_a_command(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "app.cli", "--plain", "locate", "data"], capture_output=True, text=True, cwd=ROOT,
        check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert result.returncode == 2
    assert "--plain" in result.stderr


@pytest.mark.soak
def test_a_chat_has_its_own_setup(tmp_path: Path) -> None:
    install(tmp_path)
    open_personas(tmp_path / "config" / "personas.toml").put(Persona("Poet", "Rhyme.", "", {"temperature": 1.2}))
    lines = ["/persona nobody", "/persona", "1", "/set seed 7", "/set volume 3", "/sampling", "echo:"]
    lines += [
        "/system Be brief.",
        "/sampling loud",
        "/sampling exact",
        "echo:",
        "/persona none",
        "/system",
        "/beams 2",
        "/beams",
        "",
    ]
    result = piped(tmp_path, "\n".join(lines) + "\n")
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "There is no persona 'nobody'; there are Poet." in out and "1. Poet: Rhyme." in out
    assert "Temperature: 1.2, of the persona" in out and "Seed: 7, of this chat" in out
    assert "A chat has no value 'volume'" in out and "There is no preset 'loud'" in out
    asked = out.replace(" ", "")
    assert '"temperature":1.2' in asked and '"seed":7' in asked and '"Rhyme."' in asked
    assert '"temperature":0.0' in asked and '"Bebrief."' in asked
    assert "This chat has no persona now." in out and "This chat has no system prompt." in out
    assert "The beam width is 2." in out
