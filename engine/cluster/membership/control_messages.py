"""What nodes say to each other over the control plane: msgpack bodies of gRPC calls, typed and with size caps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.ipc.messages.parts import DtypeName, RuntimeName
from engine.ipc.messages.ring import ExchangeName, LinkFacts
from engine.moe.rank_context import Loading, Mode
from engine.planning.calibration import Curve, ExpertShape
from engine.planning.placement import Placement

CONTROL_PROTOCOL = 1
"""Raised when nodes that differ in it could not understand each other."""

SERVICE = "privatellm.Control"
MESSAGE_LIMIT = 4 * 1024 * 1024
"""Bytes of one message: an epoch's placement, or a chunk of weights of 1 MiB, fit several times over."""
PIECE_BYTES = 1024 * 1024
"""What is larger than a message may be travels in pieces of this size."""
CallKind = Literal["one", "down", "up"]
"""``one`` question and one answer; many answers ``down``; many messages ``up`` and one answer."""
MOST_NODES = 64
MOST_ADDRESSES = 64
MOST_TEXT = 4096
MOST_NOTICES = 64
_LARGEST = 1 << 60
_EPOCH = re.compile(r"[0-9A-Za-z_-]{1,64}")

Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
"""Of another machine: never longer, whoever it is."""


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of all bodies."""


class Empty(Control, frozen=True, kw_only=True):
    """Nothing more to say."""


class Greeting(Control, frozen=True, kw_only=True):
    """Both sides of ``Hello``. ``instance`` differs between machines: two instances of one ``node_id`` mean a copied
    identity; ``process`` differs between processes. ``listening``: ``HOST:PORT`` of the control port on every
    interface; ``port`` is the one at the address that the greeting comes from."""

    protocol: int
    version: Text
    node_id: Text
    instance: Text
    process: Text
    name: Text
    port: int
    listening: Annotated[list[Text], msgspec.Meta(max_length=MOST_ADDRESSES)] = []
    lends: bool = False


class NodeLoad(Control, frozen=True, kw_only=True):
    """Both sides of ``Beat``: what a node says of itself twice a second. Memory in bytes."""

    process: Text
    memory_total: int
    memory_free: int
    runtime: Text = ""
    lends: bool = False
    head: Text = ""
    """Node id of the head it is lent to; empty: free."""
    epoch: Text = ""
    stage: Text = ""
    broken: Annotated[list[Text], msgspec.Meta(max_length=MOST_NODES)] = []
    """Node ids to which its links of the last epoch broke."""


class WantedFacts(Control, frozen=True, kw_only=True):
    """``Facts``: measure what a model's experts cost. ``shape`` None: a dense model, or nothing to be measured.
    ``weights``: fingerprint of the model's weights, to say what of them is there already."""

    shape: ExpertShape | None
    weights: str = ""
    family: str = ""
    dtype: DtypeName = "auto"
    runtime: RuntimeName = "auto"
    threads: int | None = None
    """None: as many as the node has cores."""


class NodeFacts(Control, frozen=True, kw_only=True):
    """A node as measured by itself. Bytes, bytes per second, seconds."""

    memory_total: int
    memory_free: int
    memory_lent: int | None = None
    """Its person lends so much of it; None: what is free."""
    memory_read: float
    disk_free: int
    disk: Text = ""
    """The same for all processes whose models are on this disk."""
    expert: Curve | None
    """Seconds of one expert over tokens; None if ``shape`` was."""
    instruction_set: str
    runtimes: list[str]
    """Those that are installed and run here, best first."""
    libraries: dict[Text, Text] = {}
    """By runtime, the version of the library that computes for it; none for what privatellm brings itself."""
    exchanges: list[str] = []
    """Those that it can run."""
    has: dict[int, list[int]] = {}
    """Layer to the experts of the model that are on its disk already."""
    has_trunk: bool = False
    processor: str
    system: str
    threads: int
    layer_overhead_s: dict[str, float] = {}
    fence_s: float = 0.0
    """What a ring costs it per MoE layer beside experts and wire."""
    central_s: float = 0.0
    """The same in central mode, the head's part and a follower's together."""
    machine: str = ""
    """The same for all processes of one machine."""
    unified_memory: bool = False
    """CPU and GPU share it, so that a reserve must be left to the system."""


class Linked(Control, frozen=True, kw_only=True):
    """``MeasureLinks``: measure the links to ``node_id`` at ``addresses`` (of its door). Without addresses: believe
    ``certificate`` from now on, as that machine will measure its link to this one. The head vouches for it, while it
    forms a ring."""

    epoch: str
    node_id: str
    certificate: bytes
    addresses: list[str] = []


class LinkMeasured(Control, frozen=True, kw_only=True):
    link: LinkFacts | None


class TryLinks(Control, frozen=True, kw_only=True):
    """``TryLinks``: try all these links at once, and believe all these certificates from now on, as the other ends try
    theirs. What comes without addresses is not tried from here."""

    links: Annotated[list[Linked], msgspec.Meta(max_length=MOST_NODES)]


