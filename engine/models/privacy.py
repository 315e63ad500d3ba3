"""Keeping the files, memory and core dumps of a process of this program private to its owner."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

_PR_SET_DUMPABLE = 4


def keep_to_owner() -> None:
    """Make new files of this process and its children readable by their owner only, and disable core files.

    Conversations, keys and tokens are in memory. A system that pipes a core to a program ignores the limit, so on Linux
    the process is also made undumpable, which keeps debuggers of the same user from attaching, too.
    """
    os.umask(0o077)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
