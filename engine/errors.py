"""The one error a person sees from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

ErrorKind = Literal["bad-input", "model", "memory", "disk", "network", "context", "internal"]


class ModelError(Exception):
    """Something the person asked for cannot be done.

    The text is one sentence: what is wrong, with the value, and what to do. ``kind`` sorts it for the screen.
    """

    def __init__(self, text: str, kind: ErrorKind = "model") -> None:
        super().__init__(text)
        self.kind: ErrorKind = kind


class Cancelled(ModelError):
    """Somebody asked to stop something long; what was done so far is kept where that is of use."""


class PeerLost(Exception):
    """A node of the epoch is gone; nothing of the epoch can be used any more.

    ``ranks`` are those that are known to be gone (empty: not known which).
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class LinkLost(PeerLost):
    """A link between two nodes of the epoch broke, and both are there; the text names it."""