class LinksTried(Control, frozen=True, kw_only=True):
    """By node id: the address at which its door was ``reached``, or why the link ``failed``."""

    reached: dict[Text, Text] = {}
    failed: dict[Text, Text] = {}


class Piece(Control, frozen=True, kw_only=True):
    """``Offer`` and ``Receive`` are streams of these: the encoded offer cut into pieces; chunks of weights, each as
    :mod:`engine.cluster.weights.transfer` encodes it."""

    data: bytes


class Wants(Control, frozen=True, kw_only=True):
    """``Offer``'s answer: what is lacking here, as :mod:`engine.cluster.weights.transfer` encodes it, and its bytes."""

    wanted: bytes
    nbytes: int
    has_bytes: int = 0


class Received(Control, frozen=True, kw_only=True):
    """``Receive``'s answer."""

    nbytes: int


class WantedModel(Control, frozen=True, kw_only=True):
    """``ModelHere``, ``ModelOffer``: the model whose folder is called ``key``, and which the caller calls ``name``."""

    key: Text
    name: Text


class ModelHere(Control, frozen=True, kw_only=True):
    """What of it may be copied: the whole, or a ``part`` that the caller once sent as a share."""

    whole: bool = False
    part: bool = False


class OfferPiece(Control, frozen=True, kw_only=True):
    """``ModelOffer``'s stream: how many bytes of the model were read to know its checksums, of how many; then the
    encoded offer in pieces. It ends without any if the model is not here."""

    done: int = 0
    total: int = 0
    data: bytes = b""


class WantedWeights(Control, frozen=True, kw_only=True):
    """``ModelWeights``: of the model that was offered, with these fingerprints, the items ``wanted`` (encoded as
    ``Wants`` has them). The answers are chunks of weights."""

    model: WantedModel
    layout: Text
    weights: Text
    wanted: bytes


class EpochMember(Control, frozen=True, kw_only=True):
    """A node of an epoch as the head tells the others. The head vouches for ``certificate``, for this epoch only: its
    nodes need not be paired with one another. ``addresses``: of the door, the best first."""

    rank: int
    node_id: str
    certificate: bytes
    addresses: list[str] = []


class EpochSpec(Control, frozen=True, kw_only=True):
    """``Connect``: be ``rank`` of a new epoch, and connect to its other nodes."""

    epoch: str
    version: str
    rank: int
    members: list[EpochMember]
    key: bytes
    """Of this epoch's links in plain text."""
    trusted: list[str] = []
    """Networks on which the person at the head allows plain text."""
    placement: Placement
    mode: Mode
    loading: Loading
    weights: list[float]
    cpu_threads: int | None = None
    """None: as many as the node has cores. For measuring, where nodes are processes of one machine."""
    link: LinkFacts | None = None
    """The head's link to this node, as it measured it."""
    one_by_one: bool = False
    """Central mode, for measuring: experts are called one after the other, the paper's naive version."""
    exchanges: list[ExchangeName]
    """Those to be connected, in order; all are measured, and one is kept."""
    model: str
    """Name of the model, for the screen."""
    runtime: RuntimeName
    dtype: DtypeName = "auto"
    context_limit: int | None = None
    prefill_chunk: int = 512
    width: int = 0
    """Numbers of a hidden state; with ``experts_per_token``: layers of this size are rehearsed. 0: none are."""
    experts_per_token: int = 0
    whole: bool = False
    """This node runs the whole model by itself and sends the head the logits; nothing is exchanged."""


class Connected(Control, frozen=True, kw_only=True):
    """``medians``: seconds of an exchange, by its name; one that could not be connected is absent and in
    ``problems``."""

    medians: dict[str, float]
    problems: dict[str, str] = {}


class LoadShare(Control, frozen=True, kw_only=True):
    """``Form``: keep ``exchange``, load your share and answer as ``Forming`` until ``ready``."""

    epoch: str
    exchange: ExchangeName


class Forming(Control, frozen=True, kw_only=True):
    """``Form``'s stream: where the node is; with ``ready`` the last one."""

    stage: Text
    done: int = 0
    total: int = 0
    unit: Text = ""
    ready: bool = False
    executor: Text = ""
    can_truncate: bool = True
    """Rows of tokens can be cut: the head, which has none of its own, asks for it."""
    notices: Annotated[list[Text], msgspec.Meta(max_length=MOST_NOTICES)] = []


class StopPass(Control, frozen=True, kw_only=True):
    """``StopPass``: the head, whose whole model runs here, gives up pass ``number`` of ``epoch``, counted from one."""

    epoch: str
    number: int


class EndEpoch(Control, frozen=True, kw_only=True):
    """``End``: unload and close the links of ``epoch``. Not an error if it is over already."""

    epoch: str


