"""Temporary folders that are removed even if this process is killed.

A killed process cannot clean up, and a benchmark may write gigabytes. Each folder therefore has a remover, a small
process whose stdin ends with its parent. It then removes the folder, also if other processes still write into it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.system.processes import keep_to_owner, start_module

LOOK_S = 0.25
QUIET_LOOKS = 8
"""Consecutive checks that must find the folder gone: other processes may end a little later than the one that died and
write until then."""
MOST_LOOKS = 120
END_S = 5.0
_DONE = b"done"
_MODULE = "engine.system.temporary_folders"


def is_remover(arguments: Sequence[str]) -> bool:
    """Whether these are the arguments of a remover, which must not be ended with the other processes."""
    return list(arguments[1:4]) == ["-P", "-m", _MODULE]


@contextlib.contextmanager
def temporary_folder(prefix: str, inside: Path | None = None) -> Iterator[Path]:
    """A new folder, in ``inside`` or the system's temporary folder, removed at the end. Raises OSError."""
    folder = (inside or Path(tempfile.gettempdir())) / f"{prefix}{secrets.token_hex(8)}"
    remover = _start_remover(folder)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _dismiss(remover)


def _start_remover(folder: Path) -> subprocess.Popen[bytes]:
    return start_module(
        _MODULE,
        [str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # What is sent to this process's group must not reach it: it has something to do then.
        start_new_session=True,
    )


def _dismiss(remover: subprocess.Popen[bytes]) -> None:
    try:
        remover.communicate(_DONE, END_S)
    except (OSError, subprocess.TimeoutExpired):
        remover.kill()
        remover.communicate()


def remove(folder: Path) -> None:
    """Remove ``folder`` until it stays away."""
    gone = 0
    for _ in range(MOST_LOOKS):
        gone = 0 if folder.exists() else gone + 1
        if gone >= QUIET_LOOKS:
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(LOOK_S)


def main() -> None:
    keep_to_owner()
    if sys.stdin.buffer.read() != _DONE:
        remove(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
