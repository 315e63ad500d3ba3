"""The messages of the control plane: msgpack bodies of gRPC calls, typed and with size limits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from engine.cluster.transport.exchange import RingProtocolError
from engine.ipc.messages.parts import DtypeName, RuntimeName
from engine.ipc.messages.requests import ModelOptions
from engine.ipc.messages.ring import ExchangeName, LinkFacts
from engine.moe.expert_parallel import Loading, Mode
from engine.planning.calibration import ExpertShape, check_calibration
from engine.planning.placement import Placement
from engine.planning.ring_nodes import GpuFacts, NodeFacts, Text

CONTROL_PROTOCOL = 4
"""Version of the control protocol. It is increased when nodes of two versions could not understand each other."""

SERVICE = "privatellm.ControlBody"
MESSAGE_LIMIT = 4 * 1024 * 1024
"""Maximum bytes of one message. An epoch's placement, or a chunk of weights of 1 MiB, fits several times over."""
PIECE_BYTES = 1024 * 1024
"""Bytes of one piece of what is larger than a message may be."""
CallKind = Literal["one", "down", "up"]
"""Shape of a call: ``one`` question and one answer, many answers ``down``, or many messages ``up`` and one answer."""
MOST_NODES = 64
MOST_ADDRESSES = 64
MOST_TEXT = 4096
MOST_NOTICES = 64
MOST_STEPS = 1024
MOST_POINTS = 64
"""Maximum points of a curve that another machine measured."""
_LARGEST = 1 << 60
_LONGEST_S = 1e6
"""Maximum seconds that another machine may say that one expert, or a copy of it, takes."""
_EPOCH = re.compile(r"[0-9A-Za-z_-]{1,64}")


class ControlBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of all bodies."""


class EmptyBody(ControlBody, frozen=True, kw_only=True):
    """A body without content."""


class Greeting(ControlBody, frozen=True, kw_only=True):
    """Question and answer of ``Hello``.

    ``instance`` differs between machines: two instances of one ``node_id`` mean a copied identity. ``process`` differs
    between processes. ``listening``: ``HOST:PORT`` of the control port on every interface. ``port``: the control port
    at the address that the greeting comes from.
    """

    protocol: int
    version: Text
    node_id: Text
    instance: Text
    process: Text
    name: Text
    port: int
    listening: Annotated[list[Text], msgspec.Meta(max_length=MOST_ADDRESSES)] = []
    lends: bool = False


class NodeLoad(ControlBody, frozen=True, kw_only=True):
    """Question and answer of ``Beat``, the heartbeat: a node's state, twice a second. Memory in bytes.

    ``number`` counts a process's loads. Of two that cross on their way, the one with the larger number is newer.
    """

    process: Text
    number: int = 0
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


class WantedFacts(ControlBody, frozen=True, kw_only=True):
    """``Facts``: measure the costs of a model's experts.

    ``shape`` None: a dense model, or nothing to measure. ``weights``: fingerprint of the model's weights, by which the
    node looks for parts that it already has.
    """

    shape: ExpertShape | None
    weights: str = ""
    family: str = ""
    dtype: DtypeName = "auto"
    runtime: RuntimeName = "auto"
    threads: int | None = None
    """Number of threads; None: one per core of the node."""


class Linked(ControlBody, frozen=True, kw_only=True):
    """``MeasureLinks``: measure the links to ``node_id`` at the ``addresses`` of its link listener.

    Without addresses: trust ``certificate`` from now on, because that machine will measure its link to this one. The
    head vouches for it while it forms a ring.
    """

    epoch: str
    node_id: str
    certificate: bytes
    addresses: list[str] = []


class MeasuredLink(ControlBody, frozen=True, kw_only=True):
    link: LinkFacts | None


class TryLinks(ControlBody, frozen=True, kw_only=True):
    """``TryLinks``: try all these links at once, and trust their certificates from now on, because the other ends try
    theirs.

    A link without addresses is not tried from here.
    """

    links: Annotated[list[Linked], msgspec.Meta(max_length=MOST_NODES)]


class LinksTried(ControlBody, frozen=True, kw_only=True):
    """Results by node id: the address at which a link listener was ``reached``, or why the link ``failed``."""

    reached: dict[Text, Text] = {}
    failed: dict[Text, Text] = {}


class DataPiece(ControlBody, frozen=True, kw_only=True):
    """One piece of the streams of ``Offer`` and ``Receive``.

    These are the encoded offer cut into pieces, and chunks of weights as :mod:`engine.cluster.weights.transfer` encodes
    them.
    """

    data: bytes


class Wants(ControlBody, frozen=True, kw_only=True):
    """Answer of ``Offer``: what is missing on the node, as :mod:`engine.cluster.weights.transfer` encodes it.

    ``nbytes``: bytes of it. ``has_bytes``: bytes that are there already.
    """

    wanted: bytes
    nbytes: int
    has_bytes: int = 0


class Received(ControlBody, frozen=True, kw_only=True):
    """Answer of ``Receive``."""

    nbytes: int


class WantedModel(ControlBody, frozen=True, kw_only=True):
    """``ModelHere`` and ``ModelOffer``: the model in the folder named ``key``, which the caller calls ``name``."""

    key: Text
    name: Text


class ModelHere(ControlBody, frozen=True, kw_only=True):
    """The parts of the model that may be copied: the whole, or a ``part`` that the caller once sent as a shard."""

    whole: bool = False
    part: bool = False


class OfferPiece(ControlBody, frozen=True, kw_only=True):
    """One piece of the stream of ``ModelOffer``.

    At first ``done`` of ``total`` bytes of the model were read for its checksums; then follows the encoded offer in
    pieces of ``data``. The stream ends without any if the model is not here.
    """

    done: int = 0
    total: int = 0
    data: bytes = b""


class WantedWeights(ControlBody, frozen=True, kw_only=True):
    """``ModelWeights``: the items ``wanted`` of the offered model, which has these fingerprints.

    They are encoded as in ``Wants``. The answers are chunks of weights.
    """

    model: WantedModel
    layout: Text
    weights: Text
    wanted: bytes


class EpochMember(ControlBody, frozen=True, kw_only=True):
    """A node of an epoch, as the head describes it to the others.

    The head vouches for ``certificate`` for this epoch only; its nodes need not be paired with one another.
    ``addresses``: those of the link listener, best first.
    """

    rank: int
    node_id: str
    certificate: bytes
    addresses: list[str] = []


class EpochSpec(ControlBody, frozen=True, kw_only=True):
    """``Connect``: become ``rank`` of a new epoch, and connect to its other nodes."""

    epoch: str
    version: str
    rank: int
    members: list[EpochMember]
    key: bytes
    """Key [32 bytes] of this epoch's links in plain text."""
    trusted: list[str] = []
    """Networks on which the head's person allows plain text."""
    placement: Placement
    mode: Mode
    loading: Loading
    weights: list[float]
    link: LinkFacts | None = None
    """The head's measurement of its link to this node."""
    one_by_one: bool = False
    """Whether central mode calls experts one after the other, the paper's naive version. For measurements."""
    exchanges: list[ExchangeName]
    """The exchanges to connect, in order. All of them are measured, and one is kept."""
    options: ModelOptions
    """Options of the model, which has its name on the screen. ``cpu_threads`` is for measurements whose nodes are
    processes of one machine; a node's own person decides on the other options of its machine."""
    width: int = 0
    """Width of a hidden state. Layers of this size and ``experts_per_token`` are rehearsed; 0: none are."""
    experts_per_token: int = 0
    whole: bool = False
    """Whether this node runs the whole model by itself and sends the logits to the head. Nothing is exchanged."""


class Connected(ControlBody, frozen=True, kw_only=True):
    """Answer of ``Connect``.

    ``medians``: seconds of an exchange by its name. An exchange that could not be connected is in ``problems`` instead.
    """

    medians: dict[str, float]
    problems: dict[str, str] = {}


class LoadShard(ControlBody, frozen=True, kw_only=True):
    """``Form``: keep ``exchange``, load the shard and answer with ``Forming`` until ``ready``."""

    epoch: str
    exchange: ExchangeName


class Forming(ControlBody, frozen=True, kw_only=True):
    """One message of the stream of ``Form``: the node's progress. The last one is ``ready``."""

    stage: Text
    done: int = 0
    total: int = 0
    unit: Text = ""
    ready: bool = False
    executor: Text = ""
    can_truncate: bool = True
    """Whether rows of tokens can be truncated, for a head without a model of its own."""
    steps_together: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """Tokens that rows run again in one pass; see :attr:`engine.runtimes.protocol.TokenRows.steps_together`."""
    rows_together: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 1
    """Rows of one step; see :attr:`engine.runtimes.protocol.LoadedModel.rows_together`."""
    notices: Annotated[list[Text], msgspec.Meta(max_length=MOST_NOTICES)] = []


