"""The servers of this person that run on this machine: each holds a small file that says where it is.

`serve --status` and the chat read these files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from discovery.storage import PRIVATE, PRIVATE_FOLDER
from engine.system.locations import locate

_MOST_BYTES = 64 << 10
"""Maximum bytes of a server's file that are read."""


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


def servers_folder() -> Path:
    return locate("data") / "servers"


@contextlib.contextmanager
def announced(folder: Path, server: RunningServer) -> Iterator[None]:
    """Lists ``server`` among :func:`running_servers` while inside. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    _remove_left(folder)
    path = folder / f"{server.pid}-{server.port}.json"
    unready = path.with_suffix(".new")
    descriptor = os.open(unready, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    try:
        # The lock ends with the process, however that ends. Under its own name the file is seen only when it is locked.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, msgspec.json.encode(server))
        unready.replace(path)
        yield
    finally:
        for name in (unready, path):
            with contextlib.suppress(OSError):
                name.unlink()
        os.close(descriptor)


def running_servers(folder: Path) -> list[RunningServer]:
    """The servers that run now, by their ports."""
    servers = []
    for path in _files(folder):
        try:
            with path.open("rb") as file:
                if _is_locked(file.fileno()):
                    servers.append(msgspec.json.decode(file.read(_MOST_BYTES), type=RunningServer))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return sorted(servers, key=lambda server: (server.port, server.pid))


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix == ".json"]
    except OSError:
        return []


def _remove_left(folder: Path) -> None:
    """Remove the files of servers that were killed."""
    for path in _files(folder):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if not _is_locked(file.fileno()):
                path.unlink()


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
