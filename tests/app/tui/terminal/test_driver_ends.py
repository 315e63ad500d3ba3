"""A terminal that is closed, and signals: the screens end, give the terminal back, keep the answer, leave no engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.conversations.opening import open_store
from app.conversations.records import MessageRecord
from tests.app.scripted import install
from tests.app.terminals import ROOT, WAIT_S, Terminal
from tests.support.eventually import has_ended

GIVEN_BACK = [b"\x1b[?1049l", b"\x1b[?1000l", b"\x1b[?1003l", b"\x1b[?2004l", b"\x1b[?25h"]
Open = Callable[..., Terminal]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    terminals: list[Terminal] = []
    install(tmp_path)

    def open_terminal(*arguments: str, **options: Any) -> Terminal:
        terminals.append(Terminal(tmp_path, *arguments, **options))
        return terminals[-1]

    yield open_terminal
    for terminal in terminals:
        terminal.close()


def answering(terminal: Terminal) -> list[psutil.Process]:
    """Ask something whose answer does not end; the engines."""
    terminal.until_drawn("sk something")
    terminal.type(b"wait:\r")
    terminal.until_drawn("unended")
    return terminal.engines


def gone(engines: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(engines, timeout=WAIT_S)
    return bool(engines) and all(map(has_ended, alive))


def messages(home: Path) -> list[MessageRecord]:
    store = open_store(home / "data" / "conversations.sqlite")
    try:
        (conversation,) = store.conversations()
        return store.shown(conversation.id)
    finally:
        store.close()


@pytest.mark.soak
@pytest.mark.parametrize("ignored", [True, False], ids=["SIGHUP ignored", "SIGHUP"])
def test_a_closed_terminal_ends_the_chat_and_keeps_the_answer(opened: Open, tmp_path: Path, ignored: bool) -> None:
    terminal = opened(ignore_hangup=ignored)
    engines = answering(terminal)
    terminal.hang_up()
    assert terminal.end() == 129
    assert gone(engines)
    question, answer = messages(tmp_path)
    assert question.content == "wait:"
    assert (answer.state, answer.content) == ("stopped", "unended")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.soak)],
    ids=str,
)
def test_a_signal_while_answering_gives_the_terminal_back(
    opened: Open, tmp_path: Path, number: int, status: int
) -> None:
    terminal = opened()
    engines = answering(terminal)
    before = len(terminal.drawn)
    terminal.process.send_signal(number)
    assert terminal.end() == status
    assert [code for code in GIVEN_BACK if code not in terminal.drawn[before:]] == []
    assert termios.tcgetattr(terminal.slave) == terminal.modes
    assert gone(engines)
    assert (messages(tmp_path)[-1].state, messages(tmp_path)[-1].content) == ("stopped", "unended")


@pytest.mark.parametrize("hang_up", [pytest.param(False, marks=pytest.mark.soak), True], ids=["SIGTERM", "closed"])
def test_the_real_engine_goes_with_an_idle_chat(opened: Open, hang_up: bool) -> None:
    terminal = opened(scripted=False, ignore_hangup=True)
    terminal.until_drawn("sk something")
    terminal.until(lambda: terminal.engines, "an engine")
    engines = terminal.engines
    if hang_up:
        terminal.hang_up()
    else:
        terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == (129 if hang_up else 143)
    assert gone(engines)


@pytest.mark.soak
@pytest.mark.parametrize("hang_up", [False, True], ids=["SIGTERM", "closed"])
def test_lending_ends_with_its_terminal(opened: Open, hang_up: bool) -> None:
    terminal = opened("join", "--listen", "127.0.0.1:0", ignore_hangup=True)
    terminal.until_drawn("1234")
    engines = terminal.engines
    before = len(terminal.drawn)
    if hang_up:
        terminal.hang_up()
    else:
        terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == (129 if hang_up else 143)
    assert gone(engines)
    if not hang_up:
        assert [code for code in GIVEN_BACK if code not in terminal.drawn[before:]] == []
        assert termios.tcgetattr(terminal.slave) == terminal.modes


@pytest.mark.soak
def test_a_terminal_that_takes_nothing_more_does_not_keep_the_process(opened: Open, tmp_path: Path) -> None:
    """Its output is stopped (ctrl+s in a screen multiplexer, a frozen window), so that even drawing does not end."""
    terminal = opened(patience_s=0.5)
    engines = answering(terminal)
    terminal.until(lambda: messages(tmp_path)[-1].content, "saving of the answer")
    termios.tcflow(terminal.slave, termios.TCOOFF)
    terminal.type(b"x" * 400)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    assert gone(engines)
    assert messages(tmp_path)[-1].content == "unended"


NEVER_CLOSED = """
import asyncio
from app.tui.screens.chat import ChatScreen
async def close(self):
    await asyncio.Event().wait()
ChatScreen.close = close
"""


def test_leaving_ends_although_the_chat_is_never_closed(opened: Open) -> None:
    """Whatever it waits for when a person leaves, the terminal is given back."""
    terminal = opened(
        patience_s=0.5,
        wrap=lambda python, safe, flag, program, *rest: [python, safe, flag, NEVER_CLOSED + program, *rest],
    )
    terminal.until_drawn("ready")
    terminal.type(b"\x11")
    assert terminal.end() == 0
    assert [code for code in GIVEN_BACK if code not in terminal.drawn] == []


def test_what_blocks_for_ever_is_ended_all_the_same() -> None:
    program = """
import threading, time
from app.tui.terminal.driver import end_at_last
end_at_last(143, threading.Event().wait, patience_s=0.1)
while True:
    time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=WAIT_S).returncode == 143


@pytest.mark.soak
def test_what_is_typed_on_a_real_terminal_arrives(opened: Open, tmp_path: Path) -> None:
    terminal = opened()
    answering(terminal)
    terminal.type(b"\x1b")
    terminal.until(lambda: messages(tmp_path)[-1].state == "stopped", "the end of the answer")
    terminal.type(b"\x1b\r" + "می\u200cخواهم".encode())
    terminal.until_drawn("می\u200cخواهم")
    terminal.type(b"\r")
    terminal.until(lambda: len(messages(tmp_path)) == 4, "another question")
    assert messages(tmp_path)[2].content == "می\u200cخواهم"
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143


@pytest.mark.soak
def test_the_window_has_the_title_of_the_chat_until_the_end(opened: Open) -> None:
    terminal = opened()
    terminal.until_drawn("\x1b[22;2t\x1b]2;privatellm\x07")
    answering(terminal)
    terminal.until_drawn("\x1b]2;wait: – privatellm\x07")
    before = len(terminal.drawn)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    assert b"\x1b]2;\x07\x1b[23;2t" in terminal.drawn[before:]


@pytest.mark.soak
def test_without_colours_no_colour_is_sent(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = opened()
    answering(terminal)
    terminal.type(b"\x1b")
    terminal.until_drawn("Stopped.")
    terminal.type(b"\x13")
    terminal.until_drawn("Settings")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    sent = {part for code in re.findall(rb"\x1b\[([0-9;]*)m", terminal.drawn) for part in code.split(b";")}
    assert sent <= {b"", b"0", b"1", b"2", b"3", b"4", b"5", b"7", b"9", b"39", b"49"}
