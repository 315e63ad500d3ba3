"""The state that the chat shows, as plain data, and the updates that the controller emits. No Textual."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Literal

from app.attachments.attachment import CHARACTERS_PER_TOKEN, Attachment, pictures_of
from app.conversations.records import NO_THOUGHTS, UNKNOWN, Generation, MessageRecord, Role, State, Thoughts
from engine.ipc.messages import Beam, MemoryUse, ModelFacts, Prefill, Progress, ReadAgain, Timing, UnderWay, WarmUp

if TYPE_CHECKING:
    from app.chat.thread import Thread

_keys = count(1)


def new_key() -> int:
    """A key that no other entry has."""
    return next(_keys)


TOO_LONG = "context"
"""``finish_reason`` of an answer that never began because the prompt did not fit in the context."""


@dataclass(eq=False)
class Entry:
    """One message on the screen. ``record`` is its row in the store, None while it is not on disk.

    ``note`` is a line for the person about what happened to it, such as why it failed.
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
    thoughts: Thoughts = NO_THOUGHTS
    generation: Generation = UNKNOWN
    attachments: tuple[Attachment, ...] = ()
    created: float = field(default_factory=time.time)
    """When it was written, in seconds since the epoch."""
    dirty: bool = False
    """True if the store does not have the text on the screen."""
    key: int = field(default_factory=new_key)

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
            thoughts=record.thoughts,
            attachments=record.attachments,
            generation=record.generation,
            created=record.created,
        )


@dataclass(frozen=True)
class PromptRead:
    """How a prompt was read: its tokens, how many of them were ``kept`` from before, and why older ones were not."""

    tokens: int
    kept: int
    why: ReadAgain | None = None


@dataclass(frozen=True)
class Guesses:
    """How many of an answer's ``tokens`` were guessed and checked together with others, and how many guesses were
    right."""

    tokens: int
    drafted: int
    accepted: int


class Phase(Enum):
    """The activity of the engine, as the status line shows it."""

    STARTING = "starting the engine"
    FETCHING = "downloading the model"
    LOADING = "loading"
    READY = "ready"
    READING = "reading the prompt"
    THINKING = "thinking"
    ANSWERING = "answering"
    STOPPING = "stopping"
    RESTARTING = "restarting the engine"
    UNAVAILABLE = "no model"


BUSY = frozenset({Phase.READING, Phase.THINKING, Phase.ANSWERING, Phase.STOPPING})


@dataclass
class Status:
    """Contents of the status line."""

    phase: Phase = Phase.STARTING
    model: str = ""
    facts: ModelFacts | None = None
    progress: Progress | None = None
    prefill: Prefill | None = None
    context_used: int | None = None
    draft_tokens: int = 0
    """Tokens of what is typed and attached and not sent yet."""
    draft_counted: bool = False
    """Whether the model's tokenizer has counted them; otherwise they are estimated."""
    tokens_per_s: float = 0.0
    under_way: UnderWay | None = None
    """The answers under way in the engine, if there are others than the shown one."""
    prompt: PromptRead | None = None
    """How the prompt of the last answer was read."""
    guesses: Guesses | None = None
    """What was guessed of the last answer; None if nothing was."""
    elsewhere: bool = False
    """Whether the engine answers a question of another conversation than the one shown."""
    waiting: int = 0
    """Number of questions that are part of their conversations and wait for an answer."""
    queued: int = 0
    """Number of questions that wait to become part of the conversation."""
    unsaved: str = ""
    """Why some messages are not saved; empty if all are."""
    problem: str = ""
    """Reason why there is no model; empty if there is one."""
    beams: int = 1
    warm_up: WarmUp | None = None
    """Progress of bringing the weights into memory; None if it is not going on."""
    away: tuple[str, ...] = ()
    """Names of the machines of the ring that are gone. Another ring is formed with the next question."""
    ttft_s: float | None = None
    """Seconds from the question to the first token of its answer, of the last answer."""
    memory: MemoryUse | None = None
    """The engine's memory after loading or after the last answer."""
    slowest: str = ""
    """The slowest part of a decoding step, in words; empty while nothing is measured."""
    served_at: tuple[str, ...] = ()
    """Addresses at which `privatellm serve` answers other programs now, of whatever model."""
    probe_s: float | None = None
    """Seconds to the first token of the last answer after an idle time."""


# --- updates ------------------------------------------------------------------------------------------------------

Severity = Literal["information", "warning", "error"]


