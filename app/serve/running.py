"""The servers that run on this machine: each holds a small file that says where it is, for ``serve --status``."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from discovery.storage import PRIVATE


class RunningServer(msgspec.Struct, frozen=True):
    """``token`` lets the person of this machine read the figures without the key."""

    pid: int
    url: str
    host: str
    port: int
    model: str
    since: float
    tls: bool
    key: bool
    token: str


@contextlib.contextmanager
def announced(folder: Path, server: RunningServer) -> Iterator[None]:
    """Inside, ``server`` is among :func:`running_servers`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"serve-{server.port}.json"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        # The lock ends with the process, however that ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, msgspec.json.encode(server))
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def running_servers(folder: Path) -> list[RunningServer]:
    """The servers that run now, by their ports."""
    found = []
    for path in sorted(folder.glob("serve-*.json")):
        try:
            with path.open("rb") as file:
                if not _is_locked(file.fileno()):
                    continue  # its process ended without tidying up
                found.append(msgspec.json.decode(file.read(), type=RunningServer))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
