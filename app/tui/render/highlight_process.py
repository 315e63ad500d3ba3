"""The process that colours code with Pygments. Each request on stdin and each reply on stdout is one line of JSON.

A lexer is a set of regular expressions, and some texts keep one busy for ever. Nothing in the same process can stop it,
because a match holds the interpreter's lock. Here the kernel ends the process (SIGPROF) when a block has taken as many
seconds of processor time as the command line says.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import _TokenType

from engine.system.processes import keep_to_owner

_MEMORY_BYTES = 1 << 30
"""Maximum address space of this process, in bytes."""


def runs_of(lexer: Lexer, code: str) -> list[tuple[str, int]]:
    """``code`` as consecutive (kind, number of characters); a kind is a token type such as ``Name.Function``."""
    runs: list[tuple[str, int]] = []
    kind: _TokenType
    for start, kind, text in lexer.get_tokens_unprocessed(code + "\n"):
        length = min(len(text), len(code) - start)
        if length > 0:
            runs.append((".".join(kind), length))
    return runs


def main(deadline_s: float) -> None:
    keep_to_owner()
    with suppress(OSError, ValueError):  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c of a terminal is for the program
    lexers: dict[str, Lexer] = {}
    for line in sys.stdin.buffer:
        language, code = json.loads(line)
        if language not in lexers:
            lexers[language] = get_lexer_by_name(language)
            runs_of(lexers[language], "")  # compiles its expressions, which is no part of a block's time
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        runs = runs_of(lexers[language], code)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(runs) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
