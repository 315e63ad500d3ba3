"""What requests and events are made of."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.ipc.messages.ring import RingFacts

FinishReason = Literal["stop", "length", "cancelled"]
RuntimeName = Literal["auto", "native", "torch", "mlx"]
"""``native``: the trunk of the commonest decoder shape in our own CPU kernels; ``torch``: transformers' trunk."""
DtypeName = Literal["auto", "bfloat16", "float32"]
Partitioning = Literal["auto", "cpu", "hybrid", "ring"]
ExpertPolicy = Literal["balanced", "twiddler", "monde", "layers", "lru-offload", "stream"]
"""How GPU and CPU share the experts: ours, the papers', and the papers' baselines (see engine.planning.policy)."""
BenchKind = Literal["decode", "prefill", "beams", "experts", "exchange", "ring", "residency"]


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
    ring: RingFacts | None = None
    """The ring that runs the model; None on one machine."""
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
    kernels_way_out: str = ""
    """What to do to have native kernels, where none can be used; may be empty."""
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
    memory_total: int = 0
    """Bytes that this process may use: the machine's, or the limit of its container or control group."""
    memory_free: int = 0
    memory_of_machine: int = 0
