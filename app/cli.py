"""The command ``privatellm``. Lean: what a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command line; the exit status."""
    asking = sys.argv[1:2] == ["ask"]
    try:
        status = _run(asking)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:
        _flush()
    if asking:
        # Everything is closed, and the interpreter's own end would take longer than the tokens of a short answer.
        os._exit(status)
    return status


def _run(asking: bool) -> int:
    # Ctrl-c may come at any moment: the only import before it is handled is within main's try.
    from app.interrupts import leave_on_interrupt

    leave_on_interrupt()
    from engine.models.privacy import keep_to_owner

    keep_to_owner()
    if len(sys.argv) == 1:
        return _chat()
    if not asking:
        from app.commands.root import run

        return run(sys.argv[1:])
    from app import engine_process

    # The engine comes up while the command line is read.
    engine_process.begin()
    try:
        from app.commands.root import run

        return run(sys.argv[1:])
    finally:
        engine_process.end_begun()


def _chat() -> int:
    streams = (sys.stdin, sys.stdout)
    if not all(stream is not None and not stream.closed and stream.isatty() for stream in streams):
        print(  # noqa: T201
            'privatellm: the chat needs a terminal; in a script use: privatellm ask "..."', file=sys.stderr
        )
        return 2
    from app.interrupts import leave_on_interrupt, raise_on_interrupt
    from app.tui.application import run_chat

    # From here on the screen owns the terminal and must be able to restore it.
    raise_on_interrupt()
    try:
        return run_chat() or 0
    finally:
        leave_on_interrupt()


def _flush() -> None:
    """Flush stdout while a closed pipe can still be handled, and ignore ctrl-c from here to the end of the process."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        from app.commands.output import forget_stdout

        forget_stdout()


if __name__ == "__main__":
    sys.exit(main())
