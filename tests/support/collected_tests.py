"""A process that has imported the tests and forks the workers that run them; see engine_forks.py.

``-m tests.support.collected_tests LISTENER ARGUMENTS``: forked by the server that has imported the libraries, it
serves as fork_server.py does, on the socket of the descriptor LISTENER. ARGUMENTS are pytest's, as the workers will
have them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import socket
import sys

import pytest

from tests.support import fork_server


def main() -> None:
    import_tests(sys.argv[2:])
    fork_server.fork_for(socket.socket(fileno=int(sys.argv[1])))


def import_tests(arguments: list[str]) -> None:
    """Let pytest collect the tests, which imports them with their assertions rewritten. Each worker collects them again
    and finds the modules there. What cannot be imported it finds and says itself."""
    path = list(sys.path)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments])
    # As each worker begins with: it imports every conftest itself, and puts their folders on the path.
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("tests.") and name.endswith("conftest")]:
        del sys.modules[name]
    gc.unfreeze()


if __name__ == "__main__":
    main()
