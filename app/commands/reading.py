"""What ``ask`` reads from its standard input."""

from __future__ import annotations

import os
import select
import stat
import sys

from app.commands.output import WorkFailed, say, size

FIRST_BYTE_S = 3.0
"""Seconds for the first byte of a pipe when there is a prompt as well. A pipe may be inherited and never used (a job
of a CI service, ``ssh host privatellm ask hi``); a pipeline's usually has its first byte, or its end, at once."""


LARGEST = 32 * 1024 * 1024
"""Bytes of a question, far above any context: what never ends (``yes |``) must not fill the memory."""


def read_prompt() -> str:
    """The question from stdin. Raises WorkFailed (status 2) if there is none."""
    if sys.stdin is None or sys.stdin.closed:
        raise WorkFailed("no question: give it as an argument or on stdin, which is closed", status=2)
    if sys.stdin.isatty():
        say("Type the question, then ctrl-d:")
    return _read()


def read_piped(*, wait: bool | None) -> str:
    """What stands on stdin besides a prompt: the rest of a file, or all of a pipe or socket; else nothing.

    With ``wait`` a pipe is waited for however long it takes; otherwise one that gives nothing within
    :data:`FIRST_BYTE_S` is left alone, which is said. Raises WorkFailed (status 2) for what is not UTF-8.
    """
    descriptor = _descriptor()
    if descriptor is None:
        return ""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return _read()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return ""
    if not wait and not select.select([descriptor], [], [], FIRST_BYTE_S)[0]:
        say(
            f"note: stdin is open, but nothing came within {FIRST_BYTE_S:.0f} s: the prompt alone is asked. --stdin "
            "waits for a slow command; --no-stdin does not look."
        )
        return ""
    return _read()


def _descriptor() -> int | None:
    """Of stdin; None if it is closed, or none of the system's."""
    try:
        if sys.stdin is None or sys.stdin.closed:
            return None
        descriptor = sys.stdin.fileno()
        os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return descriptor


def _read() -> str:
    try:
        data = sys.stdin.buffer.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise WorkFailed(f"the question on stdin is longer than {size(LARGEST)}", status=2)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WorkFailed(f"the question on stdin is not UTF-8 text (byte {error.start})", status=2) from error
    except OSError as error:
        raise WorkFailed(f"stdin cannot be read: {error.strerror or error}", status=2) from error
    return text.removesuffix("\n")
