"""Copying: the machine's own tool if there is one, else what the terminal offers, and the truth about which it was."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping

_WAIT_S = 3.0


def tools(environment: Mapping[str, str] = os.environ, system: str = sys.platform) -> list[list[str]]:
    """Commands that take the text on their standard input, best first, whether installed or not."""
    if system == "darwin":
        return [["pbcopy"]]
    found: list[list[str]] = []
    if environment.get("WAYLAND_DISPLAY"):
        found.append(["wl-copy"])
    if environment.get("DISPLAY"):
        found += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    if environment.get("WSL_DISTRO_NAME"):
        found.append(["clip.exe"])
    return found


async def copy(text: str, what: str, through_terminal: Callable[[str], None]) -> str:
    """Copy ``text`` and say what happened. Over SSH the near clipboard is the terminal's, so it is told as well."""
    remote = bool(os.environ.get("SSH_CONNECTION"))
    if not remote:
        for command in tools():
            if shutil.which(command[0]) and await _run(command, text):
                return f"{what} is copied."
    through_terminal(text)
    return "Sent to the terminal's clipboard. Nothing to paste? Shift-drag to select."


def tool_environment(tool: str, environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """What ``tool`` is run with; None: as this program. pbcopy takes its input for what the locale says."""
    if tool != "pbcopy":
        return None
    return {key: value for key, value in environment.items() if key != "LC_ALL"} | {"LC_CTYPE": "UTF-8"}


async def _run(command: list[str], text: str) -> bool:
    """Whether ``command`` took the text. Tools that stay to serve the clipboard do not hold this up."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=tool_environment(command[0]),
            start_new_session=True,
        )
    except OSError:
        return False
    try:
        await asyncio.wait_for(process.communicate(text.encode("utf-8", "replace")), _WAIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
    return process.returncode == 0
