"""Requests: app to engine."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.ipc.messages.parts import BenchKind, DtypeName, ExpertPolicy, Message, Partitioning, RuntimeName, Sampling
from engine.ipc.messages.ring import RingChoice


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of requests. ``id`` is chosen by the app; every event answering it carries the same id.

    A request with options for machines derives from these options instead, and has an ``id`` of its own.
    """

    id: int


class MachineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine runs its part of a model: its own person decides, whoever asks for the model."""

    cpu_threads: int | None = None
    """Threads for computing; None: one per physical core."""
    keep_resident: bool = True
    """Bring the weights into memory in the background, and look after them between questions; on Apple Silicon: keep
    them wired."""
    lock_memory: bool = False
    """Lock them in memory as well, as far as the system allows; where GPU and CPU share one memory they are wired."""

    def machine_options(self) -> dict[str, Any]:
        """These options alone by their names, for another struct that has them."""
        return {name: getattr(self, name) for name in MachineOptions.__struct_fields__}


class LoadOptions(MachineOptions, frozen=True, kw_only=True):
    """Which model is loaded, and how. Settings and flags become it in :mod:`app.settings.schema`."""

    model: str
    """Catalogue name, Hugging Face repo id, local folder or GGUF file."""
    runtime: RuntimeName = "auto"
    dtype: DtypeName = "auto"
    partitioning: Partitioning = "auto"
    context_limit: int | None = None
    policy: ExpertPolicy = "balanced"
    gpu_expert_bytes: int | None = None
    """GPU memory for experts; None: what trunk, keys and values and workspace leave free."""
    prefill_chunk: int = 512
    """Tokens per prefill chunk: cancellation and progress happen between chunks."""
    ring: RingChoice = RingChoice()
    """Counts with partitioning ``ring`` only."""


class Load(LoadOptions, frozen=True, kw_only=True, tag_field="type", tag="load"):
    """Make ``model`` the loaded model. Events: Progress*, then Loaded or Failed."""

    id: int
    """As in :class:`Request`."""


class Resize(Request, frozen=True, kw_only=True, tag="resize"):
    """Give the loaded model's experts other GPU memory; nothing is loaded again, the conversation stays. An answer that
    runs is finished first. Events: Loaded, with the facts as they are now, or Failed."""

    gpu_expert_bytes: int | None = None
    """As in :class:`LoadOptions`."""


class Plan(Request, frozen=True, kw_only=True, tag="plan"):
    """What would loading with the choices of ``load`` need and give? Nothing is loaded. Events: Planned or Failed."""

    load: Load


class Bench(Request, frozen=True, kw_only=True, tag="bench"):
    """Measure ``kind`` on the model that ``load`` names (it becomes the loaded model). Events: Progress*, then
    BenchResult or Failed. ``decode``: one row; ``prefill``: prompts of several lengths; ``beams``: 1, 4, 8, 12 rows;
    ``experts``: the calibration (Twiddler paper, figure 7), which is kept for later decisions; ``exchange``: the
    transports of the exchange between processes on this machine; ``ring``: tables 3 and 4 of the paper of private LLMs
    on Apple Silicon; ``residency``: its algorithms 1 and 2."""

    kind: BenchKind
    load: Load
    rounds: int = 5
    even_if_busy: bool = False
    """Keep what was measured though other programs were at work meanwhile."""
    nodes: list[int] = msgspec.field(default_factory=lambda: [2, 3, 4])
    """``ring``: numbers of processes on this machine, one after the other. Without a model in ``load`` it measures the
    starter, and one made up on the spot."""


class Generate(Request, frozen=True, kw_only=True, tag="generate"):
    """Answer. Exactly one of ``messages`` and ``prompt_ids``. Events: Prefill*, (Piece | BeamProgress)*, Timing*, and
    Progress* wherever a ring is formed again, then Finished or Failed."""

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
    """Copy a model from a paired machine that is lent and has it, if the network is open; else download it (or build
    it, for the starter). Events: Progress*, then Done (``detail``: from which machine) or Failed."""

    model: str


class Prepare(Request, frozen=True, kw_only=True, tag="prepare"):
    """Write the bank of a model. Events: Progress*, then Done or Failed."""

    model: str


class Shutdown(Request, frozen=True, kw_only=True, tag="shutdown"):
    """End the process. No event."""


class LendTerms(MachineOptions, frozen=True, kw_only=True):
    """On which terms a person lends this machine: so it runs its share of a model, whoever the head is."""

    lend_memory: int | None = None
    """Bytes of memory that a share of a model may take; None: what is free."""
    give_models: bool = True
    """Paired machines may copy a model from here that they name, while this one is lent."""


class OpenNetwork(LendTerms, frozen=True, kw_only=True, tag_field="type", tag="open_network"):
    """Announce this machine and look for others; no socket is open before. Events: Done, then a NetworkState (id 0)
    whenever something changed; or Failed."""

    id: int
    """As in :class:`Request`."""
    name: str = ""
    """What paired machines see; empty: the host's name."""
    listen: str = ""
    """``HOST:PORT``; empty: all interfaces, the usual port or the next free one. The link listener is at PORT + 1."""
    peers: list[str] = []
    """``HOST:PORT`` of machines to try where multicast does not reach."""
    lend: bool = False
    """``join``: take part in the rings of paired heads, and show a code to be paired by."""


class CloseNetwork(Request, frozen=True, kw_only=True, tag="close_network"):
    """Leave the ring and close every socket. Event: Done."""


class ShowCode(Request, frozen=True, kw_only=True, tag="show_code"):
    """Make a new one-time code for a machine to be paired with this one. Events: Done, and a NetworkState with it."""


class Pair(Request, frozen=True, kw_only=True, tag="pair"):
    """Pair with the machine that shows ``code``. Events: Done (``detail``: its name), or Failed."""

    peer: str
    """Node id (or the beginning of it) as announced, or HOST:PORT."""
    code: str


class ForgetPeer(Request, frozen=True, kw_only=True, tag="forget_peer"):
    """Trust the machine no longer; a live link is cut. Events: Done or Failed. Needs no open network."""

    peer: str
    """Name, or node id (or the beginning of it)."""


class ListPeers(Request, frozen=True, kw_only=True, tag="list_peers"):
    """Events: a NetworkState with this id: what is paired and, while the network is open, what is there."""


AnyRequest = (
    Load
    | Resize
    | Plan
    | Bench
    | Generate
    | Cancel
    | Watch
    | EstimateBeams
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
