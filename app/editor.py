"""A text in the person's own editor, while the application leaves the terminal to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from app.text_safety import sanitize

_NAME = "draft.md"
_PATIENCE_S = 2.0
"""Seconds that the editor has to end by itself when the application ends."""


class EditorProblem(Exception):
    """The text was not edited. The text of the exception is one sentence for the person."""


def editor_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The person's editor and its arguments. Raises EditorProblem."""
    words = environment.get("VISUAL", "").strip() or environment.get("EDITOR", "").strip()
    if not words:
        raise EditorProblem("No editor is set; set VISUAL or EDITOR before you start privatellm (EDITOR=nano).")
    try:
        command = shlex.split(words)
    except ValueError as error:
        raise EditorProblem(f"VISUAL or EDITOR cannot be understood ({error}): {words}") from error
    if not command or shutil.which(command[0]) is None:
        raise EditorProblem(f"The editor {command[0] if command else words} was not found; check VISUAL or EDITOR.")
    return command


async def edited(text: str, suspend: Callable[[], AbstractContextManager[None]]) -> str:
    """``text`` as the person leaves it in their editor. The event loop runs on until the editor ends.

    ``suspend`` gives the terminal away and takes it back. The text is in a folder that only the person can read, which
    is removed afterwards with all that the editor put there. If this is cancelled, the editor is ended, and the
    terminal is not taken back. Raises EditorProblem.
    """
    command = editor_command()
    try:
        with tempfile.TemporaryDirectory(prefix="privatellm-") as folder:
            path = Path(folder) / _NAME
            path.touch(mode=0o600)
            path.write_text(text + "\n" if text else "", encoding="utf-8", errors="replace")
            status = await _run([*command, str(path)], suspend)
            if status:
                raise EditorProblem(f"The editor ended with status {status}, so the draft stays as it was.")
            return sanitize(path.read_text(encoding="utf-8")).rstrip("\n")
    except UnicodeDecodeError as error:
        raise EditorProblem("The editor left no UTF-8 text, so the draft stays as it was.") from error
    except OSError as error:
        raise EditorProblem(f"The editor could not be used: {error.strerror or error}.") from error


async def _run(command: list[str], suspend: Callable[[], AbstractContextManager[None]]) -> int:
    """Run ``command`` on the terminal; its exit status. Raises OSError, after the terminal was taken back."""
    problem: OSError | None = None
    status = 0
    with suspend(), _interrupts_ignored():
        try:
            screen = sys.__stdout__
            process = await asyncio.create_subprocess_exec(*command, stdout=screen, stderr=screen)
        except OSError as error:
            problem = error
        else:
            status = await _status(process)
    if problem is not None:
        raise problem
    return status


async def _status(process: asyncio.subprocess.Process) -> int:
    """The exit status of ``process``, which is ended if this is cancelled."""
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _PATIENCE_S)
            except TimeoutError:
                process.kill()
        raise


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """ctrl+c reaches the editor and this process. A handler, unlike SIG_IGN, is not inherited by the editor."""

    def ignore(number: int, frame: FrameType | None) -> None:
        return

    before = signal.signal(signal.SIGINT, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
