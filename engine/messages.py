"""The contract between the screen and the engine process: requests, events, and their framing.

Every message is one frame on a pipe: a 4-byte big-endian length, then msgpack (:func:`pack`, :class:`FrameReader`).
Nothing is unpickled, a frame has a size cap, and both directions are tagged unions that msgspec validates.
Times are in milliseconds unless a name says otherwise; memory is in bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

FRAME_LIMIT = 64 * 1024 * 1024
"""Largest frame accepted, in bytes: a long conversation fits many times over, a corrupt length does not."""

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "cancelled"]
RuntimeName = Literal["auto", "native", "torch", "mlx"]
"""``native``: the trunk of the commonest decoder shape in our own CPU kernels; ``torch``: transformers' trunk."""
DtypeName = Literal["auto", "bfloat16", "float32"]
Partitioning = Literal["auto", "cpu", "hybrid", "ring"]
ExpertPolicy = Literal["balanced", "twiddler", "monde", "layers", "lru-offload", "stream"]
"""How GPU and CPU share the experts: ours, the papers', and the papers' baselines (see engine.planning.policy)."""
BenchKind = Literal["decode", "prefill", "beams", "experts"]
ErrorKind = Literal["bad-input", "model", "memory", "disk", "network", "context", "internal"]


class ProtocolError(Exception):
    """A frame was too large, truncated, or not a known message.

    ``before`` holds the messages that arrived whole in the same piece of the stream, before that frame.
    """

    def __init__(self, text: str, before: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.before = tuple(before)


# --- shared parts -------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, as a chat template takes it."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. ``None`` means: what the model's own generation settings say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


class LayerTimes(msgspec.Struct, frozen=True):
    """Where one layer's time went, in milliseconds."""

    attention: float = 0.0
    router: float = 0.0
    experts: float = 0.0
    exchange: float = 0.0
    wait: float = 0.0
    other: float = 0.0


class PhaseTimes(msgspec.Struct, frozen=True):
    """Times of one phase (prefill or decode), per token of that phase, in milliseconds.

    ``layers`` is one entry per decoder layer; ``outside_layers`` is embedding, head, sampling and the rest of a step;
    ``per_token`` is the whole. ``steps`` forward passes over ``tokens`` tokens were measured.
    """

    layers: list[LayerTimes] = []
    outside_layers: float = 0.0
    per_token: float = 0.0
    steps: int = 0
    tokens: int = 0


class Beam(msgspec.Struct, frozen=True):
    """One candidate of a beam search. ``score`` is sum of log-probabilities / length**length_penalty."""

    text: str
    token_ids: list[int]
    score: float
    finished: bool = False


class ExpertMovement(msgspec.Struct, frozen=True, kw_only=True):
    """What sharing experts between GPU and CPU cost and gained, summed over the turn so far. Seconds are wall-clock.

    ``hits`` and ``misses`` count active experts (layer, expert with at least one token) that were, or were not, in GPU
    memory; ``moved`` of the misses had their weights copied there, the others ran on the CPU.
    """

    tokens: int = 0
    """Token positions run, prefill and decode."""
    weight_bytes: int = 0
    """Bytes of weights copied to the GPU."""
    activation_bytes: int = 0
    """Bytes of activations and results copied between GPU and CPU."""
    hits: int = 0
    misses: int = 0
    moved: int = 0
    learned: int = 0
    """Experts copied while the link was idle, to be there the next time; in ``weight_bytes``, not in the seconds."""
    cpu_s: float = 0.0
    """The CPU ran experts."""
    gpu_s: float = 0.0
    """The GPU copied weights or ran experts."""
    both_s: float = 0.0
    """Both at once."""
    total_s: float = 0.0
    """All MoE layers, from routes to weighted sum."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a loaded model."""

    name: str
    family: str
    runtime: Literal["native", "torch", "mlx"]
    executor: str
    """How experts run, e.g. ``local (torch, cpu)``; for a dense model ``none (dense)``."""
    device: str
    dtype: str
    layers: int
    experts: int
    """Routed experts per MoE layer; 0 for a dense model."""
    experts_per_token: int
    moe_layers: list[int]
    vocabulary: int
    hidden: int
    context_limit: int
    trunk_bytes: int
    expert_bytes: int
    key_value_bytes_per_token: int
    parameters: int
    load_s: float = 0.0
    trunk: str = ""
    """What runs the trunk, e.g. ``native (avx512_bf16, 2 threads)`` or ``transformers (torch, cpu)``."""
    policy: ExpertPolicy | None = None
    """How GPU and CPU share the experts; None where they do not."""
    gpu_expert_bytes: int = 0
    """GPU memory that holds experts."""
    notices: list[str] = []
    """Each fallback in one line (no silent fallback)."""
    has_chat_template: bool = True
    has_tokenizer: bool = True
    """False: the model takes and gives token ids only, and answers have no text."""


class DoctorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``python -m engine.doctor_facts`` tells of the native kernels, and of what a model would run on."""

    built: bool
    """There is a library of native kernels."""
    instruction_sets: list[str]
    """Those of it that this processor has, best first."""
    threads: int
    kernels: str = "none"
    """The set that runs."""
    kernels_reason: str = ""
    kernels_problem: str = ""
    """Why none can be chosen; then nothing runs until that is mended."""
    runtime: RuntimeName = "auto"
    """What would run the model's trunk; ``auto``: not known, because of ``model_problem``."""
    runtime_reason: str = ""
    calibrated: bool | None = None
    """None: the model has no experts, or cannot be opened."""
    calibration: str = ""
    """What it was measured with, or why there is none."""
    model_problem: str = ""


# --- requests: app -> engine --------------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all requests. ``id`` is chosen by the app; every event answering it carries the same id."""

    id: int


class Load(Request, frozen=True, kw_only=True, tag="load"):
    """Make ``model`` the loaded model. Events: Progress*, then Loaded or Failed."""

    model: str
    """Catalogue name, Hugging Face repo id, local folder or GGUF file."""
    runtime: RuntimeName = "auto"
    dtype: DtypeName = "auto"
    partitioning: Partitioning = "auto"
    cpu_threads: int | None = None
    context_limit: int | None = None
    policy: ExpertPolicy = "balanced"
    gpu_expert_bytes: int | None = None
    """GPU memory for experts; None: what trunk, keys and values and workspace leave free."""
    prefill_chunk: int = 512
    """Tokens per prefill chunk: cancellation and progress happen between chunks."""


class Resize(Request, frozen=True, kw_only=True, tag="resize"):
    """Give the loaded model's experts other GPU memory; nothing is loaded again, the conversation stays. An answer that
    runs is finished first. Events: Loaded, with the facts as they are now, or Failed."""

    gpu_expert_bytes: int | None = None
    """As in :class:`Load`."""


class Plan(Request, frozen=True, kw_only=True, tag="plan"):
    """What would loading with the choices of ``load`` need and give? Nothing is loaded. Events: Planned or Failed."""

    load: Load


class Bench(Request, frozen=True, kw_only=True, tag="bench"):
    """Measure ``kind`` on the model that ``load`` names (it becomes the loaded model). Events: Progress*, then
    BenchResult or Failed. ``decode``: one row; ``prefill``: prompts of several lengths; ``beams``: 1, 4, 8, 12 rows;
    ``experts``: the calibration (Twiddler paper, figure 7), which is kept for later decisions."""

    kind: BenchKind
    load: Load
    rounds: int = 5


class Generate(Request, frozen=True, kw_only=True, tag="generate"):
    """Answer. Exactly one of ``messages`` and ``prompt_ids``. Events: Prefill*, (Piece | BeamProgress)*, Timing*, then
    Finished or Failed."""

    messages: list[Message] | None = None
    prompt_ids: list[int] | None = None
    continue_last: bool = False
    """The last message is an assistant's beginning of the answer, to be continued rather than closed."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: list[str] = []
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    with_timing: bool = False
    """Measure from the first token on, whether or not somebody watches."""


class Cancel(Request, frozen=True, kw_only=True, tag="cancel"):
    """Stop the request ``target``: it ends with Finished(finish_reason="cancelled") and what there is."""

    target: int


class Watch(Request, frozen=True, kw_only=True, tag="watch"):
    """Somebody opened (or closed) the timing panel: measure and send Timing frames, at most four a second."""

    timing: bool


class EstimateBeams(Request, frozen=True, kw_only=True, tag="estimate_beams"):
    """What would ``widths`` cost at ``context_tokens``? Event: BeamEstimates or Failed. Needs a loaded model."""

    widths: list[int]
    context_tokens: int


class Pull(Request, frozen=True, kw_only=True, tag="pull"):
    """Download (or build, for the starter) a model. Events: Progress*, then Done or Failed."""

    model: str


class Prepare(Request, frozen=True, kw_only=True, tag="prepare"):
    """Write the bank of a model. Events: Progress*, then Done or Failed."""

    model: str


class Shutdown(Request, frozen=True, kw_only=True, tag="shutdown"):
    """End the process. No event."""


AnyRequest = Load | Resize | Plan | Bench | Generate | Cancel | Watch | EstimateBeams | Pull | Prepare | Shutdown


# --- events: engine -> app ----------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events. ``id`` 0 belongs to no request."""

    id: int = 0


class Hello(Event, frozen=True, kw_only=True, tag="hello"):
    """First event of a process."""

    protocol: int
    pid: int


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """Something long goes on: ``stage`` in a few words, ``done`` of ``total`` in ``unit`` (total 0: unknown)."""

    stage: str
    done: int = 0
    total: int = 0
    unit: Literal["bytes", "tensors", "layers", ""] = ""


class Loaded(Event, frozen=True, kw_only=True, tag="loaded"):
    facts: ModelFacts


class Prefill(Event, frozen=True, kw_only=True, tag="prefill"):
    """``done`` of ``total`` prompt tokens are in the cache, ``reused`` of them were there before."""

    done: int
    total: int
    reused: int = 0


class Piece(Event, frozen=True, kw_only=True, tag="piece"):
    """A piece of the answer's text, whole characters only; ``tokens`` is how many the answer has so far."""

    text: str
    tokens: int
    tokens_per_s: float = 0.0


class BeamProgress(Event, frozen=True, kw_only=True, tag="beam_progress"):
    """The candidates as they stand, best first."""

    step: int
    beams: list[Beam]
    tokens_per_s: float = 0.0


class Timing(Event, frozen=True, kw_only=True, tag="timing"):
    """The measured times so far in this turn, and how often each expert was used: [moe layer][expert]."""

    prefill: PhaseTimes
    decode: PhaseTimes
    moe_layers: list[int] = []
    expert_use: list[list[int]] = []
    movement: ExpertMovement | None = None
    """None where experts are not shared between GPU and CPU."""
    resident: list[list[int]] = []
    """Per MoE layer, the experts that are in GPU memory now; empty where none are kept there."""


class Finished(Event, frozen=True, kw_only=True, tag="finished"):
    """The answer is complete. ``text`` is all of it (for beams: of the best candidate)."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    prefilled_tokens: int
    """Prompt tokens actually run; the others were in the cache."""
    completion_tokens: int
    ttft_s: float
    tokens_per_s: float
    beams: list[Beam] = []
    timing: Timing | None = None


class BeamEstimate(msgspec.Struct, frozen=True):
    """``relative_step_time`` is the predicted time of one step, with one beam as 1.0."""

    width: int
    memory_bytes: int
    fits: bool
    relative_step_time: float


class BeamEstimates(Event, frozen=True, kw_only=True, tag="beam_estimates"):
    estimates: list[BeamEstimate]
    available_bytes: int


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one device's memory would hold, in bytes. ``total`` 0: unknown."""

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


class Planned(Event, frozen=True, kw_only=True, tag="planned"):
    """The plan for a model. ``tokens_per_s`` and ``prefill_tokens_per_s`` are predictions, None if there is no basis
    for one; ``basis`` says what they rest on. ``shortfall`` is how many bytes of memory are missing, 0 if it fits."""

    model: str
    family: str
    fits: bool
    shortfall: int = 0
    memory: list[DeviceMemory]
    choices: list[PlannedChoice]
    tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    basis: str = ""


class BenchResult(Event, frozen=True, kw_only=True, tag="bench_result"):
    """One table. Cells are text, numbers or None; ``data`` is the same and more, for ``--json``."""

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
    """The request failed: one sentence saying what is wrong, with the value, and what to do."""

    error: str
    kind: ErrorKind = "internal"


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    """One line the person should see (a fallback taken, a file put aside)."""

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
    | Planned
    | BenchResult
    | Done
    | Failed
    | Notice
)

