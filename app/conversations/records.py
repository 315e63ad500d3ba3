"""Records of the conversation store: conversations, their messages, search results and deletions."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.attachments.attachment import Attachment


@dataclass(frozen=True)
class Generation:
    """The generation of one answer: its values and figures. None: not known, or there was none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    beams: int | None = None
    """Width of the beam search; None if there was none."""
    length_penalty: float | None = None
    prompt_tokens: int | None = None
    ttft_s: float | None = None
    """Seconds to the first token."""
    edited: bool | None = None
    """True if a person changed the text."""

    @property
    def known(self) -> dict[str, float | int]:
        """The values that are known, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> str:
        """The values that are known as a JSON object; empty if none is."""
        return json.dumps(self.known) if self.known else ""


UNKNOWN = Generation()
"""The generation of a message that was typed, or of which nothing is known."""
EDITED = Generation(edited=True)
"""The generation of an answer that a person changed."""

_WHOLE = frozenset({"top_k", "seed", "beams", "prompt_tokens"})
_LARGEST = 2**64


def generation_from(text: str) -> Generation:
    """The inverse of :meth:`Generation.to_json`. Text that is no such JSON gives :data:`UNKNOWN`."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return UNKNOWN
    return generation_of(found)


def generation_of(stored: object) -> Generation:
    """The generation in a decoded JSON object. Values of a wrong type or size are left out."""
    if not isinstance(stored, Mapping):
        return UNKNOWN
    values: dict[str, Any] = {}
    for member in dataclasses.fields(Generation):
        value: Any = stored.get(member.name)
        whole = member.name in _WHOLE
        if member.name == "edited":
            values[member.name] = True if value is True else None
        elif _is_number(value, whole=whole):
            values[member.name] = value if whole else float(value)
    return Generation(**values)


def _is_number(value: Any, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return -_LARGEST < value < _LARGEST and math.isfinite(value)


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
    """A model's thoughts before its answer. They are not part of the answer, and later questions do not include
    them."""

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
    """The extent of one deletion, for :meth:`ConversationStore.restore`. ``leaf``: the conversation's leaf before
    it."""

    conversation: int
    messages: tuple[int, ...]
    leaf: int | None
    whole: bool = False
    """True if the conversation itself was deleted."""
