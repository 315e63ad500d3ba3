"""The parts of imported conversations, and the checks that every value from a file passes."""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from app.attachments.attachment import AttachedPicture, Attachment, pictures_of
from app.attachments.reading import is_picture
from app.conversations.records import NO_THOUGHTS, UNKNOWN, Generation, Role, State, Thoughts
from app.text_safety import one_line, sanitize
from engine.ipc.messages import LARGEST_PICTURE
from engine.pictures.picture import MOST_PIXELS

MOST_MESSAGES = 100_000
"""Largest number of messages in a conversation that is imported."""
LONGEST_TEXT = 5_000_000
"""Maximum characters of a message that is imported, of its thoughts, and of each of its attachments."""
_MOST_PRODUCED = 500_000_000
"""Maximum characters of an import."""
_OWN_SIZE = 500
"""Number of characters that a message or a conversation counts beside its text."""
_LATEST = 4_102_444_800.0
"""Seconds since the epoch after which a time is taken for a mistake: the year 2100."""
_LONGEST_NAME = 200
"""Length in characters after which a title, a model's name or an id is cut."""


class ImportProblem(Exception):
    """A file cannot be imported. The text is one sentence for the person."""


class ImportTooLarge(Exception):
    """A conversation is too large to be imported, or there is too much before it."""


class Allowance:
    """The characters that may still be read or produced. What was spent stays so, also if it comes to nothing."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def spend(self, characters: int) -> None:
        """Raises ImportTooLarge, now and from now on, if that is more than what is left."""
        self._left -= characters
        if self._left < 0:
            raise ImportTooLarge


def produced_of(size: int) -> Allowance:
    """The maximum result of importing a file of ``size`` bytes.

    Fragments of prompts that are stored once and used often produce more text than was read, within limits.
    """
    return Allowance(min(_MOST_PRODUCED, 10_000_000 + 100 * size))


@dataclass(frozen=True)
class Added:
    """The result of an import. ``known``: number of conversations that were already there."""

    new: int
    known: int

    def __str__(self) -> str:
        return f"{self.new} new, {self.known} already here"


@dataclass
class ImportedMessage:
    """A message. ``parent``: the place of the message before it in the list of messages, which is a smaller one.

    ``only_named``: the number of its pictures and files whose text is not in the export.
    """

    role: Role
    content: str
    parent: int | None = None
    created: float | None = None
    model: str = ""
    state: State = "complete"
    tokens: int = 0
    tokens_per_s: float = 0.0
    finish_reason: str = ""
    thoughts: Thoughts = NO_THOUGHTS
    generation: Generation = UNKNOWN
    attachments: tuple[Attachment, ...] = ()
    only_named: int = 0

    def spend(self, allowance: Allowance) -> None:
        """Subtract this message from ``allowance``. Raises ImportTooLarge, also for limits of its own."""
        texts = (self.content, self.thoughts.text, *(attachment.text for attachment in self.attachments))
        pictures = sum(len(shown.data) for shown in pictures_of(self.attachments))
        if max(map(len, texts)) > LONGEST_TEXT:
            raise ImportTooLarge
        allowance.spend(_OWN_SIZE * (1 + len(self.attachments)) + sum(map(len, texts)) + pictures)


@dataclass
class ImportedConversation:
    """A conversation. ``origin`` names it: an import never adds another with the same origin.

    ``leaf``: the place of the message whose branch is shown; None: the last.
    """

    origin: str
    title: str = ""
    system: str = ""
    model: str = ""
    created: float | None = None
    updated: float | None = None
    messages: list[ImportedMessage] = field(default_factory=list)
    leaf: int | None = None
    archived: bool = False
    pinned: bool = False
    own_values: Mapping[str, Any] = field(default_factory=dict)

    def spend(self, allowance: Allowance) -> None:
        """Subtract this conversation from ``allowance``. Raises ImportTooLarge, also for limits of its own."""
        if len(self.messages) > MOST_MESSAGES:
            raise ImportTooLarge
        allowance.spend(_OWN_SIZE + len(self.system))
        for message in self.messages:
            message.spend(allowance)


# --- checks ---------------------------------------------------------------------------------------------------------


def table(value: object) -> Mapping[str, Any]:
    """``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows(value: object) -> Sequence[Any]:
    """``value`` if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else ()


def text(value: object) -> str:
    """``value`` as safe text; empty if it is none."""
    return sanitize(value) if isinstance(value, str) else ""


def name(value: object) -> str:
    """``value`` as one short safe line; empty if it is not a text."""
    return one_line(value[: 4 * _LONGEST_NAME])[:_LONGEST_NAME] if isinstance(value, str) else ""


def number(value: object) -> float:
    """``value`` if it is a finite number that is not negative, else 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value < 1e15 and math.isfinite(value) else 0.0


