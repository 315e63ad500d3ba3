"""Requests: app to engine."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.ipc.messages.parts import (
    AskingProgram,
    BenchKind,
    Constraint,
    DtypeName,
    ExpertPolicy,
    KeyValuesName,
    Message,
    Partitioning,
    RuntimeName,
    Sampling,
    Tool,
    ToolChoice,
)
from engine.ipc.messages.ring import RingChoice

LENT_GPU_SHARE = 0.5
"""Fraction of a GPU's memory that is lent if its person does not say."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of requests. The app chooses ``id``, and every event of the request carries it.

    A request with options for machines derives from those options instead, and has its own ``id``.
    """

    id: int


def values_of(kind: type[msgspec.Struct], options: object) -> dict[str, Any]:
    """The values of all fields of ``kind`` by name. ``options`` has attributes of these names."""
    return {name: getattr(options, name) for name in kind.__struct_fields__}


class MachineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of how a machine runs its part of a model, chosen by the person at that machine."""

    cpu_threads: int | None = None
    """Number of threads; None: one per physical core."""
    keep_resident: bool = True
    """Whether to bring the weights into memory in the background and keep them there between questions; on Apple
    Silicon, whether to keep them wired."""
    lock_memory: bool = False
    """Whether to lock the weights in memory as well, as far as the system allows. Where GPU and CPU share one memory
    they are wired."""


class ModelOptions(MachineOptions, frozen=True, kw_only=True):
    """The model to load, and the options that all nodes of a ring must share to compute the same."""

    model: str
    """Catalogue name, Hugging Face repo id, local folder or GGUF file."""
    runtime: RuntimeName = "auto"
    dtype: DtypeName = "auto"
    key_values: KeyValuesName = "auto"
    context_limit: int | None = None
    prefill_chunk: int = 512
    """Tokens per prefill chunk. Cancellation and progress happen between chunks."""


class LoadOptions(ModelOptions, frozen=True, kw_only=True):
    """The model to load, and how. :mod:`app.settings.schema` makes it of settings and flags."""

    partitioning: Partitioning = "auto"
    policy: ExpertPolicy = "balanced"
    gpu_expert_bytes: int | None = None
    """Bytes of GPU memory for experts; None: all that trunk, keys and values and workspace leave free."""
    most_memory: int | None = None
    """Bytes of memory whose pages may be locked for copies to a GPU; None: what is free."""
    most_gpu_memory: int | None = None
    """Bytes of GPU memory that all of the model may take; None: what is free."""
    most_gpu_share: float = 1.0
    """Fraction of the GPU's memory that all of the model may take at most."""
    prefix_bytes: int | None = None
    """Bytes of memory for keys and values of all conversations but the current one; None: a part of what is free; 0:
    none are kept."""
    prefix_disk_bytes: int | None = None
    """Bytes of disk for the keys and values of conversations between runs, those of all models together; 0: none are
    kept, and those that were are removed; None: none are kept, and what is there stays."""
    drafts: bool = True
    """Whether tokens are guessed from what was said before, and checked several in a pass, where that is faster and
    changes no token."""
    ring: RingChoice = RingChoice()
    """Options for partitioning ``ring``."""


class Load(LoadOptions, frozen=True, kw_only=True, tag_field="type", tag="load"):
    """Make ``model`` the loaded model. Events: Progress*, then Loaded or Failed.

    If other clients use the loaded model, it stays: the same options are answered with its facts, others with
    Failed (in-use).
    """

    id: int
    """The request's number, as in :class:`Request`."""
    share: bool = False
    """Whether other programs of the same person may attach to this engine."""


class Resize(Request, frozen=True, kw_only=True, tag="resize"):
    """Change the GPU memory of the loaded model's experts. Nothing is loaded again, and the conversation stays.

    A running answer is finished first. Events: Loaded, with the new facts, or Failed.
    """

    gpu_expert_bytes: int | None = None
    """Bytes of GPU memory for experts, as in :class:`LoadOptions`."""


