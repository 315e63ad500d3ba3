"""Events: engine to app."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.errors import ErrorKind
from engine.ipc.messages.parts import (
    Beam,
    ExpertMovement,
    FinishReason,
    MemoryUse,
    ModelFacts,
    PassShare,
    PhaseTimes,
    ReadAgain,
    Sample,
    Sampling,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
    UnderWay,
)
from engine.ipc.messages.ring import LendingFacts, NodeId, PeerFacts, RingFacts


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events. ``id`` 0 belongs to no request."""

    id: int = 0


class Hello(Event, frozen=True, kw_only=True, tag="hello"):
    """First event of a process."""

    protocol: int
    pid: int


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """A long operation: its ``stage`` in a few words, and ``done`` of ``total`` in ``unit`` (total 0: unknown)."""

    stage: str
    done: int = 0
    total: int = 0
    unit: Literal["bytes", "tensors", "layers", "tokens", ""] = ""


class Loaded(Event, frozen=True, kw_only=True, tag="loaded"):
    facts: ModelFacts
    memory: MemoryUse | None = None


class Prefill(Event, frozen=True, kw_only=True, tag="prefill"):
    """``done`` of ``total`` prompt tokens are in the cache, ``reused`` of them were there before."""

    done: int
    total: int
    reused: int = 0
    under_way: UnderWay | None = None
    """The answers under way, if there are several."""


class Piece(Event, frozen=True, kw_only=True, tag="piece"):
    """A piece of the answer's text, in whole characters. ``tokens`` is the answer's number of tokens so far, thoughts
    included."""

    text: str
    tokens: int
    tokens_per_s: float = 0.0
    reasoning: str = ""
    """A piece of the thoughts before the answer."""
    reasoning_tokens: int = 0
    """Tokens of thoughts so far."""
    reasoning_s: float = 0.0
    """Seconds that the model has thought so far."""
    withdrawn: bool = False
    """Whether the answer text sent so far was in fact thoughts. Only their end was marked. ``reasoning`` repeats them,
    so that the screen can move them."""
    sample: int = 0
    """Index of the answer, if there are several, whose pieces may come by turns."""
    tool_calls: list[ToolCallPiece] = []
    """What was added to the answer's calls of tools."""
    logprobs: list[TokenLogprob] = []
    """Tokens of the answer since the last piece, thoughts included, if log-probabilities were asked for."""
    under_way: UnderWay | None = None
    """The answers under way, if there are several."""


class BeamProgress(Event, frozen=True, kw_only=True, tag="beam_progress"):
    """The current candidates, best first."""

    step: int
    beams: list[Beam]
    tokens_per_s: float = 0.0
    under_way: UnderWay | None = None
    """The answers under way, if there are several."""


class NodeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One node's times in a ring, like the head's in :class:`Timing`.

    ``exchange`` is the time for sending and receiving, ``wait`` the time waiting for the slowest node.
    """

    rank: int
    name: str
    prefill: PhaseTimes
    decode: PhaseTimes


class Timing(Event, frozen=True, kw_only=True, tag="timing"):
    """The measured times so far in this turn, and how often each expert was used: [moe layer][expert]."""

    prefill: PhaseTimes
    decode: PhaseTimes
    moe_layers: list[int] = []
    expert_use: list[list[int]] = []
    movement: ExpertMovement | None = None
    """Movement of experts; None if experts are not shared between GPU and CPU."""
    resident: list[list[int]] = []
    """Experts in GPU memory, per MoE layer; empty if none are kept there."""
    nodes: list[NodeTimes] = []
    """Times of the ring's nodes in rank order, the head first; only the computing node's if one other machine computes
    everything; empty on one machine."""
    sampled: bool = False
    """Whether only some of the steps were measured, at most four per second."""
    rows_per_pass: float = 0.0
    """Mean number of rows in the passes of decoding of the last seconds."""
    shares: list[PassShare] = []
    """Who shares these passes."""


class Finished(Event, frozen=True, kw_only=True, tag="finished"):
    """The answer is complete. ``text`` is all of it (for beams: of the best candidate; of several samples: of the
    first one)."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    prefilled_tokens: int
    """Number of prompt tokens that were run; the others were in the cache."""
    read_again: ReadAgain | None = None
    """Why some of them were run though they are older than the question."""
    completion_tokens: int
    """Tokens of the answer, thoughts included; of all samples together."""
    drafted_tokens: int = 0
    """Tokens that were guessed, and checked in the same pass as the one before them."""
    accepted_tokens: int = 0
    """Number of those that were right: each saved a pass."""
    ttft_s: float
    tokens_per_s: float
    stop_string: str = ""
    """The stop string that ended the answer; empty if none did."""
    tool_calls: list[ToolCall] = []
    """The answer's calls of tools, which are no part of ``text``."""
    logprobs: list[TokenLogprob] = []
    """The answer's tokens, thoughts included, if log-probabilities were asked for."""
    samples: list[Sample] = []
    """All answers, the first included, if several were asked for."""
    beams: list[Beam] = []
    timing: Timing | None = None
    reasoning: str = ""
    """The thoughts before the answer, which are no part of ``text``."""
    reasoning_tokens: int = 0
    reasoning_s: float = 0.0
    probe_s: float | None = None
    """Seconds of the first pass if this was the first answer after more than ten seconds of idling, else None. It shows
    the cost of weights that were unwired or dropped meanwhile."""
    sampling: Sampling | None = None
    """Sampling values of the answer, the model's own defaults included. ``seed`` is set only if one was asked for:
    without one, the drawn numbers cannot be reproduced."""
    memory: MemoryUse | None = None
    """The memory that the engine took at the end of the answer."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the cache and were not run."""
        return self.prompt_tokens - self.prefilled_tokens