LENDING: dict[str, tuple[type[Control], CallKind]] = {
    "Facts": (WantedFacts, "one"),
    "MeasureLinks": (Linked, "one"),
    "TryLinks": (TryLinks, "one"),
    "Offer": (Piece, "up"),
    "Receive": (Piece, "up"),
    "Connect": (EpochSpec, "one"),
    "Form": (LoadShare, "down"),
    "StopPass": (StopPass, "one"),
    "End": (EndEpoch, "one"),
    "ModelHere": (WantedModel, "one"),
    "ModelOffer": (WantedModel, "down"),
    "ModelWeights": (WantedWeights, "down"),
}
"""What only a lent machine does: method, request, and how it is called (see :class:`Method` of the server)."""

Body = TypeVar("Body", bound=Control)
_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def pack(body: Control) -> bytes:
    """Raises RingProtocolError if it is larger than a message may be."""
    data = _encode(body)
    if len(data) > MESSAGE_LIMIT:
        raise RingProtocolError(f"A message of {len(data)} bytes is over the limit of {MESSAGE_LIMIT}.")
    return data


def unpack(data: bytes, kind: type[Body]) -> Body:
    """Raises RingProtocolError if ``data`` is no ``kind``, or holds more than one may."""
    if len(data) > MESSAGE_LIMIT:
        raise RingProtocolError(f"A message of {len(data)} bytes is over the limit of {MESSAGE_LIMIT}.")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        body: Body = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RingProtocolError(f"No {kind.__name__} of this version: {str(error)[:200]}.") from error
    return body


def check_spec(spec: EpochSpec) -> None:
    """Raises RingProtocolError for an epoch whose parts do not fit together."""
    ranks = [member.rank for member in spec.members]
    nodes = spec.placement.nodes
    if ranks != list(range(nodes)) or not 0 < spec.rank < nodes or nodes > MOST_NODES:
        raise RingProtocolError(f"An epoch of {nodes} nodes with the ranks {ranks} cannot be.")
    if len({member.node_id for member in spec.members}) != nodes:
        raise RingProtocolError("An epoch names a node twice.")
    if len(spec.weights) not in (0, nodes) or len(spec.key) != 32:
        raise RingProtocolError("An epoch's weights or its key have the wrong size.")
    if (
        not _EPOCH.fullmatch(spec.epoch)
        or spec.prefill_chunk < 1
        or not all(0 < weight < 1e9 for weight in spec.weights)
    ):
        raise RingProtocolError("An epoch's name, its weights or its prefill chunk are none.")
    check_placement(spec.placement)
    everything = all(ranks == (1,) for row in spec.placement.holders for ranks in row)
    if spec.whole and (nodes != 2 or spec.exchanges or spec.mode == "central" or not everything):
        raise RingProtocolError("An epoch in which one node runs the whole model gives a part of it to another.")


def check_facts(facts: NodeFacts) -> None:
    """Raises RingProtocolError for figures that no machine has: they would end up in the plan of everybody."""
    sizes = (facts.memory_total, facts.memory_free, facts.disk_free, facts.memory_lent or 0)
    if not all(0 <= size < _LARGEST for size in sizes) or not facts.memory_total or not 0 < facts.threads < 1 << 20:
        raise RingProtocolError(f"A machine says that it has {facts.memory_total} bytes and {facts.threads} threads.")
    curve = facts.expert
    rates = [facts.memory_read, *(curve.seconds if curve is not None else ())]
    if not all(0 < rate < math.inf for rate in rates):
        raise RingProtocolError("A machine says that it reads memory, or runs an expert, at no rate.")
    if not all(
        0 <= seconds < math.inf for seconds in (facts.fence_s, facts.central_s, *facts.layer_overhead_s.values())
    ):
        raise RingProtocolError("A machine says that a layer takes it no number of seconds.")
    if curve is not None:
        ascending = all(a < b for a, b in zip(curve.tokens, curve.tokens[1:], strict=False))
        if not curve.tokens or len(curve.tokens) != len(curve.seconds) or curve.tokens[0] < 0 or not ascending:
            raise RingProtocolError("A machine measured an expert in a way that is no curve.")
    if (
        max(map(len, (facts.processor, facts.system, facts.machine, facts.instruction_set, *facts.runtimes)))
        > MOST_TEXT
    ):
        raise RingProtocolError("A machine describes itself in too many words.")


def check_placement(placement: Placement) -> None:
    """Raises RingProtocolError for holders that no planner makes."""
    if len(placement.layers) != len(placement.holders):
        raise RingProtocolError("A placement has not one row of holders per layer.")
    for row in placement.holders:
        if len(row) != placement.experts or not all(_are_holders(ranks, placement.nodes) for ranks in row):
            raise RingProtocolError("A placement names ranks that are not there, or leaves an expert to nobody.")


def _are_holders(ranks: Sequence[int], nodes: int) -> bool:
    return bool(ranks) and all(0 <= rank < nodes for rank in ranks) and list(ranks) == sorted(set(ranks))
