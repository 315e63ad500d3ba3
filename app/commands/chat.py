"""``privatellm`` without a command: the chat, on a screen or in lines."""

from __future__ import annotations

import os
import sys

from app.interrupts import leave_on_interrupt, raise_on_interrupt


def chat(*, plain: bool = False) -> int:
    """Chat until the person leaves; the exit status. A dumb terminal has no screen to draw on: it gets lines."""
    if plain or (_on_terminal() and os.environ.get("TERM") == "dumb"):
        from app.plain.chat import run_plain

        return run_plain()
    if not _on_terminal():
        print(  # noqa: T201
            'privatellm: the chat needs a terminal; in a script use: privatellm ask "...", or privatellm --plain',
            file=sys.stderr,
        )
        return 2
    from app.tui.application import run_chat

    # From here on the screen owns the terminal and must be able to restore it.
    raise_on_interrupt()
    try:
        return run_chat() or 0
    finally:
        leave_on_interrupt()


def _on_terminal() -> bool:
    return all(stream is not None and not stream.closed and stream.isatty() for stream in (sys.stdin, sys.stdout))
