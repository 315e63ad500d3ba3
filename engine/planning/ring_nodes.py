"""The inputs of a ring's planner: the machines and links as measured, the model, and the room on each machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.ipc.messages import ExpertPolicy
from engine.planning.calibration import Calibration, Curve, ExpertShape, guessed, with_trunk_on_host
from engine.planning.hybrid import Device, gpu_room, slabs_kept, workspace_bytes
from engine.planning.memory import ModelSizes
from engine.planning.policy import policy_named
from engine.planning.prediction import PREFILL_TOKENS, Shares, hybrid_speed
from engine.planning.ring_speed import GpuCosts, NodeCosts, PassTime, alone_time, costs_of

GIB = 1024**3


@dataclass(frozen=True)
class Reserve:
    """Memory left to the system: the larger of ``least`` bytes and the fraction ``share`` of all memory."""

    least: int
    share: float

    def of(self, total: int) -> int:
        return max(self.least, round(self.share * total))


UNIFIED_RESERVE = Reserve(8 * GIB, 0.25)
"""Reserve on Apple Silicon, where wired memory cannot be taken back."""
MAPPED_RESERVE = Reserve(GIB // 2, 0.05)
"""Reserve on other machines, where the experts are mapped files."""


@dataclass(frozen=True)
class NodeGpu:
    """The GPU that shares a node's experts with its CPU. Sizes are in bytes."""

    name: str
    total: int
    free: int
    """Bytes that may be taken: what is free, or the lent part of it."""
    calibration: Calibration | None = None
    """Measured costs of one expert of this model; None: not measured."""
    policy: ExpertPolicy = "balanced"
    expert_bytes: int | None = None
    """Bytes that the node's person gives to experts; None: all that is left."""


@dataclass(frozen=True)
class NodeMeasured:
    """One machine as it described and measured itself. Bytes and seconds; None: not measured."""

    node_id: str
    name: str
    memory_total: int
    memory_free: int
    """Bytes of memory that can be had without harm, page cache included."""
    kind: str = ""
    """Runtime, instruction set and dtype, e.g. ``native avx512_bf16``. Nodes of one kind compute the same bits."""
    unified: bool = False
    """Whether memory is shared with the GPU and wired for it (Apple Silicon)."""
    expert: Curve | None = None
    """Seconds of one expert of this model by its number of tokens."""
    memory_read: float | None = None
    """Rate of reading memory, in bytes per second."""
    layer_overhead_s: float = 0.0
    fence_s: float = 0.0
    central_s: float = 0.0
    machine: str = ""
    """Name of the machine; see :class:`engine.planning.ring_speed.NodeCosts`."""
    processor: str = ""
    """Processor and number of threads. Machines that agree in both count as equally fast. Empty: unknown."""
    has: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Experts of this model on the node's disk, by decoder layer."""
    has_trunk: bool = False
    disk_free: int | None = None
    """Free bytes on the node's disk; None: unknown, so there is no limit."""
    gpu: NodeGpu | None = None
    """The GPU that runs experts in this ring; None: there is none."""


@dataclass(frozen=True)
class LinkFigures:
    """The link between two machines, by node id, in either direction: seconds of half a round trip of 12 KiB, and bytes
    per second."""

    first: str
    second: str
    latency_s: float
    bytes_per_s: float


def beside_weights(model: ModelSizes, central_follower: bool = False) -> tuple[int, int]:
    """Bytes of keys and values, and bytes of workspace, on a node."""
    key_values = 0 if central_follower else model.planned_cache_bytes
    return key_values, workspace_bytes(model, gpu=False)


def memory_room(model: ModelSizes, node: NodeMeasured, central_follower: bool = False) -> int:
    """Bytes for experts in the memory of ``node``'s CPU, after trunk, keys and values, workspace and reserve.

    Negative if even those do not fit. A follower in central mode keeps no trunk, keys or values.
    """
    reserve = (UNIFIED_RESERVE if node.unified else MAPPED_RESERVE).of(node.memory_total)
    taken = sum(beside_weights(model, central_follower)) + (0 if central_follower else model.trunk_bytes)
    return min(node.memory_free, node.memory_total - reserve) - taken


def slabs_on(gpu: NodeGpu, model: ModelSizes) -> int:
    """Number of experts that the memory of a node's GPU keeps in a ring, where it holds nothing else of ``model``."""
    few = model.experts_only()
    room = gpu_room(few, Device(gpu.name, gpu.total, gpu.free))
    chosen = room if gpu.expert_bytes is None else min(room, gpu.expert_bytes)
    return slabs_kept(few, policy_named(gpu.policy, few.experts), chosen)


