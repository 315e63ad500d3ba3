"""Keeping the files, memory, environment and core dumps of a process of this program private to its owner."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_PR_SET_DUMPABLE = 4
SECRETS = ("HF_TOKEN",)
"""Environment variables whose values are secret."""
_kept: dict[str, str] = {}


def keep_to_owner() -> None:
    """Protect this process. Every process of the program must call it before it reads anything.

    New files of the process and its children are readable by their owner only, and core files are disabled.
    Conversations, keys and tokens are in memory. A system that pipes a core to a program ignores the limit, so on Linux
    the process is also made undumpable. No other process of the same user can then read its memory, environment or open
    files. A child is protected only from its own call on, so secrets leave the environment that it inherits.
    """
    os.umask(0o077)
    for name in SECRETS:
        if name in os.environ:
            _kept[name] = os.environ.pop(name)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def secrets() -> dict[str, str]:
    """Values of :data:`SECRETS` that this process was started with, for the children that need them."""
    return {name: value for name in SECRETS if (value := _kept.get(name) or os.environ.get(name))}


# --- starting a module of this program -------------------------------------------------------------------------------


ModuleStarter = Callable[..., subprocess.Popen[bytes]]
"""A function that is called as :func:`start_module`."""


def start_module(
    module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``python -m module``, with ``environment`` besides this process's own; ``options`` are Popen's.

    The child finds the packages where this process found them, in whatever folder it starts. Raises OSError.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        # -P: somebody's folder named ``engine``, in which this was started, is not our engine.
        [sys.executable, "-P", "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        **options,
    )


# --- gRPC's environment ----------------------------------------------------------------------------------------------


ONLY_TLS_1_3 = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES128-GCM-SHA256"}
"""Environment that limits gRPC to TLS 1.3. The one suite left for older versions cannot be used with a node's P-256
certificate."""
