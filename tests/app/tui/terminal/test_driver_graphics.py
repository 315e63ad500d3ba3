"""Pictures on a terminal that says it draws them, and on others, which see none of it."""

from __future__ import annotations

import re
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.conversations.opening import open_store
from tests.app.attachments.pictures import picture
from tests.app.scripted import install
from tests.app.terminals import Terminal

Open = Callable[..., Terminal]
ASKED, KITTY_ASKED = b"\x1b[>0q\x1b[16t\x1b[c", b"\x1b_Gi=31,"


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the chat that has a question with a picture."""
    terminals: list[Terminal] = []
    install(tmp_path)
    (tmp_path / "data").mkdir()
    store = open_store(tmp_path / "data" / "conversations.sqlite")
    chat = store.create(model="starter", title="looked at").id
    store.add(chat, "user", "what is this", parent=None, attachments=[picture("red.png", 40, 40)])
    store.close()
    monkeypatch.setenv("COLORTERM", "truecolor")
    for name in ("TMUX", "STY", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def open_terminal(**options: Any) -> Terminal:
        terminals.append(Terminal(tmp_path, "--continue", **options))
        return terminals[-1]

    yield open_terminal
    for terminal in terminals:
        terminal.close()


def end(terminal: Terminal) -> None:
    terminal.until_drawn("what is this")
    terminal.type(b"\x11\x11")
    assert terminal.end() == 0


def test_kitty_is_sent_the_pixels_that_were_decoded(opened: Open) -> None:
    terminal = opened(term="xterm-kitty")
    terminal.until_drawn(ASKED.decode())
    assert KITTY_ASKED not in terminal.drawn
    terminal.type(b"\x1bP>|kitty(0.35.2)\x1b\\\x1b[6;20;10t\x1b[?62;52;c")
    terminal.until_drawn(KITTY_ASKED.decode())
    terminal.type(b"\x1b_Gi=31;OK\x1b\\")
    terminal.until(lambda: terminal.drawn.count("\U0010eeee".encode()) == 4 * 2, "the picture of the question")
    end(terminal)
    sent = re.findall(rb"\x1b_Ga=T,[^;]*s=(\d+),v=(\d+),i=(\d+)[^;]*m=0;([^\x1b]*)\x1b", terminal.drawn)
    width, height = map(int, sent[0][:2])
    assert (width, height) == (40, 40) and zlib.decompress(b64decode(sent[0][3])) == b"\xff\0\0" * 1600
    assert b"a=d,d=I,q=2,i=" + sent[0][2] in terminal.drawn, "the terminal forgets it at the end"


def test_a_terminal_with_sixels_draws_them_between_the_lines(opened: Open) -> None:
    terminal = opened()
    terminal.until_drawn(ASKED.decode())
    terminal.type(b"\x1bP>|XTerm(390)\x1b\\\x1b[6;20;10t\x1b[?63;1;4;22c")
    terminal.until(lambda: terminal.drawn.count(b"\x1bP0;1q") >= 2, "the picture of the question")
    end(terminal)
    assert KITTY_ASKED not in terminal.drawn, "a terminal that may print this is not asked"
    row = b'\x1b7    \x1b8\x1bP0;1q"1;1;40;20#0;2;100;0;0#0!40~-#0!40~-#0!40~-#0!40B\x1b\\\x1b8\x1b[4C'
    assert terminal.drawn.count(row) >= 2, "blanks, red over them, the cursor behind them"


@pytest.mark.parametrize(
    "answers", [b"", b"\x1b[?62;4c", b"\x1bP>|VTE(7600)\x1b\\\x1b[6;20;10t\x1b[?65;1;9c"], ids=["none", "no size", "no"]
)
def test_other_terminals_see_the_name_at_once(opened: Open, answers: bytes) -> None:
    terminal = opened()
    terminal.until_drawn(ASKED.decode())
    terminal.type(answers)
    terminal.until_drawn("red.png")
    end(terminal)
    assert b"\x1bP" not in terminal.drawn and b"\x1b_" not in terminal.drawn
    for text in (b"VTE", b"65;1", b"62;4c", "\U0010eeee".encode(), "\U00108000".encode()):
        assert text not in terminal.drawn, "an answer is not typed, and no cell of a picture is drawn"


@pytest.mark.parametrize("why", ["tmux", "setting"])
def test_a_terminal_is_not_asked(opened: Open, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "tmux":
        monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    else:
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / "settings.toml").write_text("[screen]\ndrawn_pictures = false\n")
    terminal = opened()
    terminal.until_drawn("red.png")
    end(terminal)
    assert b"\x1b[>0q" not in terminal.drawn and b"\x1b[16t" not in terminal.drawn