class Plan(Request, frozen=True, kw_only=True, tag="plan"):
    """Plan the loading that ``load`` describes. Nothing is loaded. Events: Planned or Failed."""

    load: Load


class Bench(Request, frozen=True, kw_only=True, tag="bench"):
    """Measure ``kind`` on the model that ``load`` names, which becomes the loaded model.

    ``decode``: one row. ``prefill``: prompts of several lengths. ``beams``: 1, 4, 8 and 12 rows. ``experts``: the
    calibration (Twiddler paper, figure 7), which is stored for later decisions. ``exchange``: the transports between
    processes on this machine. ``ring``: tables 3 and 4 of the paper of private LLMs on Apple Silicon. ``residency``:
    its algorithms 1 and 2. Events: Progress*, then BenchResult or Failed.
    """

    kind: BenchKind
    load: Load
    rounds: int = 5
    even_if_busy: bool = False
    """Whether to store measurements although other programs were busy meanwhile."""
    nodes: list[int] = msgspec.field(default_factory=lambda: [2, 3, 4])
    """``ring``: the numbers of processes on this machine, measured one after the other. Without a model in ``load``,
    the starter and a synthetic model are measured."""


class Generate(Request, frozen=True, kw_only=True, tag="generate"):
    """Answer a question. Exactly one of ``messages``, ``prompt`` and ``prompt_ids`` is given.

    Events: Prefill*, (Piece | BeamProgress)*, Timing*, and Progress* while a ring is formed again, then Finished or
    Failed.
    """

    messages: list[Message] | None = None
    prompt: str | None = None
    """Text that goes on as it stands, without a chat template."""
    prompt_ids: list[int] | None = None
    continue_last: bool = False
    """Whether the last message is the beginning of the assistant's answer, which is continued."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: list[str] = []
    """Strings that end the answer and are no part of it. They mean nothing in thoughts and in calls of tools."""
    samples: int = 1
    """Number of answers, several at the same time; only without beams. With a seed, sample i is drawn with seed + i."""
    temperatures: list[float] = []
    """The temperature of each of several answers; empty: that of ``sampling``."""
    logprobs: int | None = None
    """Number of likeliest tokens to report beside each token, from 0 to MOST_LOGPROBS; None: no log-probabilities. Not
    with beams."""
    constraint: Constraint | None = None
    tools: list[Tool] = []
    """Tools that the model may call. They are rendered by its chat template, so they need ``messages``."""
    tool_choice: ToolChoice = "auto"
    forced_tool: str = ""
    """Name of the only tool that the model may call, and must; empty: as ``tool_choice`` says."""
    parallel_tool_calls: bool = True
    """Whether an answer may call several tools."""
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    thinking: bool | None = None
    """Whether the model thinks before it answers, if its template can be told; None: as the template does by itself."""
    effort: str = ""
    """How long it thinks (``low``, ``medium``, ``high``), if its template can be told; empty: as the template says."""
    program: AskingProgram = ""
    """The kind of program that asks, which the timing panel of others names."""
    client: str = ""
    """Name of the client for which a program asks, if it has several. Each client gets a turn in the queue."""
    quotes: bool = False
    """Whether the answer may tell what the same client asked before, where that explains why it is read again."""
    conversation: str = ""
    """Name under which this conversation's prefix may be kept on disk (:mod:`engine.models.store.prefix_files`); empty:
    it is not kept."""
    with_timing: bool = False
    """Whether to measure from the first token on, even if the timing panel is closed."""


class Cancel(Request, frozen=True, kw_only=True, tag="cancel"):
    """Stop the request ``target``. It ends with Finished(finish_reason="cancelled") and the answer so far."""

    target: int


class Watch(Request, frozen=True, kw_only=True, tag="watch"):
    """The timing panel was opened or closed. While it is open, Timing events are sent, at most four per second."""

    timing: bool


class ForgetPrefixes(Request, frozen=True, kw_only=True, tag="forget_prefixes"):
    """Remove the prefixes of ``conversations`` from disk, by their names in :class:`Generate`, and write no more of
    what was read of them so far. No event."""

    conversations: list[str]


class EstimateBeams(Request, frozen=True, kw_only=True, tag="estimate_beams"):
    """Estimate the cost of beam searches of ``widths`` at ``context_tokens``. Needs a loaded model. Event:
    BeamEstimates or Failed."""

    widths: list[int]
    context_tokens: int


class CountTokens(Request, frozen=True, kw_only=True, tag="count_tokens"):
    """Count the tokens of each of ``texts``, without a chat template, and then of the prompt of a ``question``. Needs a
    loaded model. Event: TokensCounted or Failed."""

    texts: list[str] = []
    question: Generate | None = None


class MeasureMachine(Request, frozen=True, kw_only=True, tag="measure_machine"):
    """Look at this machine's memory and measure how fast it is read, which takes less than a second. Event:
    MachineMeasured or Failed."""


class Pull(Request, frozen=True, kw_only=True, tag="pull"):
    """Copy a model from a lent machine that has it, if the network is open; otherwise download it, or build the
    starter.

    Events: Progress*, then Done (``detail``: from which machine) or Failed.
    """

    model: str


class Prepare(Request, frozen=True, kw_only=True, tag="prepare"):
    """Write the prepared copy of a model. Events: Progress*, then Done or Failed."""

    model: str


class Shutdown(Request, frozen=True, kw_only=True, tag="shutdown"):
    """End the process. No event."""


class LendTerms(MachineOptions, frozen=True, kw_only=True):
    """The terms on which a person lends this machine. They hold for every head."""

    lend_memory: int | None = None
    """Maximum bytes of memory for a shard; None: all that is free."""
    lend_gpu_memory: int | None = None
    """Bytes of GPU memory that a share of a model may take; None: LENT_GPU_SHARE of what the GPU has; 0: none of it."""
    give_models: bool = True
    """Whether paired machines may copy a model that they name, while this machine is lent."""


class OpenNetwork(LendTerms, frozen=True, kw_only=True, tag_field="type", tag="open_network"):
    """Announce this machine and look for others. No socket is open before.

    Events: Done, then a NetworkState (id 0) after each change; or Failed.
    """

    id: int
    """The request's number, as in :class:`Request`."""
    name: str = ""
    """This machine's name for paired machines; empty: the host's name."""
    listen: str = ""
    """``HOST:PORT``; empty: all interfaces, the usual port or the next free one. The link listener is at PORT + 1."""
    peers: list[str] = []
    """``HOST:PORT`` of machines to try, for networks without multicast."""
    lend: bool = False
    """Whether this machine is lent (``join``): it takes part in the rings of paired heads, and shows a pairing code."""