class StopPass(ControlBody, frozen=True, kw_only=True):
    """``StopPass``: the head, whose whole model runs here, gives up pass ``number`` (from one) of ``epoch``."""

    epoch: str
    number: int


class EndEpoch(ControlBody, frozen=True, kw_only=True):
    """``End``: unload the shard and close the links of ``epoch``. Not an error if the epoch is over already."""

    epoch: str


LENDING: dict[str, tuple[type[ControlBody], CallKind]] = {
    "Facts": (WantedFacts, "one"),
    "MeasureLinks": (Linked, "one"),
    "TryLinks": (TryLinks, "one"),
    "Offer": (DataPiece, "up"),
    "Receive": (DataPiece, "up"),
    "Connect": (EpochSpec, "one"),
    "Form": (LoadShard, "down"),
    "StopPass": (StopPass, "one"),
    "End": (EndEpoch, "one"),
    "ModelHere": (WantedModel, "one"),
    "ModelOffer": (WantedModel, "down"),
    "ModelWeights": (WantedWeights, "down"),
}
"""Request and shape of the call by method, for the methods of a lent machine only."""

Body = TypeVar("Body", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def pack(body: msgspec.Struct) -> bytes:
    """The encoded ``body``. Raises RingProtocolError if it is larger than a message may be."""
    data = _encode(body)
    if len(data) > MESSAGE_LIMIT:
        raise RingProtocolError(f"A message of {len(data)} bytes is over the limit of {MESSAGE_LIMIT}.")
    return data


def unpack(data: bytes, kind: type[Body]) -> Body:
    """The decoded body. Raises RingProtocolError if ``data`` is too large or is not a ``kind``."""
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
        or spec.options.prefill_chunk < 1
        or not all(0 < weight < 1e9 for weight in spec.weights)
    ):
        raise RingProtocolError("An epoch's name, its weights or its prefill chunk are none.")
    check_placement(spec.placement)
    everything = all(ranks == (1,) for row in spec.placement.holders for ranks in row)
    if spec.whole and (nodes != 2 or spec.exchanges or spec.mode == "central" or not everything):
        raise RingProtocolError("An epoch in which one node runs the whole model gives a part of it to another.")


def check_facts(facts: NodeFacts) -> None:
    """Raises RingProtocolError for figures that no machine has. They would otherwise end up in every node's plan."""
    disk = -1 if facts.disk_free is None else facts.disk_free
    sizes = (facts.memory_total, facts.memory_free, disk, facts.memory_lent or 0)
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
    if facts.gpu is not None:
        _check_gpu(facts.gpu)


def _check_gpu(gpu: GpuFacts) -> None:
    sizes = (gpu.memory_total, gpu.memory_free, gpu.memory_lent or 0)
    if not all(0 <= size < _LARGEST for size in sizes) or not 0 < gpu.memory_total >= gpu.memory_free:
        raise RingProtocolError(
            f"A machine says that its GPU has {gpu.memory_free} bytes free of {gpu.memory_total} bytes."
        )
    calibration = gpu.calibration
    if calibration is None:
        return
    try:
        check_calibration(calibration)
    except ValueError as error:
        raise RingProtocolError(f"A machine measured its GPU in a way that cannot be: {error}.") from error
    curves = [curve for curve in (calibration.cpu, calibration.gpu, calibration.activation_copy) if curve is not None]
    times = [calibration.weight_copy, *(seconds for curve in curves for seconds in curve.seconds)]
    if calibration.gpu is None or max(len(curve.tokens) for curve in curves) > MOST_POINTS:
        raise RingProtocolError("A machine measured its GPU in no points, or in too many.")
    if max(times) > _LONGEST_S or max(calibration.cpu_overlapped, calibration.copy_overlapped) > _LONGEST_S:
        raise RingProtocolError("A machine says that its GPU takes longer for an expert than any does.")


def check_placement(placement: Placement) -> None:
    """Raises RingProtocolError for holders that no planner makes."""
    if len(placement.layers) != len(placement.holders):
        raise RingProtocolError("A placement has not one row of holders per layer.")
    for row in placement.holders:
        if len(row) != placement.experts or not all(_are_holders(ranks, placement.nodes) for ranks in row):
            raise RingProtocolError("A placement names ranks that are not there, or leaves an expert to nobody.")


def _are_holders(ranks: Sequence[int], nodes: int) -> bool:
    return bool(ranks) and all(0 <= rank < nodes for rank in ranks) and list(ranks) == sorted(set(ranks))