def gpu_slabs(model: ModelSizes, node: NodeMeasured) -> int:
    """Number of experts that the memory of ``node``'s GPU keeps; 0 without a GPU."""
    return 0 if node.gpu is None else slabs_on(node.gpu, model)


def expert_room(model: ModelSizes, node: NodeMeasured, central_follower: bool = False) -> int:
    """Bytes for experts on ``node``, in its memory and its GPU's; negative as in :func:`memory_room`."""
    room = memory_room(model, node, central_follower)
    return room if room < 0 else room + gpu_slabs(model, node) * model.slab_bytes


def disk_room(model: ModelSizes, node: NodeMeasured, central_follower: bool) -> int | None:
    """Bytes of experts that ``node`` can keep on its disk, including those already there. None: no limit.

    Negative if even the other parts that it is sent do not fit.
    """
    if node.disk_free is None:
        return None
    there = sum(len(set(experts)) for experts in node.has.values()) * model.slab_bytes
    trunk = 0 if node.has_trunk or central_follower else model.trunk_file_bytes
    return node.disk_free + there - trunk


def node_costs(model: ModelSizes, node: NodeMeasured) -> NodeCosts | None:
    """Costs of ``node``; without a measured expert, from the time of streaming its weights. None if neither is
    known."""
    expert = node.expert
    if not node.memory_read:
        return None
    if expert is None:
        # Beyond a few tokens an expert is bound by arithmetic, of which nothing is known: as if by sixteen per reading.
        reading = model.slab_bytes / node.memory_read
        expert = Curve((1, 16, 512), (reading, reading, 32 * reading))
    costs = costs_of(
        model,
        expert,
        node.memory_read,
        node.layer_overhead_s,
        node.fence_s,
        node.machine,
        central_s=node.central_s,
    )
    return with_gpu(model, node, costs)


def with_gpu(model: ModelSizes, node: NodeMeasured, costs: NodeCosts) -> NodeCosts:
    """``costs`` of ``node``'s CPU with its GPU added, if it has one."""
    gpu = node.gpu
    if gpu is None:
        return replace(costs, gpu=None)
    calibration = with_trunk_on_host(gpu_calibration(model, gpu, costs.expert, node.memory_read or 0.0))
    return replace(costs, gpu=GpuCosts(calibration, policy_named(gpu.policy, model.experts), gpu_slabs(model, node)))


def gpu_calibration(model: ModelSizes, gpu: NodeGpu, cpu: Curve, memory_read: float) -> Calibration:
    """The measured calibration of ``gpu``, or a guess, beside a CPU whose experts take ``cpu`` seconds."""
    ffn = round(model.slab_weights / (3 * model.hidden))
    shape = ExpertShape(hidden=model.hidden, ffn=ffn, dtype="", expert_bytes=model.slab_bytes)
    if gpu.calibration is None or gpu.calibration.gpu is None:
        return guessed(shape, model.width, cpu)
    rate = memory_read or gpu.calibration.memory_read
    return msgspec.structs.replace(gpu.calibration, shape=shape, cpu=cpu, memory_read=rate)


def slabs_alone(model: ModelSizes, node: NodeMeasured) -> int | None:
    """Number of experts that ``node``'s GPU keeps beside trunk, keys and values if the node runs the model alone.

    None if it has no GPU with room for those.
    """
    gpu = node.gpu
    if gpu is None:
        return None
    room = gpu_room(model, Device(gpu.name, gpu.total, gpu.free))
    chosen = room if gpu.expert_bytes is None else min(room, gpu.expert_bytes)
    return None if room < 0 else slabs_kept(model, policy_named(gpu.policy, model.experts), chosen)


def alone_times(model: ModelSizes, node: NodeMeasured, costs: NodeCosts) -> tuple[PassTime, PassTime]:
    """Times of a decoding step and a prompt of PREFILL_TOKENS on ``node``, which holds everything.

    Trunk, keys and values are on a GPU with room for them, unless the CPU is faster.
    """
    gpu = node.gpu
    on_cpu = alone_time(model, replace(costs, gpu=None)), alone_time(model, replace(costs, gpu=None), PREFILL_TOKENS)
    if gpu is None:
        return on_cpu
    policy, slabs = policy_named(gpu.policy, model.experts), slabs_alone(model, node)
    calibration = gpu_calibration(model, gpu, costs.expert, node.memory_read or 0.0)
    shares = Shares.even(model.experts)
    speed = hybrid_speed(model, calibration, policy, (slabs or 0) / model.moe_layers, shares, node.layer_overhead_s)
    if slabs is None or speed.step_s > on_cpu[0].seconds:
        return on_cpu
    moe = model.moe_layers * speed.layer_s
    return PassTime(moe, 0.0, speed.step_s - moe), PassTime(0.0, 0.0, speed.prefill_s, PREFILL_TOKENS)
