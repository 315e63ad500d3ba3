"""How long work tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int, str], None]
"""``(stage, done, total, unit)`` as in :class:`engine.messages.Progress`; it may raise
:class:`engine.errors.Cancelled`."""
