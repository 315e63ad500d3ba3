"""Copying: the machine's own tools, the terminal, and a file as the last way, and the sentence about what happened."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from app.files import write_whole
from app.text_safety import sanitize, visible

TERMINAL_LIMIT = 100_000
"""Largest number of bytes, coded, that is sent to a terminal's clipboard. Terminals ignore longer texts or cut them."""
_WAIT_S = 1.0
"""Seconds that a tool may take before the next way is tried."""
_SCREEN_PIECE = 700
"""Number of characters that GNU screen passes on at once. It cuts off what is beyond 768."""

SENT = "Sent to the terminal's clipboard. Nothing to paste? Shift-drag to select."
"""Message after a copy that cannot be confirmed."""


class Clipboard:
    """Copies a text in the first way that works, for one environment.

    ``write`` takes sequences for the terminal; None: it is to get none. ``last_file``: where the text is written if
    nothing else is left; None: nothing may be written to the disk.
    """

    def __init__(
        self,
        write: Callable[[str], None] | None,
        last_file: Callable[[], Path] | None,
        environment: Mapping[str, str] = os.environ,
        system: str = sys.platform,
    ) -> None:
        self._write = write
        self._last_file = last_file
        self._environment = environment
        self._system = system

    async def copy(self, text: str, what: str) -> str:
        """Copy ``text``, without what acts on a terminal or is not seen; returns the sentence to show, in which
        ``what`` names it.

        The machine's own tools come first, as only they say whether it worked. Over SSH only the terminal can reach the
        person's clipboard.
        """
        text = visible(sanitize(text))
        if not self._is_remote:
            for command in clipboard_tools(self._environment, self._system):
                if await self._run(command, _coded(command[0], text)):
                    return f"{what} was copied."
        # tmux has a buffer of its own, and reaches the clipboard also where it ignores sequences of programs.
        in_tmux = bool(self._environment.get("TMUX")) and await self._run_any(
            [["tmux", "load-buffer", "-w", "-"], ["tmux", "load-buffer", "-"]], text.encode("utf-8", "replace")
        )
        fits = len(text.encode("utf-8", "replace")) * 4 // 3 <= TERMINAL_LIMIT
        if self._write is not None and self._terminal_may_copy and fits:
            self._write(sequences(text, self._environment, plain=not in_tmux))
            return f"Also in tmux's buffer. {SENT}" if in_tmux else SENT
        if in_tmux:
            return f"{what} is in tmux's buffer."
        return await asyncio.to_thread(self._write_file, text, what)

    @property
    def _is_remote(self) -> bool:
        return any(self._environment.get(name) for name in ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"))

    @property
    def _terminal_may_copy(self) -> bool:
        """False for the terminals that are known to ignore the sequence."""
        return self._environment.get("TERM_PROGRAM") != "Apple_Terminal" and self._environment.get("TERM") not in (
            "linux", "dumb",
        )  # fmt: skip

    def _write_file(self, text: str, what: str) -> str:
        by_hand = "Shift-drag to select it."
        if self._last_file is None:
            return f"{what} was not copied: no clipboard was found. {by_hand}"
        try:
            path = self._last_file()
            write_whole(path, text)
        except OSError as error:
            return f"{what} was not copied: no clipboard was found ({error.strerror or error}). {by_hand}"
        return f"No clipboard was found. {what} was written to {path}."

    async def _run_any(self, commands: list[list[str]], data: bytes) -> bool:
        for command in commands:
            if await self._run(command, data):
                return True
        return False

    async def _run(self, command: list[str], data: bytes) -> bool:
        """Whether ``command`` took ``data``. A tool that keeps running to serve the clipboard does not block this."""
        program = shutil.which(command[0], path=self._environment.get("PATH"))
        if program is None:
            return False
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *command[1:],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=tool_environment(command[0], self._environment),
                start_new_session=True,
            )
        except OSError:
            return False
        try:
            await asyncio.wait_for(process.communicate(data), _WAIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return False
        return process.returncode == 0


def copies_file() -> Path:
    """The file for copied text on a machine without a clipboard. Raises OSError."""
    from engine.system.locations import ensure

    return ensure("data") / "clipboard.txt"


def clipboard_tools(environment: Mapping[str, str], system: str) -> list[list[str]]:
    """Commands that take the text on their standard input, best first, whether installed or not."""
    if system == "darwin":
        return [["pbcopy"]]
    tools: list[list[str]] = []
    if environment.get("WAYLAND_DISPLAY"):
        tools.append(["wl-copy"])
    if environment.get("DISPLAY"):
        tools += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    if environment.get("WSL_DISTRO_NAME"):
        tools.append(["clip.exe"])
    return tools


def tool_environment(tool: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of ``tool``. pbcopy decodes its input by the locale."""
    if tool != "pbcopy":
        return dict(environment)
    return {key: value for key, value in environment.items() if key != "LC_ALL"} | {"LC_CTYPE": "UTF-8"}


def _coded(tool: str, text: str) -> bytes:
    """``text`` as ``tool`` reads it: clip.exe takes UTF-16, all others UTF-8."""
    return text.encode("utf-16-le" if tool == "clip.exe" else "utf-8", "replace")


def sequences(text: str, environment: Mapping[str, str], *, plain: bool = True) -> str:
    """Escape sequences that make a terminal copy ``text``: OSC 52, wrapped for a multiplexer in between, if any.

    ``plain``: the sequence is also sent without wrapping, for a tmux that accepts programs' own (``set-clipboard on``).
    """
    sequence = f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\a"
    if environment.get("TMUX"):
        return passed_on(sequence, environment) + (sequence if plain else "")
    return passed_on(sequence, environment)


def passed_on(sequence: str, environment: Mapping[str, str]) -> str:
    """``sequence`` wrapped for the multiplexer that is between this program and the terminal, if any."""
    if environment.get("TMUX"):
        escaped = sequence.replace("\x1b", "\x1b\x1b")
        return f"\x1bPtmux;{escaped}\x1b\\"
    if environment.get("STY"):
        pieces = (sequence[start : start + _SCREEN_PIECE] for start in range(0, len(sequence), _SCREEN_PIECE))
        return "".join(f"\x1bP{piece}\x1b\\" for piece in pieces)
    return sequence
