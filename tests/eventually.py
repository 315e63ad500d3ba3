"""Waiting for what another thread or process does: until it has happened, and never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Seconds after which a test that hangs fails. Nothing is asserted about time."""


def eventually(what: Callable[[], object], seconds: float = PATIENCE_S, why: str = "it did not happen in time") -> None:
    """Wait until ``what()`` is true."""
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < seconds, why
        time.sleep(0.01)
