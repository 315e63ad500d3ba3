"""What the conversation store keeps, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant"]
State = Literal["complete", "writing", "stopped", "failed"]
"""``writing`` found at start-up means the program died: the partial text is kept and shown as stopped."""


@dataclass(frozen=True)
class Conversation:
    """``leaf`` is the message whose path from the root is shown; other leaves are branches."""

    id: int
    title: str
    system: str
    model: str
    created: float
    updated: float
    leaf: int | None
    archived: bool = False


@dataclass(frozen=True)
class MessageRecord:
    """One message of the tree. ``parent`` None: a first message. Times are seconds since the epoch."""

    id: int
    conversation: int
    parent: int | None
    role: Role
    content: str
    state: State
    created: float
    model: str = ""
    tokens: int = 0
    tokens_per_s: float = 0.0
    finish_reason: str = ""
    siblings: int = 1
    """How many messages (this one included) share its parent and role: alternatives to choose from."""
    sibling_index: int = 0


@dataclass(frozen=True)
class SearchHit:
    conversation: Conversation
    message: int
    snippet: str
    """Plain text around the hit, with U+E000 before and U+E001 after each matched word."""


class StoreError(Exception):
    """The store cannot do it; the text is one sentence for the person.

    ``reason`` is ``locked``, ``damaged``, ``full`` or ``other``.
    """

    def __init__(self, text: str, reason: Literal["locked", "damaged", "full", "other"] = "other") -> None:
        super().__init__(text)
        self.reason = reason
