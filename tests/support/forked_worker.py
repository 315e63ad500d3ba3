"""Stands between pytest-xdist and a worker that the fork server has forked, as if it were the worker's interpreter.

``python forked_worker.py ADDRESS -u -c CODE``: a process forked by the server at ADDRESS runs CODE with this process's
streams, environment and folder, and this process ends with its status. The server ends with the last of its workers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

REPORT = 8
"""Bytes of a number on a report socket, as in fork_server.py, which takes long to import."""


def main() -> int:
    _, address, *_, code = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker gets it, too
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(f"\0{address}")
    control.recv(REPORT)
    job = {
        "code": code,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "session": False,
        "descriptors": [],
    }
    report, theirs = socket.socketpair()
    socket.send_fds(control, [json.dumps(job).encode()], [0, 1, 2, theirs.fileno()])
    theirs.close()
    # Only the worker holds its streams, so that their ends are seen.
    os.closerange(0, 2)
    with report.makefile("rb") as numbers:
        _pid, status = (int.from_bytes(numbers.read(REPORT), "little", signed=True) for _ in range(2))
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
