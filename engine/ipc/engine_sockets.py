"""Unix sockets in the data folder, through which a person's other programs reach a running engine.

A socket's name contains the engine's process id and a key (:func:`engine_key`). Programs with the same key can share
an engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from engine.system.locations import locate

SUFFIX = ".sock"
_ENVIRONMENT = ("PRIVATELLM_", "OMP_", "CUDA_", "HIP_", "ROCR_", "MLX_")
"""Beginnings of variables that change what an engine does."""
_MAC_CREDENTIALS = (0, 1)
"""SOL_LOCAL and LOCAL_PEERCRED of macOS."""

CAN_SHARE = hasattr(socket, "AF_UNIX") and os.name == "posix"
"""Whether this system has Unix sockets."""


def sockets_folder() -> Path:
    return locate("data") / "engines"


def engine_key() -> str:
    """Eight hexadecimal digits for this installation and the variables that engines read.

    Programs look only for engines with their own key. Another installation's engine might answer differently.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    # Where an engine is found is no part of what it does.
    found.pop("PRIVATELLM_HOME", None)
    said = repr((sys.version_info[:3], str(Path(__file__).resolve()), sorted(found.items())))
    return f"{zlib.crc32(said.encode(errors='surrogatepass')):08x}"


def reachable_engines() -> list[Path]:
    """The sockets of engines that this program could share, the newest first. Some may be left from engines that
    ended."""
    if not CAN_SHARE:
        return []
    try:
        found = [(path.lstat().st_mtime_ns, path) for path in sockets_folder().glob(f"{engine_key()}-*{SUFFIX}")]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def connect(path: Path) -> socket.socket | None:
    """A connection with the engine at ``path``, or None if there is none any more; a socket that was left is removed.

    An engine of another user is no engine, and neither is one that has stopped accepting programs.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Connecting would wait for an engine whose queue is full.
    made.setblocking(False)
    try:
        with _address(path) as address:
            made.connect(address)
        if is_same_user(made):
            return made
    except ConnectionRefusedError:
        # Its engine was killed. Names hold process ids, so no other engine has made the same one since.
        with contextlib.suppress(OSError):
            path.unlink()
    except OSError:
        pass
    made.close()
    return None


def listen(key: str) -> tuple[socket.socket, Path]:
    """A listening socket of this process, which only this user can reach, and its path. Raises OSError.

    ``key``: the :func:`engine_key` of before the process changed its environment.
    """
    folder = sockets_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    path = folder / f"{key}-{os.getpid()}{SUFFIX}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unready = path.with_suffix(".new")
    try:
        with contextlib.suppress(FileNotFoundError):
            unready.unlink()
        with _address(unready) as address:
            made.bind(address)
        unready.chmod(0o600)
        made.listen()
        made.setblocking(False)
        # Under its own name it is seen only when it listens, so that a refusal means that its engine is gone.
        unready.replace(path)
    except BaseException:
        made.close()
        raise
    return made, path


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    try:
        if hasattr(socket, "SO_PEERCRED"):
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            user = struct.unpack("3i", found)[1]
        elif sys.platform == "darwin":
            found = connection.getsockopt(*_MAC_CREDENTIALS, 76)
            user = struct.unpack_from("=II", found)[1]
        else:
            return False
    except OSError:
        return False
    return bool(user == os.getuid())


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """``path`` in a form that fits into the about hundred bytes of a socket's address.

    On Linux a long one is reached through a descriptor of its folder. Elsewhere the system refuses it.
    """
    if sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
