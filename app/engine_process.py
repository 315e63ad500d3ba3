"""The engine's process: starting it, and starting one before this program knows what it will ask.

Imports little, so that an engine can be started early: it takes as long to come up as this program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from engine.ipc.engine_sockets import reachable_engines
from engine.system.locations import ensure
from engine.system.processes import secrets

_REAP_WAIT_S = 2.0


def host_command() -> tuple[str, ...]:
    """How the engine process is started.

    ``-P`` keeps the current folder out of the module search: somebody's folder named ``engine`` is not our engine.
    """
    return (sys.executable, "-P", "-m", "engine.host")


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process in its own session, connected to this one by its stdin and stdout. Raises OSError."""
    log = _open_log()
    try:
        return subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log if log is not None else subprocess.DEVNULL,
            env={**child_environment(), **secrets()},
            cwd=_working_folder(),
            start_new_session=True,
        )
    finally:
        if log is not None:
            log.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and whatever it started (it leads a process group)."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def reap(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and wait for its end, at most :data:`_REAP_WAIT_S` seconds for one that hangs in the kernel."""
    kill(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_WAIT_S)


_left: list[subprocess.Popen[bytes]] = []
"""Processes that other programs use, and that this program no longer does."""


def leave(process: subprocess.Popen[bytes]) -> None:
    """Let ``process`` go on without this program; it is waited for when it has ended."""
    _forget_ended()
    _left.append(process)


def _forget_ended() -> None:
    _left[:] = [other for other in _left if other.poll() is None]


def end(process: subprocess.Popen[bytes]) -> None:
    """:func:`reap`, and close the pipes to it."""
    reap(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


# --- begun early --------------------------------------------------------------------------------------------------

_begun: list[tuple[tuple[str, ...], subprocess.Popen[bytes]]] = []


def begin() -> None:
    """Start an engine for the first caller of :func:`take`, unless there may be one to share. Errors are left to that
    caller's own attempt."""
    if reachable_engines():
        return
    command = host_command()
    with suppress(OSError):
        _begun.append((command, start(command)))


def take(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The process that was begun with this ``command``, or a new one. Raises OSError."""
    _forget_ended()
    while _begun:
        begun, process = _begun.pop()
        if begun == tuple(command):
            return process
        end(process)
    return start(command)


def end_begun() -> None:
    """End the process that was begun and not taken, if there is one."""
    while _begun:
        end(_begun.pop()[1])


# --- where it runs ------------------------------------------------------------------------------------------------


def _open_log() -> IO[bytes] | None:
    """The log that takes the engine's stray output until the engine opens it itself; None if it cannot be opened."""
    try:
        return (ensure("logs") / "engine.log").open("ab")
    except OSError:
        return None


def child_environment() -> dict[str, str]:
    """The environment of the engine process: run from the source tree, it must find the same source tree."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parent.parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    if root not in installed and not (root / "typing.py").exists():
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else str(root)
    return environment


def _working_folder() -> str | None:
    """The engine's current folder: this one, which paths of models are relative to.

    One that was deleted would keep torch's libraries from loading, and there is nothing in it to be relative to.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        return os.sep
    return None
