"""What the chat shows, as plain data, and the updates by which the controller says that it changed. No Textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Literal

from app.conversations.store import MessageRecord, Role, State
from app.settings.schema import Settings
from engine.ipc.messages import (
    Beam,
    ModelFacts,
    Prefill,
    Progress,
    Timing,
    WarmUp,
)

_keys = count(1)


TOO_LONG = "context"
"""The ``finish_reason`` of an answer that never began because the prompt did not fit in the context."""


@dataclass(eq=False)
class Entry:
    """One message on the screen. ``record`` is its row in the store, None while it is not on disk.

    ``note`` is one line about what happened to it (stopped, failed), for the person.
    """

    role: Role
    content: str
    state: State = "complete"
    record: int | None = None
    model: str = ""
    tokens: int = 0
    tokens_per_s: float = 0.0
    finish_reason: str = ""
    siblings: int = 1
    sibling_index: int = 0
    note: str = ""
    dirty: bool = False
    """The store does not have what is on the screen."""
    key: int = field(default_factory=lambda: next(_keys))

    @staticmethod
    def of(record: MessageRecord) -> Entry:
        return Entry(
            role=record.role,
            content=record.content,
            state=record.state,
            record=record.id,
            model=record.model,
            tokens=record.tokens,
            tokens_per_s=record.tokens_per_s,
            finish_reason=record.finish_reason,
            siblings=record.siblings,
            sibling_index=record.sibling_index,
        )


class Phase(Enum):
    """What the engine does, as the status line says it."""

    STARTING = "starting the engine"
    FETCHING = "downloading the model"
    LOADING = "loading"
    READY = "ready"
    READING = "reading the prompt"
    ANSWERING = "answering"
    STOPPING = "stopping"
    RESTARTING = "restarting the engine"
    UNAVAILABLE = "no model"


BUSY = frozenset({Phase.READING, Phase.ANSWERING, Phase.STOPPING})


@dataclass
class Status:
    """What the status line shows."""

    phase: Phase = Phase.STARTING
    model: str = ""
    facts: ModelFacts | None = None
    progress: Progress | None = None
    prefill: Prefill | None = None
    context_used: int | None = None
    tokens_per_s: float = 0.0
    waiting: int = 0
    """Questions that wait for an answer."""
    unsaved: str = ""
    """Why the store does not have all that is on the screen; empty: it does."""
    problem: str = ""
    """Why there is no model."""
    beams: int = 1
    warm_up: WarmUp | None = None
    """The weights are being brought into memory; None: they are not, or all are there."""
    away: tuple[str, ...] = ()
    """Machines of the ring that are gone, and no other ring was formed yet: that happens when it is next needed."""
    probe_s: float | None = None
    """Seconds to the first token of the last answer that came after idling."""


# --- updates ------------------------------------------------------------------------------------------------------

Severity = Literal["information", "warning", "error"]


@dataclass(frozen=True)
class PathChanged:
    """Another conversation or branch is shown. ``focus`` is the entry to look at, None: the newest."""

    focus: Entry | None = None


@dataclass(frozen=True)
class EntryAdded:
    entry: Entry


@dataclass(frozen=True)
class EntryChanged:
    """``entry`` changed in any way; ``live`` if more of it is coming."""

    entry: Entry
    live: bool = False


@dataclass(frozen=True)
class StatusChanged:
    pass


@dataclass(frozen=True)
class FellBack:
    """What ``options`` asked for could not be loaded: these, which worked before, are in force again."""

    options: Settings


@dataclass(frozen=True)
class BeamsChanged:
    """``beams``, best first, after ``step`` steps. ``running`` until the search has ended."""

    beams: tuple[Beam, ...]
    step: int
    running: bool
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class TimingArrived:
    timing: Timing


@dataclass(frozen=True)
class NetworkChanged:
    """Who is on the network, or whether it is open, changed."""


@dataclass(frozen=True)
class UserNotice:
    """One line for the person. ``beside``: it stands beside what was said before, not in its place."""

    text: str
    severity: Severity = "information"
    beside: bool = False


Update = (
    PathChanged | EntryAdded | EntryChanged | StatusChanged | FellBack | BeamsChanged | TimingArrived
    | NetworkChanged | UserNotice
)  # fmt: skip


USUAL_ANSWER = 500
"""Tokens of an answer, for saying what it will cost; and what a token comes to in text:"""
CHARACTERS_PER_TOKEN = 4


def context_to_come(status: Status, path: Sequence[Entry], max_tokens: int | None) -> int:
    """About how many tokens the next answer will end at: what beams will cost depends on it."""
    used = status.context_used
    if used is None:
        used = sum(len(entry.content) for entry in path) // CHARACTERS_PER_TOKEN
    limit = status.facts.context_limit if status.facts is not None else 0
    wanted = used + (max_tokens or USUAL_ANSWER)
    return min(wanted, limit) if limit else wanted
