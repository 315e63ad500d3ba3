"""The command ``privatellm``. Lean: what a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130
_COMPLETING = "_PRIVATELLM_COMPLETE"
"""Variable with which a shell asks for completions, without arguments."""


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
    from engine.system.processes import keep_to_owner

    keep_to_owner()
    if len(sys.argv) == 1 and _COMPLETING not in os.environ:
        from app.commands.chat import chat

        return chat()
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
