"""Waiting for what another thread or process does: until it has happened, and never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 120.0
"""Seconds after which a test that hangs fails. Nothing is asserted about time."""
LEAST_PAUSE_S, MOST_PAUSE_S = 0.005, 0.05
"""Seconds between two looks, at first and later."""


def eventually(what: Callable[[], object], seconds: float = PATIENCE_S, why: str = "it did not happen in time") -> None:
    """Wait until ``what()`` is true."""
    begin = time.monotonic()
    while not what():
        waited = time.monotonic() - begin
        assert waited < seconds, why
        # What takes long is looked at less often: looking may keep the one busy that is waited for.
        time.sleep(min(MOST_PAUSE_S, LEAST_PAUSE_S + waited / 20))


def has_ended(process: psutil.Process) -> bool:
    """Whether ``process`` has ended. Nobody may have asked yet with which status; it may end while it is looked at."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
