"""What the planner of a ring takes: the machines and links as measured, the model, and the room each has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.planning.calibration import Curve
from engine.planning.hybrid import workspace_bytes
from engine.planning.placement_planner import ExpertGrid
from engine.planning.prediction import ModelSizes
from engine.planning.ring_speed import NodeCosts, costs_of

GIB = 1024**3


@dataclass(frozen=True)
class Reserve:
    """Memory left to the system: the larger of ``least`` bytes and ``share`` of all."""

    least: int
    share: float

    def of(self, total: int) -> int:
        return max(self.least, round(self.share * total))


UNIFIED_RESERVE = Reserve(8 * GIB, 0.25)
"""Memory left free on Apple Silicon, where wired memory cannot be taken back."""
MAPPED_RESERVE = Reserve(GIB // 2, 0.05)
"""Memory left free elsewhere, where the experts are mapped files."""


@dataclass(frozen=True)
class NodeMeasured:
    """One machine as it described and measured itself. Bytes, seconds; None where nothing was measured."""

    node_id: str
    name: str
    memory_total: int
    memory_free: int
    """What can be had without harm, page cache included."""
    kind: str = ""
    """Runtime, instruction set and dtype, e.g. ``native avx512_bf16``: nodes of one kind compute the same bits."""
    unified: bool = False
    """Apple Silicon: memory is wired for the GPU."""
    expert: Curve | None = None
    """Seconds of one expert of this model over its tokens."""
    memory_read: float | None = None
    """Bytes per second."""
    layer_overhead_s: float = 0.0
    fence_s: float = 0.0
    central_s: float = 0.0
    machine: str = ""
    """See :class:`engine.planning.ring_speed.NodeCosts`."""
    processor: str = ""
    """Its name and the threads in use; machines with the same are taken to be equally fast. Empty: unknown."""
    has: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Per decoder layer, the experts of this model that are on its disk."""
    has_trunk: bool = False
    disk_free: int | None = None
    """None: unknown, and no limit."""


@dataclass(frozen=True)
class LinkFigures:
    """The link between two machines, by node id, either way: half a round trip of 12 KiB, and bytes per second."""

    first: str
    second: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class RingModelFacts:
    """``moe_layers``: the decoder layers with routed experts, ascending; they are as many as ``sizes`` says."""

    sizes: ModelSizes
    moe_layers: tuple[int, ...]
    context_tokens: int = 4096
    prefill_chunk: int = 512
    word_bytes: int = 4
    """Of a number of the exchange."""
    vocabulary: int = 0
    """Logits of a token."""

    @property
    def grid(self) -> ExpertGrid:
        sizes = self.sizes
        return ExpertGrid(self.moe_layers, sizes.experts, sizes.experts_per_token, sizes.slab_bytes)


def beside_weights(model: RingModelFacts, central_follower: bool = False) -> tuple[int, int]:
    """Bytes of keys and values, and of workspace, on a node."""
    key_values = 0 if central_follower else model.context_tokens * model.sizes.key_value_bytes_per_token
    return key_values, workspace_bytes(model.sizes, model.prefill_chunk, gpu=False)


def expert_room(model: RingModelFacts, node: NodeMeasured, central_follower: bool = False) -> int:
    """Bytes for experts on ``node``, beside the trunk, keys and values, workspace and reserve; negative: even those do
    not fit. A follower of central mode keeps no trunk and no keys and values."""
    sizes = model.sizes
    reserve = (UNIFIED_RESERVE if node.unified else MAPPED_RESERVE).of(node.memory_total)
    taken = sum(beside_weights(model, central_follower)) + (0 if central_follower else sizes.trunk_bytes)
    return min(node.memory_free, node.memory_total - reserve) - taken


def disk_room(model: RingModelFacts, node: NodeMeasured, central_follower: bool) -> int | None:
    """Bytes of experts that ``node`` can have on its disk, those that are there already included; negative: even what
    it is sent beside them does not fit. None: no limit."""
    if node.disk_free is None:
        return None
    there = sum(len(set(experts)) for experts in node.has.values()) * model.sizes.slab_bytes
    trunk = 0 if node.has_trunk or central_follower else model.sizes.trunk_bytes
    return node.disk_free + there - trunk


def node_costs(model: RingModelFacts, node: NodeMeasured) -> NodeCosts | None:
    """What ``node`` takes; without a measured expert, what streaming its weights takes. None if neither is known."""
    expert = node.expert
    if not node.memory_read:
        return None
    if expert is None:
        # Beyond a few tokens an expert is bound by arithmetic, of which nothing is known: as if by sixteen per reading.
        reading = model.sizes.slab_bytes / node.memory_read
        expert = Curve((1, 16, 512), (reading, reading, 32 * reading))
    return costs_of(
        model.sizes,
        expert,
        node.memory_read,
        node.layer_overhead_s,
        node.fence_s,
        node.machine,
        central_s=node.central_s,
    )
