"""The one error a person sees from the engine."""

from __future__ import annotations

from engine.messages import ErrorKind


class ModelError(Exception):
    """Something the person asked for cannot be done.

    The text is one sentence: what is wrong, with the value, and what to do. ``kind`` sorts it for the screen.
    """

    def __init__(self, text: str, kind: ErrorKind = "model") -> None:
        super().__init__(text)
        self.kind: ErrorKind = kind


class Cancelled(ModelError):
    """Somebody asked to stop something long; what was done so far is kept where that is of use."""
