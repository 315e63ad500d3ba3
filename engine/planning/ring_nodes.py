"""The inputs of a ring's planner: the machines and links as measured, the model, and the room on each machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from engine.ipc.messages import ExpertPolicy
from engine.planning.calibration import Calibration, Curve, ExpertShape, guessed, with_trunk_on_host
from engine.planning.hybrid import Device, gpu_room, slabs_kept, workspace_bytes
from engine.planning.memory import ModelSizes
from engine.planning.policy import policy_named
from engine.planning.prediction import PREFILL_TOKENS, Shares, hybrid_speed
from engine.planning.ring_speed import GpuCosts, NodeCosts, PassTime, alone_time, costs_of

GIB = 1024**3
TORCH_LAYER_S = 1e-3
"""Assumed seconds that torch adds to a layer in Python and small operations, if not measured."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""Text from another machine, with a limit on its length."""


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


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node's GPU that torch uses, which shares the node's experts with its CPU. Memory in bytes."""

    name: Text
    memory_total: int
    memory_free: int
    memory_lent: int | None = None
    """Bytes of its memory that its person lends; None: whatever is free."""
    calibration: Calibration | None = None
    """One expert of the model as this machine measured it; None: it did not."""

    # The head's choice, never the machine's own word.
    policy: ExpertPolicy = "balanced"
    expert_bytes: int | None = None
    """Bytes that the node's person gives to experts; None: all that is left."""

    def slabs(self, model: ModelSizes) -> int | None:
        """Number of experts that its memory keeps beside the rest of ``model`` there; None if that does not fit."""
        room = gpu_room(model, Device(self.name, self.memory_total, self.memory_free))
        chosen = room if self.expert_bytes is None else min(room, self.expert_bytes)
        return None if room < 0 else slabs_kept(model, policy_named(self.policy, model.experts), chosen)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One machine as it described and measured itself, and as a ring uses it. Bytes, bytes per second and seconds."""

    memory_total: int
    memory_free: int
    """Bytes of memory that can be had without harm, page cache included."""
    memory_lent: int | None = None
    """Bytes of memory that its person lends; None: whatever is free."""
    memory_read: float = 0.0
    """Rate of reading memory; 0: not measured."""
    disk_free: int | None = None
    """Free bytes on the node's disk; None: there is no limit."""
    disk: Text = ""
    """Identifier of the disk with the models, the same for all processes that use it."""
    expert: Curve | None = None
    """Seconds of one expert of the model by its number of tokens; None: not measured."""
    instruction_set: str = ""
    runtimes: list[str] = []
    """The runtimes that are installed and run on the node, best first."""
    libraries: dict[Text, Text] = {}
    """Version of the computing library by runtime. privatellm's own kernels have none."""
    exchanges: list[str] = []
    """The exchanges that the node can run."""
    has: dict[int, list[int]] = {}
    """Experts of the model that are already on the node's disk, by decoder layer."""
    has_trunk: bool = False
    processor: str = ""
    system: str = ""
    threads: int = 0
    layer_overhead_s: dict[str, float] = {}
    """Seconds of a layer beside its weights, by runtime."""
    fence_s: float = 0.0
    """Seconds that a ring costs the node per MoE layer beside experts and transfer."""
    central_s: float = 0.0
    """The same in central mode, for the head and one follower together."""
    machine: str = ""
    """Identifier of the machine, the same for all its processes. Empty in a plan: no other node is on it."""
    unified_memory: bool = False
    """Whether CPU and GPU share the memory, which is wired for it (Apple Silicon), so that the system needs a
    reserve."""
    gpu: GpuFacts | None = None
    """The GPU that torch uses; None: there is none, it is not lent, or the node's version is older."""

    # The head's words, never the machine's own.
    node_id: str = ""
    name: str = ""
    runs: str = ""
    """The runtime of its experts."""
    kind: str = ""
    """Runtime, instruction set and dtype, e.g. ``native avx512_bf16``. Nodes of one kind compute the same bits."""

    @property
    def hardware(self) -> tuple[str, int] | None:
        """Processor and number of threads. Nodes that agree in both count as equally fast. None: unknown."""
        return (self.processor, self.threads) if self.processor else None

    @property
    def overhead_s(self) -> float:
        """Seconds that its runtime adds to a layer. Torch is never taken to add as little as the native runtime."""
        measured, native = self.layer_overhead_s, self.layer_overhead_s.get("native", 0.0)
        if self.runs == "torch" and measured and "torch" not in measured:
            return max(TORCH_LAYER_S, native)
        return measured.get(self.runs, native)


def beside_weights(model: ModelSizes, central_follower: bool = False) -> tuple[int, int]:
    """Bytes of keys and values, and bytes of workspace, on a node."""
    key_values = 0 if central_follower else model.planned_cache_bytes
    return key_values, workspace_bytes(model, gpu=False)


