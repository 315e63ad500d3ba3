"""Parts of requests and events."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.ipc.messages.ring import RingFacts
from engine.pictures.sight import Sight

RuntimeName = Literal["auto", "native", "torch", "mlx"]
"""``native``: the trunk of the commonest decoder shape in our own CPU kernels; ``torch``: transformers' trunk."""
DtypeName = Literal["auto", "bfloat16", "float32"]
KeyValuesName = Literal["auto", "q8_0", "q4_0"]
"""Storage of keys and values: in the model's computed dtype, or in 8 or 4 bits if the runtime supports it."""
Partitioning = Literal["auto", "cpu", "hybrid", "ring"]
ExpertPolicy = Literal["balanced", "twiddler", "monde", "layers", "lru-offload", "stream", "on-demand"]
"""Policy by which GPU and CPU share the experts: ours, the papers', and the papers' baselines (see
engine.planning.policy)."""
BenchKind = Literal["decode", "prefill", "beams", "experts", "exchange", "ring", "residency"]


LARGEST_PICTURE = 20_000_000
"""Maximum bytes of a picture's file."""
MOST_PICTURE_BYTES = 48_000_000
"""Maximum bytes of all pictures of a question. They are part of one frame (:data:`FRAME_LIMIT`)."""


class PictureFile(msgspec.Struct, frozen=True):
    """A picture in a message: the bytes of a PNG, JPEG, WebP, GIF or BMP file, as it is."""

    data: bytes
    place: int = 0
    """Number of characters of the message's text that come before the picture."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, in the form that chat templates take."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    """The text; for a tool, its result."""
    reasoning: str = ""
    """The thoughts before an assistant's answer, for an answer that is continued or that called tools."""
    tool_calls: list[ToolCall] = []
    """The assistant's calls of tools, after its text."""
    tool_call_id: str = ""
    """For a tool's result: the id of the call that it answers."""
    pictures: list[PictureFile] = []
    """Pictures in a person's message, in the order of their places."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of the next token. None: as the model's own generation settings say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    """Penalty subtracted from the logit of each token that the answer already contains, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Penalty subtracted from a token's logit for each occurrence in the answer, from -2 to 2."""
    logit_bias: dict[int, float] = {}
    """Values added to logits, by token id, from -100 to 100."""


class LayerTimes(msgspec.Struct, frozen=True):
    """One layer's times, in milliseconds."""

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


AskingProgram = Literal["chat", "ask", "serve", ""]
"""The kind of program that asks; empty: another one."""


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """Several answers under way at the same time. The rates are those of the last seconds."""

    answers: int
    own_tokens_per_s: float = 0.0
    """Tokens per second of the answer that is told."""
    tokens_per_s: float = 0.0
    """Tokens per second of all answers together."""


class PassShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part that the answers for one kind of program have in the passes of the last seconds."""

    program: AskingProgram
    answers: int
    rows: float
    """Rows that they have in a pass; 0.0 while their prompts are read."""
    tokens_per_s: float


ReadingCause = Literal["changed", "tokens", "memory", "state", "written", "restarted"]
"""Why a prompt was read again. ``changed``: an earlier message differs; ``tokens``: the same text is split into other
tokens; ``memory``: the conversation was given up for memory; ``state``: the model's state goes back to a checkpoint
only; ``written``: what was written is written again, not read; ``restarted``: the model was loaded again."""


class ReadAgain(msgspec.Struct, frozen=True, kw_only=True):
    """Why a part of a prompt was read again that is older than the question."""

    cause: ReadingCause
    shared_tokens: int = 0
    """Tokens at the beginning of the prompt that are the same in what was kept."""
    message: int | None = None
    """Index of the message with the first difference; None if there is none, or it is not known."""
    role: str = ""
    """Role of that message."""
    before: str = ""
    """Some characters around the first difference, as they were in what was kept; empty unless the same client had
    asked that, and may be told."""
    now: str = ""
    """The characters that are there now."""


class Beam(msgspec.Struct, frozen=True):
    """One candidate of a beam search. ``score`` is sum of log-probabilities / length**length_penalty."""

    text: str
    token_ids: list[int]
    score: float
    finished: bool = False
    reasoning: str = ""
    """The candidate's thoughts, which are no part of ``text``."""


class ReasoningFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a model thinks before it answers."""

    format: str
    """Name of the format in which its thoughts are marked."""
    switch: bool = False
    """Whether its template can be told to think or not."""
    effort: bool = False
    """Whether its template can be told how long to think."""


class ExpertMovement(msgspec.Struct, frozen=True, kw_only=True):
    """Costs and gains of sharing experts between GPU and CPU, summed over the turn so far. Seconds are wall-clock.

    ``hits`` and ``misses``: active experts (layer, expert with at least one token) that were, or were not, in GPU
    memory. ``moved``: misses whose weights were copied there; the others ran on the CPU.
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
    """Number of experts copied ahead while the link was idle. They count in ``weight_bytes``, but not in the
    seconds."""
    cpu_s: float = 0.0
    """Seconds in which the CPU ran experts."""
    gpu_s: float = 0.0
    """Seconds in which the GPU copied weights or ran experts."""
    both_s: float = 0.0
    """Seconds in which both worked."""
    total_s: float = 0.0
    """Seconds of all MoE layers, from routes to weighted sum."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the engine takes, in bytes."""

    own: int
    """Memory of its own: caches, buffers, weights that were converted."""
    mapped: int = 0
    """Pages of mapped files, which the system drops when it needs room; 0 where the system does not tell them apart."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded model."""

    name: str
    family: str
    runtime: Literal["native", "torch", "mlx"]
    executor: str
    """The experts' executor, e.g. ``local (torch, cpu)``; ``none (dense)`` for a dense model."""
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
    state_bytes: int = 0
    """Bytes of a row's states of delta-nets, which do not depend on its length."""
    windowed_bytes_per_token: int = 0
    """Part of ``key_value_bytes_per_token`` in layers that drop tokens outside their ``window``."""
    window: int = 0
    """Width in tokens of the widest of these windows."""
    load_s: float = 0.0
    weights: str = ""
    """Number format of most of the stored weights as people call it: ``Q4_K_M``, ``MXFP4``, ``bf16``; empty if it is
    not known."""
    trunk: str = ""
    """The trunk's implementation, e.g. ``native (avx512_bf16, 2 threads)`` or ``transformers (torch, cpu)``."""
    policy: ExpertPolicy | None = None
    """How GPU and CPU share the experts; None where they do not."""
    gpu_expert_bytes: int = 0
    """Bytes of GPU memory that hold experts."""
    ring: RingFacts | None = None
    """The ring that runs the model; None on one machine."""
    notices: list[str] = []
    """One line for each fallback, as none is silent."""
    has_chat_template: bool = True
    has_tokenizer: bool = True
    """Whether the model has a tokenizer. Without one it takes and gives token ids only."""
    reasoning: ReasoningFacts | None = None
    """How the model thinks; None if it does not mark thoughts."""
    sampling: Sampling | None = None
    """How the model samples if nothing is asked for; None if that is unknown."""
    answer_limit: int | None = None
    """Maximum tokens of an answer if none is asked for; None: as many as fit."""
    sight: Sight | None = None
    """How the model sees pictures; None if it sees none."""
    way_to_see: str = "load a model that sees"
    """What to do so that pictures are seen, as part of a sentence, if the model sees none."""


class DoctorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``python -m engine.doctor_facts``: the native kernels, and how a model would run."""

    built: bool
    """Whether there is a library of native kernels."""
    instruction_sets: list[str]
    """The library's instruction sets that this processor has, best first."""
    threads: int
    kernels: str = "none"
    """The instruction set in use."""
    kernels_reason: str = ""
    kernels_way_out: str = ""
    """The way to get native kernels if none can be used; may be empty."""
    kernels_problem: str = ""
    """The reason why none can be chosen. Nothing runs until it is removed."""
    runtime: RuntimeName = "auto"
    """The runtime that would run the model; ``auto`` if it is unknown because of ``model_problem``."""
    runtime_reason: str = ""
    calibrated: bool | None = None
    """Whether the model's experts were measured; None if it has none or cannot be opened."""
    calibration: str = ""
    """The conditions of that measurement, or why there is none."""
    model_problem: str = ""
    memory_total: int = 0
    """Bytes of memory that this process may use: the machine's, or the limit of its container or control group."""
    memory_free: int = 0
    memory_of_machine: int = 0


# --- what an answer must be and consists of --------------------------------------------------------------------------


FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
"""Why an answer ended. ``stop``: by itself, or at a stop string; ``length``: at its limit, or at the end of the
context; ``tool_calls``: by itself, after it had called tools."""
ToolChoice = Literal["auto", "none", "required"]
"""Whether the model may call tools, may not, or must call at least one."""
MOST_LOGPROBS = 20
"""Maximum likeliest tokens that are reported beside a token of an answer."""
MOST_SAMPLES = 16
"""Maximum answers to one question."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer must have. Thoughts before the answer are free.

    An answer that reaches its limit (finish reason ``length``) is only the beginning of something of that form.
    """

    kind: Literal["json", "schema", "regex", "grammar"]
    """``json``: any JSON object; ``schema``: what a JSON schema describes; ``regex``: what a regular expression
    matches as a whole; ``grammar``: what a context-free grammar in llguidance's form of Lark describes."""
    text: str = ""
    """The schema as JSON text, the regular expression or the grammar; empty for ``json``."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """JSON schema of its arguments as JSON text; empty: it has none."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a tool, made by the model."""

    id: str
    """Name of the call, unique in the conversation. The message with the tool's result repeats it."""
    name: str
    arguments: str
    """The arguments as JSON text."""


class ToolCallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call while it is generated."""

    index: int
    """Place of the call among those of its answer, from 0."""
    id: str = ""
    """Name of the call, in its first piece only."""
    name: str = ""
    """Name of the tool, in the call's first piece only."""
    arguments: str = ""
    """The next part of the arguments' JSON text."""


class LikelyToken(msgspec.Struct, frozen=True):
    """A token and its log-probability. ``data`` are its bytes, which need not be whole characters."""

    token: int
    text: str
    data: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of an answer with its natural log-probability, by the model's own distribution: before temperature,
    filters, penalties and constraints."""

    token: int
    text: str
    data: bytes
    """The token's bytes, which need not be whole characters."""
    logprob: float
    top: list[LikelyToken] = []
    """The likeliest tokens, as many as were asked for, the likeliest first."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One of several answers to a question. The fields are those of :class:`engine.ipc.messages.Finished`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    stop_string: str = ""
