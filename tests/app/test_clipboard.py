"""Copying: the machine's tools first, then tmux and the terminal, a file as the last way, and the truth about which."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import clipboard
from app.clipboard import SENT, TERMINAL_LIMIT, Clipboard, clipboard_tools, sequences

WAIT_S = clipboard._WAIT_S


class Place:
    """A machine with the tools that were put on its PATH. Each writes what it gets into a file of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[str] = []
        self.environment = {"PATH": f"{folder}:/usr/bin:/bin", "TERM": "xterm-256color"}

    def tool(self, name: str, status: int = 0) -> None:
        path = self.folder / name
        kept = self.folder / f"{name}.got"
        # What fails must not wait for its input either.
        path.write_text(f'#!/bin/sh\n(printf \'%s|\' "$*" "$LC_CTYPE" "$LC_ALL"; cat) > \'{kept}\'\nexit {status}\n')
        path.chmod(0o755)

    def got(self, name: str) -> str:
        """The arguments, LC_CTYPE, LC_ALL and input of the tool; an empty text if it was not run."""
        path = self.folder / f"{name}.got"
        return path.read_text("utf-8") if path.exists() else ""

    async def copy(self, text: str = "größer", *, system: str = "linux", file: bool = True, **values: str) -> str:
        last = self.folder / "clipboard.txt"
        environment = self.environment | values
        return await Clipboard(self.written.append, (lambda: last) if file else None, environment, system).copy(
            text, "The answer"
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("app.clipboard._WAIT_S", 100.0)
    return Place(tmp_path)


def osc(text: str) -> str:
    return f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a"


def test_the_tools_fit_the_machine() -> None:
    assert clipboard_tools({}, "darwin") == [["pbcopy"]]
    assert clipboard_tools({}, "linux") == []
    names = {"WAYLAND_DISPLAY": "w", "DISPLAY": ":0", "WSL_DISTRO_NAME": "Ubuntu"}
    assert [command[0] for command in clipboard_tools(names, "linux")] == ["wl-copy", "xclip", "xsel", "clip.exe"]


@pytest.mark.parametrize(
    ("tool", "system", "values", "arguments"),
    [
        ("pbcopy", "darwin", {}, "|UTF-8||"),
        ("wl-copy", "linux", {"WAYLAND_DISPLAY": "w"}, "||C|"),
        ("xclip", "linux", {"DISPLAY": ":0"}, "-selection clipboard||C|"),
        ("xsel", "linux", {"DISPLAY": ":0"}, "--clipboard --input||C|"),
    ],
)
async def test_a_tool_gets_the_text_and_nothing_else_does(
    place: Place, tool: str, system: str, values: dict[str, str], arguments: str
) -> None:
    place.tool(tool)
    place.tool("tmux")
    assert await place.copy(system=system, LC_ALL="C", TMUX="/tmp/socket,1,0", **values) == "The answer was copied."
    assert place.got(tool) == f"{arguments}größer"
    assert not place.written and not place.got("tmux")


async def test_windows_own_tool_reads_utf_16(place: Place) -> None:
    place.tool("clip.exe")
    await place.copy("ü\n", WSL_DISTRO_NAME="Ubuntu")
    assert (place.folder / "clip.exe.got").read_bytes().endswith(b"|\xfc\x00\n\x00")


async def test_a_tool_that_fails_is_followed_by_the_next(place: Place) -> None:
    place.tool("xclip", status=1)
    place.tool("xsel")
    assert await place.copy(DISPLAY=":0") == "The answer was copied."
    assert place.got("xsel").endswith("|größer")


async def test_a_tool_that_never_ends_is_followed_by_the_next(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WAIT_S == 1.0
    # Long enough for the tool behind it, on a busy machine.
    monkeypatch.setattr("app.clipboard._WAIT_S", 5.0)
    hanging = place.folder / "wl-copy"
    hanging.write_text(f"#!/bin/sh\necho $$ > '{place.folder}/pid'\nexec sleep 600\n")
    hanging.chmod(0o755)
    place.tool("xclip")
    assert await place.copy(WAYLAND_DISPLAY="w", DISPLAY=":0") == "The answer was copied."
    assert "größer" in place.got("xclip")
    assert not psutil.pid_exists(int((place.folder / "pid").read_text()))


async def test_without_a_tool_the_terminal_is_asked_and_that_is_said(place: Place) -> None:
    assert await place.copy() == SENT == "Sent to the terminal's clipboard. Nothing to paste? Shift-drag to select."
    assert place.written == [osc("größer")]


@pytest.mark.parametrize("name", ["SSH_CONNECTION", "SSH_TTY", "SSH_CLIENT"])
async def test_over_ssh_the_other_machine_s_clipboard_is_left_alone(place: Place, name: str) -> None:
    place.tool("pbcopy")
    assert await place.copy(system="darwin", **{name: "x"}) == SENT
    assert not place.got("pbcopy") and place.written == [osc("größer")]


async def test_in_tmux_its_buffer_and_the_terminal_around_it_are_told(place: Place) -> None:
    place.tool("tmux")
    assert await place.copy(TMUX="/tmp/socket,1,0") == f"Also in tmux's buffer. {SENT}"
    assert place.got("tmux") == "load-buffer -w -|||größer"
    [written] = place.written
    assert written == f"\x1bPtmux;\x1b{osc('größer')}\x1b\\"


async def test_a_tmux_that_is_too_old_or_far_away(place: Place) -> None:
    (place.folder / "tmux").write_text('#!/bin/sh\n[ "$2" = -w ] && exit 1\ncat > "${0}.got"\n')
    (place.folder / "tmux").chmod(0o755)
    assert "tmux's buffer" in await place.copy(TMUX="/tmp/socket,1,0")
    assert place.got("tmux") == "größer"
    place.tool("tmux", status=1)
    assert await place.copy(TMUX="/tmp/socket,1,0") == SENT
    assert place.written[-1].endswith("\x1b\\" + osc("größer"))


@given(st.text(max_size=2000))
def test_screen_gets_pieces_that_it_passes_on(text: str) -> None:
    sent = sequences(text, {"STY": "1.pts", "TERM": "screen"})
    pieces = sent.removeprefix("\x1bP").removesuffix("\x1b\\").split("\x1b\\\x1bP")
    assert all(len(piece) < 760 for piece in pieces)
    whole = "".join(pieces)
    assert base64.b64decode(whole.removeprefix("\x1b]52;c;").removesuffix("\a")) == text.encode("utf-8", "replace")


@pytest.mark.parametrize("values", [{"TERM_PROGRAM": "Apple_Terminal"}, {"TERM": "linux"}])
async def test_a_file_is_the_last_way(place: Place, values: dict[str, str]) -> None:
    said = await place.copy(**values)
    file = place.folder / "clipboard.txt"
    assert said == f"No clipboard was found. The answer was written to {file}."
    assert file.read_text("utf-8") == "größer" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not place.written


async def test_what_no_terminal_takes_goes_to_the_file(place: Place) -> None:
    assert "was written to" in await place.copy("x" * TERMINAL_LIMIT)
    assert not place.written


async def test_nothing_is_written_where_nothing_may_be(place: Place) -> None:
    assert "was not copied" in await place.copy(file=False, TERM="linux")
    assert not (place.folder / "clipboard.txt").exists()
    (place.folder / "clipboard.txt").mkdir()
    assert "was not copied: no clipboard was found (" in await place.copy(TERM="linux")


async def test_what_acts_on_a_terminal_is_not_copied(place: Place) -> None:
    """Pasted into a shell it would end the paste and run the rest."""
    await place.copy("ls\x1b[201~\rrm\tx\n")
    assert place.written == [osc("lsrm\tx\n")]
