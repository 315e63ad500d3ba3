"""``privatellm`` without a command: the chat, on a screen or in lines."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from app.interrupts import leave_on_interrupt, raise_on_interrupt

if TYPE_CHECKING:
    from app.chat.starting import Start


def start_from(*, latest: bool, model: str | None, persona: str | None) -> Start | None:
    """The start of the chat according to its flags; None without flags. Raises WorkFailed for unknown or missing
    choices."""
    if not latest and model is None and persona is None:
        return None
    from app.chat.starting import Start
    from app.commands.options import check_model, persona_named

    start = Start(latest, model or "", None if persona is None else persona_named(persona))
    if model is not None:
        check_model(model)
    return start


def chat(start: Start | None = None, *, plain: bool = False) -> int:
    """Chat until the person leaves; the exit status. A dumb terminal has no screen to draw on: it gets lines."""
    if plain or (_on_terminal() and os.environ.get("TERM") == "dumb"):
        from app.plain.starting import run_plain

        return run_plain(start)
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
        return run_chat(start) or 0
    finally:
        leave_on_interrupt()


def _on_terminal() -> bool:
    return all(stream is not None and not stream.closed and stream.isatty() for stream in (sys.stdin, sys.stdout))
