"""The one error a person sees from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

ErrorKind = Literal["bad-input", "model", "memory", "disk", "network", "context", "in-use", "internal"]


class ModelError(Exception):
    """Something the person asked for cannot be done.

    The text is one sentence: what is wrong, with the value, and what to do. ``kind`` sorts it for the screen.
    """

    def __init__(self, text: str, kind: ErrorKind = "model") -> None:
        super().__init__(text)
        self.kind: ErrorKind = kind


def damaged(what: str) -> ModelError:
    """The error about a model's files that are not as they were published: ``what`` is wrong, and where."""
    return ModelError(f"{what}; fetch the model again.")


class Cancelled(ModelError):
    """A long operation was stopped on request. What was done so far is kept where that is of use."""


class PeerLost(Exception):
    """A node of the epoch is lost, and nothing of the epoch can be used any more.

    ``ranks`` are the nodes that are known to be gone; empty if that is not known. ``noticed_at`` are the nodes at which
    the loss was noticed, which may only have followed others; by default ``ranks``. ``reason`` says what happened
    without naming a machine; by default the whole text.
    """

    def __init__(
        self, text: str, ranks: Sequence[int] = (), *, reason: str = "", noticed_at: Sequence[int] = ()
    ) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.noticed_at = tuple(noticed_at) or self.ranks
        self.reason = (reason or text).rstrip(".")


class LinkLost(PeerLost):
    """A link between two nodes of the epoch broke, and both are there; the text names it."""


# --- what a file says, in an error -----------------------------------------------------------------------------------


def shown(value: object, limit: int = 80) -> str:
    """``value`` in at most ``limit`` printable ASCII characters: text as it is; Python's repr of all else and of ""."""
    text = value if isinstance(value, str) and value and value.isprintable() and value.isascii() else ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