@dataclass(frozen=True)
class PathChanged:
    """Event: another conversation or branch is shown. ``focus``: the entry to bring into view; None: the newest."""

    focus: Entry | None = None


@dataclass(frozen=True)
class EntryAdded:
    entry: Entry


@dataclass(frozen=True)
class EntryChanged:
    """``entry`` changed. ``live``: more of it is coming."""

    entry: Entry
    live: bool = False


@dataclass(frozen=True)
class QueueChanged:
    """Event: the questions waiting in ``thread`` have changed."""

    thread: Thread


@dataclass(frozen=True)
class AnswerEnded:
    """The answer ``entry`` of ``thread`` is complete, was stopped or failed. ``shown``: its conversation is shown."""

    thread: Thread
    entry: Entry
    shown: bool


@dataclass(frozen=True)
class TitleChanged:
    """A conversation has got another title."""


@dataclass(frozen=True)
class QuestionsReturned:
    """The answer before them was stopped or failed: these questions, oldest first, belong in the prompt again.

    ``thread``: the conversation whose prompt it is.
    """

    questions: tuple[NewQuestion, ...]
    thread: Thread


@dataclass(frozen=True)
class StatusChanged:
    pass


@dataclass(frozen=True)
class SettingsChanged:
    """The settings ``keys`` were changed."""

    keys: frozenset[str]


@dataclass(frozen=True)
class FellBack:
    """The wanted model could not be loaded. The settings that worked before are in effect again."""


@dataclass(frozen=True)
class DownloadsChanged:
    """A download of a model began, advanced or ended."""


@dataclass(frozen=True)
class BeamsChanged:
    """The candidates, best first, after ``step`` steps. ``running``: the search has not ended."""

    beams: tuple[Beam, ...]
    step: int
    running: bool
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class TimingArrived:
    timing: Timing


@dataclass(frozen=True)
class NetworkChanged:
    """The machines on the network changed, or it was opened or closed."""


@dataclass(frozen=True)
class UserNotice:
    """One line for the person. ``beside``: it is added to earlier notices instead of replacing them."""

    text: str
    severity: Severity = "information"
    beside: bool = False


Update = (
    PathChanged | EntryAdded | EntryChanged | TitleChanged | AnswerEnded | QueueChanged | QuestionsReturned
    | StatusChanged | SettingsChanged | FellBack | DownloadsChanged | BeamsChanged | TimingArrived | NetworkChanged
    | UserNotice
)  # fmt: skip


USUAL_ANSWER = 500
"""Tokens assumed for the next answer if there is no limit."""


def context_to_come(status: Status, path: Sequence[Entry], max_tokens: int | None) -> int:
    """Estimate of the context, in tokens, at the end of the next answer. The cost of beams depends on it."""
    used = status.context_used
    if used is None:
        used = sum(map(characters, path)) // CHARACTERS_PER_TOKEN
    limit = status.facts.context_limit if status.facts is not None else 0
    wanted = used + (max_tokens or USUAL_ANSWER)
    return min(wanted, limit) if limit else wanted


PICTURE_TOKENS = 1000
"""Tokens assumed for a picture."""


def characters(entry: Entry) -> int:
    """The characters of a message, with those of its files, and as many for a picture as it has tokens."""
    pictures = len(pictures_of(entry.attachments)) * PICTURE_TOKENS * CHARACTERS_PER_TOKEN
    return len(entry.content) + sum(len(attachment.text) for attachment in entry.attachments) + pictures


# --- queued questions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewQuestion:
    """A question that was sent: its text as the person typed it, and the files that were attached then."""

    text: str
    attachments: tuple[Attachment, ...] = ()


class QuestionQueue:
    """The questions that wait, oldest first. ``on_change`` is called after each change."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._items: list[NewQuestion] = []
        self.on_change = on_change

    @property
    def items(self) -> tuple[NewQuestion, ...]:
        return tuple(self._items)

    def add(self, question: NewQuestion) -> None:
        self._items.append(question)
        self.on_change()

    def take(self, index: int = 0) -> NewQuestion | None:
        """Remove a question and return it; None if there is none at ``index``."""
        if not 0 <= index < len(self._items):
            return None
        question = self._items.pop(index)
        self.on_change()
        return question

    def take_all(self) -> tuple[NewQuestion, ...]:
        """Remove all questions and return them."""
        taken = self.items
        if taken:
            self._items.clear()
            self.on_change()
        return taken