def memory_room(model: ModelSizes, node: NodeFacts, central_follower: bool = False) -> int:
    """Bytes for experts in the memory of ``node``'s CPU, after trunk, keys and values, workspace and reserve.

    Negative if even those do not fit. A follower in central mode keeps no trunk, keys or values.
    """
    reserve = (UNIFIED_RESERVE if node.unified_memory else MAPPED_RESERVE).of(node.memory_total)
    taken = sum(beside_weights(model, central_follower)) + (0 if central_follower else model.trunk_bytes)
    return min(node.memory_free, node.memory_total - reserve) - taken


def gpu_slabs(model: ModelSizes, node: NodeFacts) -> int:
    """Number of experts that the memory of ``node``'s GPU keeps; 0 without a GPU."""
    return 0 if node.gpu is None else node.gpu.slabs(model.experts_only()) or 0


def expert_room(model: ModelSizes, node: NodeFacts, central_follower: bool = False) -> int:
    """Bytes for experts on ``node``, in its memory and its GPU's; negative as in :func:`memory_room`."""
    room = memory_room(model, node, central_follower)
    return room if room < 0 else room + gpu_slabs(model, node) * model.slab_bytes


def disk_room(model: ModelSizes, node: NodeFacts, central_follower: bool) -> int | None:
    """Bytes of experts that ``node`` can keep on its disk, including those already there. None: no limit.

    Negative if even the other parts that it is sent do not fit.
    """
    if node.disk_free is None:
        return None
    there = sum(len(set(experts)) for experts in node.has.values()) * model.slab_bytes
    trunk = 0 if node.has_trunk or central_follower else model.trunk_file_bytes
    return node.disk_free + there - trunk


def node_costs(model: ModelSizes, node: NodeFacts) -> NodeCosts | None:
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
        node.overhead_s,
        node.fence_s,
        node.machine,
        central_s=node.central_s,
    )
    return with_gpu(model, node, costs)


def with_gpu(model: ModelSizes, node: NodeFacts, costs: NodeCosts) -> NodeCosts:
    """``costs`` of ``node``'s CPU with its GPU added, if it has one."""
    gpu = node.gpu
    if gpu is None:
        return replace(costs, gpu=None)
    calibration = with_trunk_on_host(gpu_calibration(model, gpu, costs.expert, node.memory_read))
    return replace(costs, gpu=GpuCosts(calibration, policy_named(gpu.policy, model.experts), gpu_slabs(model, node)))


def gpu_calibration(model: ModelSizes, gpu: GpuFacts, cpu: Curve, memory_read: float) -> Calibration:
    """The measured calibration of ``gpu``, or a guess, beside a CPU whose experts take ``cpu`` seconds."""
    ffn = round(model.slab_weights / (3 * model.hidden))
    shape = ExpertShape(hidden=model.hidden, ffn=ffn, dtype="", expert_bytes=model.slab_bytes)
    if gpu.calibration is None or gpu.calibration.gpu is None:
        return guessed(shape, model.width, cpu)
    rate = memory_read or gpu.calibration.memory_read
    return msgspec.structs.replace(gpu.calibration, shape=shape, cpu=cpu, memory_read=rate)


def slabs_alone(model: ModelSizes, node: NodeFacts) -> int | None:
    """Number of experts that ``node``'s GPU keeps beside trunk, keys and values if the node runs the model alone.

    None if it has no GPU with room for those.
    """
    return None if node.gpu is None else node.gpu.slabs(model)


def alone_times(model: ModelSizes, node: NodeFacts, costs: NodeCosts) -> tuple[PassTime, PassTime]:
    """Times of a decoding step and a prompt of PREFILL_TOKENS on ``node``, which holds everything.

    Trunk, keys and values are on a GPU with room for them, unless the CPU is faster.
    """
    gpu = node.gpu
    on_cpu = alone_time(model, replace(costs, gpu=None)), alone_time(model, replace(costs, gpu=None), PREFILL_TOKENS)
    if gpu is None:
        return on_cpu
    policy, slabs = policy_named(gpu.policy, model.experts), slabs_alone(model, node)
    calibration = gpu_calibration(model, gpu, costs.expert, node.memory_read)
    shares = Shares.even(model.experts)
    speed = hybrid_speed(model, calibration, policy, (slabs or 0) / model.moe_layers, shares, node.overhead_s)
    if slabs is None or speed.step_s > on_cpu[0].seconds:
        return on_cpu
    moe = model.moe_layers * speed.layer_s
    return PassTime(moe, 0.0, speed.step_s - moe), PassTime(0.0, 0.0, speed.prefill_s, PREFILL_TOKENS)
