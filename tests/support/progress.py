"""Progress that nobody looks at."""

from __future__ import annotations


def quiet(*_: object) -> None:
    """A callback for progress that does nothing."""
