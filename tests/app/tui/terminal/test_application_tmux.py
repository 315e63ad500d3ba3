"""Keys and copying in a real terminal: tmux."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.eventually import eventually

PROGRAM = Path(__file__).parent / "field_program.py"
ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Tmux:
    """A terminal of 80 by 24 cells in a tmux of its own, with the program of :data:`PROGRAM` in it, or ``begun``."""

    def __init__(self, folder: Path, path: str, begun: str = "") -> None:
        self.socket, self.copies = folder / "tmux", folder / "copies.txt"
        environment = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "TERM": "xterm"}
        environment["PRIVATELLM_HOME"] = str(folder)
        self.command = f"{sys.executable} {PROGRAM} {self.copies}"
        self("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", begun or self.command,
             environment=environment)  # fmt: skip

    def __call__(self, *words: str, environment: dict[str, str] | None = None) -> str:
        tmux = shutil.which("tmux")
        assert tmux is not None
        done = subprocess.run(
            [tmux, "-S", str(self.socket), *words], capture_output=True, text=True, env=environment, check=False
        )
        return done.stdout

    @property
    def screen(self) -> str:
        return self("capture-pane", "-p")


@pytest.fixture
def tmux(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tmux]:
    # The path to a socket is short.
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"pt-{os.getpid()}"
    folder.mkdir(mode=0o700)
    running = Tmux(folder, **{"path": os.environ["PATH"]} | getattr(request, "param", {}))
    try:
        yield running
    finally:
        running("kill-server")
        shutil.rmtree(folder, ignore_errors=True)


def test_keys_arrive_and_what_is_copied_is_in_tmux_s_buffer(tmux: Tmux) -> None:
    tmux("set-option", "-g", "set-clipboard", "on")
    eventually(lambda: "Type here" in tmux.screen)
    # alt+enter is ESC and enter: in one piece, and as two keys that follow each other at once.
    tmux("send-keys", "a", "M-Enter", "b", "Escape", "Enter", "c", "C-j", "d")
    eventually(lambda: "d" in tmux.screen)
    tmux("send-keys", "C-y")
    eventually(lambda: "Also in tmux's buffer" in " ".join(tmux.screen.split()))
    assert tmux("show-buffer") == "a\nb\nc\nd"
    assert not tmux.copies.exists()


@pytest.mark.parametrize("tmux", [{"path": "/nonexistent"}], indirect=True)
def test_tmux_accepts_the_program_s_own_sequence(tmux: Tmux) -> None:
    """Where the program cannot run tmux itself, as on another machine."""
    tmux("set-option", "-g", "set-clipboard", "on")
    eventually(lambda: "Type here" in tmux.screen)
    tmux("send-keys", "f", "a", "r")
    eventually(lambda: "far" in tmux.screen)
    tmux("send-keys", "C-y")
    eventually(lambda: "Shift-drag" in " ".join(tmux.screen.split()))
    eventually(lambda: tmux("show-buffer") == "far")


@pytest.mark.parametrize("tmux", [{"begun": "sh -i"}], indirect=True)
def test_the_program_can_be_suspended_and_continued(tmux: Tmux) -> None:
    """The program is not the shell's own child, as with make."""
    tmux("send-keys", f"PS1='shell> '; sh -c '{tmux.command}; :'", "Enter")
    eventually(lambda: "Type here" in tmux.screen)
    tmux("send-keys", "C-z")
    eventually(lambda: "shell>" in tmux.screen.splitlines()[-1:] or "Stopped" in tmux.screen)
    # The terminal echoes again, and shows what was typed.
    tmux("send-keys", "echo back-$((6*7))", "Enter")
    eventually(lambda: "back-42" in tmux.screen)
    tmux("send-keys", "fg", "Enter")
    eventually(lambda: "Type here" in tmux.screen)
    tmux("send-keys", "a", "M-Enter", "b")
    eventually(lambda: [line.strip() for line in tmux.screen.splitlines()[:2]] == ["a", "b"])


def test_a_program_without_a_shell_is_not_suspended(tmux: Tmux) -> None:
    eventually(lambda: "Type here" in tmux.screen)
    tmux("send-keys", "C-z")
    eventually(lambda: "There is no shell" in " ".join(tmux.screen.split()))
    tmux("send-keys", "a")
    eventually(lambda: "a" in tmux.screen.splitlines()[0])


def test_nothing_is_drawn_over_the_editor_while_the_program_goes_on(tmux: Tmux, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text(
        "#!/bin/sh\ntrap 'note=interrupted' INT\necho opened\n"
        'until read line; do :; done\nprintf "$line $note" > $1\n'
    )
    editor.chmod(0o700)
    tmux("respawn-pane", "-k", f"EDITOR={editor} {tmux.command}; echo status $?; read x")
    eventually(lambda: "Type here" in tmux.screen)
    tmux("send-keys", "a", "C-x")
    eventually(lambda: "opened" in tmux.screen)

    def drawn() -> int:
        return int("0" + tmux.copies.read_text()) if tmux.copies.exists() else 0

    before = drawn()
    eventually(lambda: drawn() > before + 50)
    assert "drawn" not in tmux.screen and "printed" not in tmux.screen
    tmux("send-keys", "C-c")
    eventually(lambda: "^C" in tmux.screen)
    tmux("send-keys", "more", "Enter")
    eventually(lambda: "drawn" in tmux.screen and "more interrupted" in tmux.screen)
    assert "opened" not in tmux.screen
    # A signal ends both.
    tmux("send-keys", "C-x")
    eventually(lambda: "opened" in tmux.screen)
    [program] = psutil.Process(int(tmux("list-panes", "-F", "#{pane_pid}"))).children()
    [editing] = program.children()
    program.terminate()
    eventually(lambda: "status 143" in tmux.screen)
    assert not editing.is_running() and "Traceback" not in tmux.screen
