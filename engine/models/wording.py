"""Putting what a file says into an error: files are not trusted, and an error ends up on a terminal."""

from __future__ import annotations


def shown(value: object, limit: int = 80) -> str:
    """``value`` in at most ``limit`` printable ASCII characters: text as it is; Python's repr of all else and of ""."""
    text = value if isinstance(value, str) and value and value.isprintable() and value.isascii() else ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