class CloseNetwork(Request, frozen=True, kw_only=True, tag="close_network"):
    """Leave the ring and close every socket. Event: Done."""


class ShowCode(Request, frozen=True, kw_only=True, tag="show_code"):
    """Make a new one-time code for pairing. Events: Done, and a NetworkState with the code."""


class Pair(Request, frozen=True, kw_only=True, tag="pair"):
    """Pair with the machine that shows ``code``. Events: Done (``detail``: its name), or Failed."""

    peer: str
    """Node id (or the beginning of it) as announced, or HOST:PORT."""
    code: str


class ForgetPeer(Request, frozen=True, kw_only=True, tag="forget_peer"):
    """Unpair a machine and cut its links. Needs no open network. Events: Done or Failed."""

    peer: str
    """Name, or node id (or the beginning of it)."""


class ListPeers(Request, frozen=True, kw_only=True, tag="list_peers"):
    """List the paired machines and, while the network is open, the machines on it. Event: a NetworkState with this
    id."""


AnyRequest = (
    Load
    | Resize
    | Plan
    | Bench
    | Generate
    | Cancel
    | Watch
    | ForgetPrefixes
    | EstimateBeams
    | CountTokens
    | MeasureMachine
    | Pull
    | Prepare
    | Shutdown
    | OpenNetwork
    | CloseNetwork
    | ShowCode
    | Pair
    | ForgetPeer
    | ListPeers
)
