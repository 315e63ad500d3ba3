"""What the conversation store keeps: conversations, their messages, and what was found or deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.attachments.attachment import Attachment
from app.conversations.generation import UNKNOWN, Generation

Role = Literal["user", "assistant"]
State = Literal["complete", "writing", "stopped", "failed"]
"""A message's state. ``writing`` found at start-up means that its program died: the message becomes ``stopped``."""


@dataclass(frozen=True)
class Conversation:
    """One conversation. ``leaf``: the message whose path from the root is shown; other leaves are branches."""

    id: int
    title: str
    system: str
    model: str
    created: float
    updated: float
    leaf: int | None
    archived: bool = False
    pinned: bool = False
    origin: str = ""
    """Name of the conversation on every machine: the program it comes from and its id there."""
    own_values: Mapping[str, Any] = field(default_factory=dict)
    """The persona and the values that it sets differently from the settings, as :mod:`app.settings.layers` has them.

    The store does not check them."""


@dataclass(frozen=True)
class Thoughts:
    """What a model thought before its answer. They are no part of the answer: no later question has them in it."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0


NO_THOUGHTS = Thoughts()
"""Thoughts of a model that had none."""


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
    """Number of messages, this one included, with its parent and role: alternatives to choose from."""
    sibling_index: int = 0
    thoughts: Thoughts = NO_THOUGHTS
    generation: Generation = UNKNOWN
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True)
class SearchHit:
    """A conversation that a search found, and the best of its messages that have the words."""

    conversation: Conversation
    message: int
    snippet: str
    """Plain text around the hit, with U+E000 before and U+E001 after each matched word."""
    messages: int = 1
    """Number of its messages that have the words; 0 if only its title has them."""


@dataclass(frozen=True)
class Deletion:
    """What one call deleted, for :meth:`ConversationStore.restore`. ``leaf``: the conversation's before the call."""

    conversation: int
    messages: tuple[int, ...]
    leaf: int | None
    whole: bool = False
    """True if the conversation itself was deleted."""
