"""Names that other machines gave themselves: foreign text, made harmless before it is shown or stored."""

from __future__ import annotations

import unicodedata

MAX_NAME = 64
"""Maximum characters of a name."""


def clean_name(text: str) -> str:
    """``text`` on one line without control, format or private characters, at most 64 characters. It may be empty."""
    printable = "".join(
        " " if character.isspace() else character
        for character in text[: 4 * MAX_NAME]
        if character.isspace() or unicodedata.category(character)[0] != "C"
    )
    return " ".join(printable.split())[:MAX_NAME].rstrip()


def plain_text(text: str, most: int = 200) -> str:
    """``text`` from another machine, fit for a sentence: one line, printable characters only, not too long."""
    shown = "".join(character if character.isprintable() else " " for character in text[:most])
    return " ".join(shown.split())
