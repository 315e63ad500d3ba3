"""Keeps a process of the program to its owner: what it writes, and what it leaves if it crashes."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

_PR_SET_DUMPABLE = 4


def keep_to_owner() -> None:
    """From now on files of this process and its children are their owner's alone, and a crash leaves no core file.

    Conversations, keys and tokens are in memory. A system that hands a core to a program does not ask for the limit, so
    on Linux the process is not dumpable either; nor can a debugger of the same user be attached, then.
    """
    os.umask(0o077)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