class BeamEstimate(msgspec.Struct, frozen=True):
    """``relative_step_time`` is the predicted time of one step, with one beam as 1.0."""

    width: int
    memory_bytes: int
    fits: bool
    relative_step_time: float


class BeamEstimates(Event, frozen=True, kw_only=True, tag="beam_estimates"):
    estimates: list[BeamEstimate]
    available_bytes: int


class TokensCounted(Event, frozen=True, kw_only=True, tag="tokens_counted"):
    """The number of tokens of each text, in their order, and of the question's prompt, if there was one."""

    counts: list[int]


class MachineMeasured(Event, frozen=True, kw_only=True, tag="machine_measured"):
    """Measurements that decide which models this machine can run, and how fast."""

    memory_bytes: int
    """Memory of the machine, as far as this process may use it."""
    memory_read: float
    """Rate at which the processor streams memory, in bytes per second; 0.0 if it could not be measured."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The planned contents of one device's memory, in bytes. ``total`` 0: unknown."""

    device: str
    """``CPU``, or the GPU's name."""
    total: int
    free: int
    trunk: int = 0
    experts: int = 0
    key_values: int = 0
    workspace: int = 0


class PlannedChoice(msgspec.Struct, frozen=True):
    """One line of a plan: ``what`` (runtime, policy, ...) was decided as ``choice`` for ``reason``."""

    what: str
    choice: str
    reason: str


class AnswersSpeed(msgspec.Struct, frozen=True):
    """Predicted tokens per second of so many answers at once, all together."""

    answers: int
    tokens_per_s: float


class Planned(Event, frozen=True, kw_only=True, tag="planned"):
    """The plan for a model.

    ``tokens_per_s`` and ``prefill_tokens_per_s`` are predictions, or None without a basis; ``basis`` describes it.
    ``shortfall`` is the missing memory in bytes, 0 if the model fits.
    """

    model: str
    family: str
    fits: bool
    shortfall: int = 0
    memory: list[DeviceMemory]
    choices: list[PlannedChoice]
    tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    answers: list[AnswersSpeed] = []
    """The speed of several answers; empty without a basis."""
    basis: str = ""
    ring: RingFacts | None = None
    """The ring as planned; None without one."""


class BenchResult(Event, frozen=True, kw_only=True, tag="bench_result"):
    """One table. Cells are text, numbers or None. ``data`` contains the same and more for ``--json``."""

    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]
    notes: list[str] = []
    data: dict[str, Any] = {}


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """A Pull or Prepare is complete; ``path`` is the model's folder."""

    path: str
    detail: str = ""


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """The request failed. The text is one sentence: what is wrong, with the value, and what to do."""

    error: str
    kind: ErrorKind = "internal"


class NetworkState(Event, frozen=True, kw_only=True, tag="network_state"):
    """The machines on the network. Sent after changes, at most four times per second."""

    me: NodeId
    open: bool
    peers: list[PeerFacts] = []
    code: str = ""
    """The one-time code to type on the other machine; empty if none is valid now."""
    code_seconds: int = 0
    code_tries: int = 0
    code_expired: bool = False
    """Whether the last code became too old before anybody used it."""
    lending: LendingFacts | None = None
    problems: list[str] = []
    """Problems that keep machines from being found, each with its remedy."""


class WarmUp(Event, frozen=True, kw_only=True, tag="warm_up"):
    """The weights are being brought into memory in the background: ``done`` of ``total`` bytes.

    Belongs to no request, and pauses during answers. The last event has ``done`` equal to ``total``.
    """

    done: int
    total: int
    memory: MemoryUse | None = None
    """The memory that the engine takes at the end, with the last event."""


class RingChanged(Event, frozen=True, kw_only=True, tag="ring_changed"):
    """The loaded model is now run by another ring, or by this machine alone (``ring`` None), because a machine was lost
    or came back.

    Belongs to no request. It is emitted during an answer, or before the next one.
    """

    ring: RingFacts | None
    executor: str
    """Name of the executor, as in ModelFacts."""


class Sharing(Event, frozen=True, kw_only=True, tag="sharing"):
    """The number of programs that are attached to this engine, whenever it has changed. Belongs to no request."""

    clients: int


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    """One line for the person, such as a fallback that was taken or a file that was put aside."""

    text: str


AnyEvent = (
    Hello
    | Progress
    | Loaded
    | Prefill
    | Piece
    | BeamProgress
    | Timing
    | Finished
    | BeamEstimates
    | TokensCounted
    | MachineMeasured
    | Planned
    | BenchResult
    | Done
    | Failed
    | Notice
    | NetworkState
    | WarmUp
    | RingChanged
    | Sharing
)

TERMINAL_EVENTS = (Loaded, Finished, BeamEstimates, TokensCounted, MachineMeasured, Planned, BenchResult, Done, Failed)
"""Events that end a request. No other event of the request follows."""
