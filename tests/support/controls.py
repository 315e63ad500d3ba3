"""Who watches an answer, or cancels it: nobody, mostly."""

from __future__ import annotations


class Nobody:
    """Nobody watches, and nobody cancels."""

    def cancelled(self) -> bool:
        return False

    def watching(self) -> bool:
        return False

    @property
    def owner(self) -> object:
        return "somebody"


class Watching(Nobody):
    """Somebody watches and never cancels."""

    def watching(self) -> bool:
        return True