TERMINAL_EVENTS = (Loaded, Finished, BeamEstimates, Planned, BenchResult, Done, Failed)
"""The events after which nothing more comes for a request."""


# --- framing ------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct(">I")


def pack(message: Request | Event) -> bytes:
    """One frame: 4-byte big-endian length and msgpack.

    Raises ProtocolError if the message is larger than FRAME_LIMIT.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT:
        raise ProtocolError(f"message of {len(body)} bytes is over the limit of {FRAME_LIMIT}")
    return _LENGTH.pack(len(body)) + body


T = TypeVar("T")


class FrameReader(Generic[T]):
    """Cuts a byte stream into messages; feed it whatever arrives, in pieces of any size.

    Use :func:`request_reader` in the engine and :func:`event_reader` in the app.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages completed by ``data``. Raises ProtocolError on an oversized or unknown frame."""
        self._buffer += data
        messages: list[T] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_LIMIT:
                raise ProtocolError(f"frame of {length} bytes is over the limit of {FRAME_LIMIT}", messages)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                messages.append(self._decoder.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ProtocolError(f"not a message of protocol {PROTOCOL_VERSION}: {error}", messages) from error
        return messages


def request_reader() -> FrameReader[AnyRequest]:
    return FrameReader(msgspec.msgpack.Decoder(AnyRequest))


def event_reader() -> FrameReader[AnyEvent]:
    return FrameReader(msgspec.msgpack.Decoder(AnyEvent))