def whole(value: object) -> int:
    """``value`` as a whole number if it is finite and not negative, else 0."""
    return int(number(value))


def moment(value: object) -> float | None:
    """Seconds since the epoch of a number or an ISO 8601 text; None if it is neither, or an impossible time."""
    seconds: float | None = None
    if isinstance(value, str) and len(value) < 64:
        try:
            parsed = datetime.fromisoformat(value.strip().replace(" UTC", "+00:00"))
            seconds = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if -1e18 < value < 1e18 else None
        # Some programs count in milliseconds.
        if seconds is not None and seconds > 1e11:
            seconds /= 1000
    return seconds if seconds is not None and 0 < seconds < _LATEST else None


def picture(entry: Mapping[str, Any]) -> AttachedPicture | None:
    """The picture with its file in base64 as ``data``, its ``width`` and ``height``; None if it is none.

    It is decoded before a model sees it, and only then.
    """
    encoded, width, height = entry.get("data"), whole(entry.get("width")), whole(entry.get("height"))
    if not isinstance(encoded, str) or len(encoded) > 2 * LARGEST_PICTURE or not 0 < width * height <= MOST_PIXELS:
        return None
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        return None
    return AttachedPicture(data, width, height) if is_picture(data) and len(data) <= LARGEST_PICTURE else None


def file_mark(kind: object) -> str:
    """The mark in a message for a picture or file that is not in the export: ``[photo.png]``."""
    return f"[{name(kind) or 'file'}]"


def digest(created: object, messages: Sequence[ImportedMessage]) -> str:
    """An identifier, made from its contents, for a conversation without an id."""
    said = [created if isinstance(created, float) else 0, *(message.content for message in messages)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


# --- trees ----------------------------------------------------------------------------------------------------------


@dataclass
class ImportedNode:
    """A node of a tree in a file. ``message`` None: it is left out, and what follows it follows its parent.

    ``thoughts`` of a node that is left out belong to the next answer.
    """

    parent: str | None
    message: ImportedMessage | None
    thoughts: Thoughts = NO_THOUGHTS


def tree(nodes: Mapping[str, ImportedNode], current: str | None) -> tuple[list[ImportedMessage], int | None]:
    """The messages of ``nodes``, each after its parent and otherwise by time, and the place of the one at ``current``.

    A parent that is missing, or that would close a circle, is taken for none.
    """
    children: dict[str | None, list[str]] = {}
    order = {key: place for place, key in enumerate(nodes)}
    for key, node in nodes.items():
        children.setdefault(node.parent if node.parent in nodes and node.parent != key else None, []).append(key)
    messages: list[ImportedMessage] = []
    places: dict[str, int | None] = {}
    above_of: dict[str, str | None] = {}
    ready: list[tuple[float, int, str, str | None]] = []

    def push(key: str, above: str | None, earliest: float) -> None:
        message = nodes[key].message
        time = message.created if message is not None and message.created is not None else earliest
        heapq.heappush(ready, (max(time, earliest), order[key], key, above))

    left = iter(nodes)
    for key in children.get(None, ()):
        push(key, None, 0.0)
    while len(places) < len(nodes):
        if not ready:
            # What is left is in circles: each is opened at the node that comes first in the file.
            push(next(key for key in left if key not in places), None, 0.0)
        time, _, key, above = heapq.heappop(ready)
        if key in places:
            continue
        node = nodes[key]
        place = None if above is None else places[above]
        if node.message is None:
            above_of[key] = above
        else:
            node.message.parent = place
            if node.message.role == "assistant":
                node.message.thoughts = _joined([*_left_out(nodes, above_of, above), node.message.thoughts])
            messages.append(node.message)
            place = len(messages) - 1
        places[key] = place
        for child in children.get(key, ()):
            if child not in places:
                push(child, key, time)
    return messages, places.get(current) if current is not None else None


def _left_out(nodes: Mapping[str, ImportedNode], above_of: dict[str, str | None], key: str | None) -> list[Thoughts]:
    """The thoughts of the nodes that were left out up to ``key``. They are removed from ``above_of``, so that they go
    to one answer only, however many follow."""
    found = []
    while key is not None and key in above_of:
        found.append(nodes[key].thoughts)
        key = above_of.pop(key)
    return found[::-1]


def _joined(parts: Sequence[Thoughts]) -> Thoughts:
    """All thoughts as one."""
    return Thoughts(
        "\n\n".join(part.text for part in parts if part.text),
        sum(part.tokens for part in parts),
        sum(part.seconds for part in parts),
    )


def chain(messages: Sequence[ImportedMessage]) -> list[ImportedMessage]:
    """``messages`` one after the other, without branches."""
    for place, message in enumerate(messages):
        message.parent = place - 1 if place else None
    return list(messages)
