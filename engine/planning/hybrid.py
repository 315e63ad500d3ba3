"""The plan of one machine for a model: what goes where, whether it fits, its speed, and the reasons. Pure.

With a GPU, the trunk, its keys and values and the workspace go there. The rest of its memory holds experts ("slabs"),
if the policy keeps any. All experts are mapped from files in the host's memory as well. What does not fit there is read
from the disk each time, which is slow but allowed. All sizes are in bytes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from engine.ipc.messages import DeviceMemory, ExpertPolicy, PlannedChoice
from engine.planning.calibration import Calibration
from engine.planning.memory import ModelSizes
from engine.planning.policy import Policy, policy_named
from engine.planning.prediction import (
    ANSWERS,
    DECODE_CONTEXT,
    PREFILL_TOKENS,
    Shares,
    Speed,
    answers_per_s,
    cpu_speed,
    cpu_step_s,
    hybrid_speed,
    streaming_step_s,
)

GPU_RUNTIME_BYTES = 512 * 1024 * 1024
"""GPU memory in bytes that the GPU's own libraries take before anything is loaded."""
UNPACKING_ROOM = 128 * 1024 * 1024
"""GPU memory in bytes that unpacking takes beside the unpacked expert."""
STAGING_SLABS = 2
"""Number of slots for copied weights that are not kept: one is in use while the next arrives."""
ANSWER_TOKENS = 256
"""Tokens of a typical answer. Its question, with what came before it, has PREFILL_TOKENS."""
_WIDTHS_OF_ACTIVATIONS = 16
"""Number of float32 rows of the hidden size that one token needs at once, in attention and around the experts."""


@dataclass(frozen=True)
class Device:
    """Memory in bytes; ``total`` 0: unknown."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class HybridMachine:
    """A machine with a CPU and perhaps a GPU.

    ``free`` of the CPU is the memory that can be had without harm, page cache included. Rates are in bytes per second,
    measured or None.
    """

    cpu: Device
    gpu: Device | None = None
    memory_read: float | None = None
    disk_read: float | None = None
    reserve: int = 0
    """Bytes of the CPU's memory that a model may not take. They hold pages of files until somebody wants them."""


@dataclass(frozen=True)
class HybridRequest:
    """The person's choices.

    ``cpu_layer_overhead_s``: seconds per decoder layer and forward pass, beyond the weights. ``cpu_read_share``: the
    fraction of the memory rate at which the CPU reads the weights.
    """

    partitioning: Literal["auto", "cpu", "hybrid"] = "auto"
    policy: ExpertPolicy = "balanced"
    gpu_expert_bytes: int | None = None
    cpu_layer_overhead_s: float = 0.0
    cpu_read_share: float = 1.0
    rows_together: int = 1
    """Maximum rows of several answers in one step of the runtime."""


@dataclass(frozen=True)
class HybridPlan:
    """A plan that keeps ``slabs`` experts on the GPU.

    The rates are None if there is nothing to predict them from. ``basis`` names what they rest on, or what is missing.
    ``shortfall`` is 0 if the model fits.
    """

    fits: bool
    shortfall: int
    on_gpu: bool
    slabs: int
    memory: tuple[DeviceMemory, ...]
    choices: tuple[PlannedChoice, ...]
    tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    answers_per_s: tuple[float, ...] = ()
    """Tokens per second of each of :data:`engine.planning.prediction.ANSWERS`."""
    basis: str = ""


def workspace_bytes(model: ModelSizes, gpu: bool) -> int:
    """Bytes for the intermediate results of a forward pass over a chunk of a prompt, beside weights, keys and values.

    On a GPU they include the GPU's libraries, slots for weights in transfer, and an unpacked expert if weights are
    packed.
    """
    widths = _WIDTHS_OF_ACTIVATIONS + (2 * model.experts_per_token if model.experts else 0)
    activations = 4 * model.prefill_chunk * model.hidden * widths
    if not gpu:
        return activations
    unpacking = model.unpacked_slab_bytes + UNPACKING_ROOM if model.unpacked_slab_bytes else 0
    return activations + GPU_RUNTIME_BYTES + STAGING_SLABS * model.slot_bytes + unpacking


def gpu_room(model: ModelSizes, gpu: Device) -> int:
    """Bytes of GPU memory left for experts; negative if the trunk, its keys and values and the workspace do not fit."""
    return gpu.free - model.trunk_bytes - model.planned_cache_bytes - workspace_bytes(model, gpu=True)


def slabs_kept(model: ModelSizes, policy: Policy, room: int) -> int:
    """Number of experts that the policy's cache holds in ``room`` bytes: whole layers, or equally many per layer, by
    its rule."""
    if not model.slab_bytes or policy.cache.kind == "none":
        return 0
    slabs = min(max(0, room) // model.slot_bytes, model.slabs)
    if policy.cache.kind == "layers":
        return slabs - slabs % model.experts
    if policy.cache.scope == "layer":
        return slabs - slabs % model.moe_layers
    return slabs


def plan(
    model: ModelSizes,
    machine: HybridMachine,
    wanted: HybridRequest,
    calibration: Calibration | None = None,
    popularity: Sequence[Sequence[int]] = (),
) -> HybridPlan:
    """The plan for ``model`` on ``machine``. ``popularity``: routes counted before, [MoE layer][expert], or nothing."""
    shares = Shares.counted(popularity) if popularity else Shares.even(model.experts)
    alone = _cpu_plan(model, machine, wanted, calibration, shares, popularity)
    if wanted.partitioning == "cpu" or machine.gpu is None:
        if wanted.partitioning == "hybrid":
            return replace(
                alone, fits=False, choices=(PlannedChoice("experts", "none", "there is no GPU to share with"),)
            )
        return alone
    shared = _gpu_plan(model, machine, machine.gpu, wanted, calibration, shares, popularity)
    return shared if wanted.partitioning == "hybrid" else better(alone, shared, wanted.gpu_expert_bytes is not None)


def better(alone: HybridPlan, shared: HybridPlan, gpu_wanted: bool) -> HybridPlan:
    """The better of the plans for the CPU ``alone`` and ``shared`` with the GPU.

    The GPU is used if both fit, unless a typical exchange is predicted to take longer with it. ``gpu_wanted``: the
    person chose how much GPU memory experts get.
    """
    if not shared.fits:
        short = f"the GPU lacks {shared.shortfall / 1e9:.1f} GB for trunk, keys and values, and workspace"
        return shared if gpu_wanted else _cpu_because(alone, short)
    if not alone.fits or not alone.tokens_per_s or not shared.tokens_per_s:
        return shared
    # Where a prompt's rate is not known for both, the answer decides.
    on_cpu, on_gpu = ANSWER_TOKENS / alone.tokens_per_s, ANSWER_TOKENS / shared.tokens_per_s
    if alone.prefill_tokens_per_s and shared.prefill_tokens_per_s:
        on_cpu += PREFILL_TOKENS / alone.prefill_tokens_per_s
        on_gpu += PREFILL_TOKENS / shared.prefill_tokens_per_s
    if on_cpu >= on_gpu:
        return shared
    exchange = f"a question of {PREFILL_TOKENS} tokens and an answer of {ANSWER_TOKENS}"
    times = f"{on_cpu:.1f} s for {exchange}, with the GPU {on_gpu:.1f} s"
    return _cpu_because(alone, f"the CPU alone is predicted to be faster: {times}")


def _cpu_plan(
    model: ModelSizes,
    machine: HybridMachine,
    wanted: HybridRequest,
    calibration: Calibration | None,
    shares: Shares,
    popularity: Sequence[Sequence[int]],
) -> HybridPlan:
    key_values = model.planned_cache_bytes
    workspace = workspace_bytes(model, gpu=False)
    pages = machine.cpu.free - key_values - workspace
    trunk = min(model.trunk_bytes, max(0, pages)) if model.trunk_is_mapped else model.trunk_bytes
    spare = pages - trunk
    memory = _on_cpu(machine.cpu, model, trunk=trunk, key_values=key_values, workspace=workspace)
    if machine.gpu is None:
        where = PlannedChoice("experts", "CPU", "this machine has no GPU that torch can use")
    else:
        where = PlannedChoice("experts", "CPU", "the GPU is left alone, as chosen")
    choices = [where] if model.experts else [PlannedChoice("weights", "CPU", where.reason)]
    speed: Speed | None = None
    step_s: Callable[[int], float] | None = None
    if calibration is not None:
        speed = cpu_speed(model, calibration, shares, wanted.cpu_layer_overhead_s, wanted.cpu_read_share)
        step_s = partial(cpu_step_s, model, calibration, shares, wanted.cpu_layer_overhead_s, wanted.cpu_read_share)
        basis = "measured by `privatellm bench experts` on this machine"
    elif machine.memory_read:
        rate = wanted.cpu_read_share * machine.memory_read
        step_s = partial(streaming_step_s, model, rate, wanted.cpu_layer_overhead_s)
        speed = Speed(step_s(1), 0.0)
        basis = f"the weights read per token at {rate / 1e9:.0f} GB/s"
        if model.experts:
            basis += f", a rate measured with other models; `{_bench_experts(model)}` measures these experts"
    else:
        basis = _nothing_measured(model)
    finished = HybridPlan(spare >= 0, max(0, -spare), False, 0, (memory,), tuple(choices), basis=basis)
    kept = 0 if model.trunk_is_mapped else model.trunk_bytes
    return _with_speed(finished, model, machine, wanted, speed, step_s, kept, popularity)


def _on_cpu(cpu: Device, model: ModelSizes, trunk: int, key_values: int, workspace: int) -> DeviceMemory:
    room = max(0, cpu.free - trunk - key_values - workspace)
    return DeviceMemory(
        device="CPU",
        total=cpu.total,
        free=cpu.free,
        trunk=trunk,
        experts=min(model.expert_bytes, room),
        key_values=key_values,
        workspace=workspace,
    )


def _gpu_plan(
    model: ModelSizes,
    machine: HybridMachine,
    gpu: Device,
    wanted: HybridRequest,
    calibration: Calibration | None,
    shares: Shares,
    popularity: Sequence[Sequence[int]],
) -> HybridPlan:
    policy = policy_named(wanted.policy, model.experts)
    room = gpu_room(model, gpu)
    asked = 0
    if policy.cache.kind != "none":
        most = model.slabs * model.slot_bytes
        asked = min(max(0, room if wanted.gpu_expert_bytes is None else wanted.gpu_expert_bytes), most)
    slabs = slabs_kept(model, policy, min(asked, room))
    shortfall = max(0, -room, asked - room)
    on_gpu = DeviceMemory(
        device=gpu.name,
        total=gpu.total,
        free=gpu.free,
        trunk=model.trunk_bytes,
        experts=asked if shortfall else slabs * model.slot_bytes,
        key_values=model.planned_cache_bytes,
        workspace=workspace_bytes(model, gpu=True),
    )
    on_cpu = _on_cpu(machine.cpu, model, 0, 0, workspace_bytes(model, gpu=False))
    choices = _gpu_choices(model, wanted, policy, slabs, room)
    per_layer = slabs / model.moe_layers if model.moe_layers else 0.0
    speed: Speed | None = None
    if calibration is not None and calibration.gpu is not None:
        speed = hybrid_speed(model, calibration, policy, per_layer, shares)
        basis = "measured by `privatellm bench experts` on this machine"
    else:
        basis = _nothing_measured(model)
    finished = HybridPlan(
        fits=not shortfall,
        shortfall=shortfall,
        on_gpu=True,
        slabs=slabs,
        memory=(on_gpu, on_cpu),
        choices=choices,
        basis=basis,
    )
    return _with_speed(finished, replace(model, trunk_is_mapped=False), machine, wanted, speed, None, 0, popularity)


def _gpu_choices(
    model: ModelSizes, wanted: HybridRequest, policy: Policy, slabs: int, room: int
) -> tuple[PlannedChoice, ...]:
    trunk = PlannedChoice("trunk", "GPU", "every token uses all of it")
    if not model.experts:
        return (PlannedChoice("weights", "GPU", "the model has no experts to share, so all of it goes there"),)
    if policy.cache.kind == "none":
        experts_kept = PlannedChoice(
            "experts on the GPU", "none kept", f"the policy {policy.name} keeps none between steps"
        )
    elif slabs == model.slabs:
        experts_kept = PlannedChoice("experts on the GPU", f"all {slabs}", "there is room for every expert")
    else:
        size = f"{model.slot_bytes / 1e6:.0f} MB each"
        limit = (
            f"{max(0, room) / 1e9:.1f} GB are left beside trunk, keys and values, and workspace"
            if wanted.gpu_expert_bytes is None
            else f"{wanted.gpu_expert_bytes / 1e9:.1f} GB were chosen"
        )
        experts_kept = PlannedChoice("experts on the GPU", f"{slabs} of {model.slabs}", f"{limit}, {size}")
    return (trunk, experts_kept, PlannedChoice("policy", policy.name, _POLICY_REASONS[policy.name]))


_POLICY_REASONS: dict[ExpertPolicy, str] = {
    "balanced": "GPU and CPU work at once and are done together, by this machine's measured times",
    "twiddler": "each expert runs where it alone would be done sooner",
    "monde": "the experts with the most tokens are copied to the GPU, as many as the bandwidths allow",
    "layers": "whole layers are on the GPU, the others on the CPU",
    "lru-offload": "every expert runs on the GPU, the last used ones stay there",
    "stream": "every expert of a layer is copied to the GPU each time",
    "on-demand": "every expert that a layer needs is copied to the GPU each time",
}


def _with_speed(
    finished: HybridPlan,
    model: ModelSizes,
    machine: HybridMachine,
    wanted: HybridRequest,
    speed: Speed | None,
    step_s: Callable[[int], float] | None,
    kept_bytes: int,
    popularity: Sequence[Sequence[int]],
) -> HybridPlan:
    """``finished`` with its rates, including reads from the disk if the host's memory is too small.

    ``step_s``: seconds of a step by its rows; None: answers take turns. ``kept_bytes``: bytes of host memory with
    weights that are not mapped.
    """

    def disk_s(rows: int) -> float:
        return 0.0

    cpu = next(device for device in finished.memory if device.device == "CPU")
    mapped = model.expert_bytes + (model.trunk_bytes if model.trunk_is_mapped else 0)
    missing = mapped - (machine.cpu.free - kept_bytes - cpu.key_values - cpu.workspace)
    if mapped and missing > 0:
        what = "experts" if model.experts else "weights"
        reason = f"{min(missing, mapped) / 1e9:.1f} GB of the {what} do not fit in memory "
        reason += "and are read from the disk when used"
        if machine.disk_read:
            reason += f", at {machine.disk_read / 1e6:.0f} MB/s"
        finished = replace(finished, choices=(*finished.choices, PlannedChoice("memory", "part on disk", reason)))
        if machine.disk_read is None:
            return replace(finished, basis="part of the model is read from the disk, whose rate was not measured")
        if speed is not None:
            # Keys and values take memory as the conversation grows, and a prompt's workspace while it is read. One that
            # is kept afterwards is at most a small part of the free memory.
            cached = model.cache_bytes(min(DECODE_CONTEXT, model.context_tokens)) if cpu.key_values else 0
            room = machine.cpu.free + machine.reserve - kept_bytes - cached
            disk_read = machine.disk_read

            def disk_s(rows: int) -> float:
                return seconds_from_disk(bytes_from_disk(model, room, rows, popularity), disk_read)

            prompt_bytes = bytes_from_disk(model, room - cpu.workspace, PREFILL_TOKENS, popularity)
            prompt = seconds_from_disk(prompt_bytes, disk_read)
            speed = replace(
                speed,
                step_s=speed.step_s + disk_s(1),
                prefill_s=speed.prefill_s + prompt if speed.prefill_s else 0.0,
            )
            finished = replace(finished, basis=f"{finished.basis}, and the disk's rate")
    if speed is None:
        return finished
    if not speed.tokens_per_s:
        return replace(finished, prefill_tokens_per_s=speed.prefill_tokens_per_s or None)
    if step_s is None:
        several = (speed.tokens_per_s,) * len(ANSWERS)
    else:
        step = step_s
        several = answers_per_s(lambda rows: step(rows) + disk_s(rows), wanted.rows_together)
    return replace(
        finished,
        tokens_per_s=speed.tokens_per_s,
        prefill_tokens_per_s=speed.prefill_tokens_per_s or None,
        answers_per_s=several,
    )


def _nothing_measured(model: ModelSizes) -> str:
    if model.experts:
        return (
            f"nothing was measured for these experts on this machine; `{_bench_experts(model)}` does it in under a "
            "minute"
        )
    return "nothing was measured on this machine"


def _bench_experts(model: ModelSizes) -> str:
    return " ".join(["privatellm bench experts", *([shlex.quote(model.name)] if model.name else [])])


def _cpu_because(alone: HybridPlan, reason: str) -> HybridPlan:
    """``alone``, the plan for the CPU, with the ``reason`` why the GPU is not used."""
    first = alone.choices[0]
    return replace(alone, choices=(PlannedChoice(first.what, first.choice, reason), *alone.choices[1:]))


# --- what is read from the disk --------------------------------------------------------------------------------------


UNSEEN_ROUTES = 0.5
"""Routes added to every expert's count, so that an expert that was never used does not count as useless."""
MAKING_ROOM_S = 3.5e-10
"""Processor seconds per byte that is read while memory is full, on top of the disk's time: other pages are chosen,
unmapped and dropped, and new ones mapped. ``benchmarks.beyond_memory`` gave 2.8e-10 to 5.5e-10."""
_HALVINGS = 60
"""Number of bisection steps that find the time after which a page is dropped."""


def bytes_from_disk(model: ModelSizes, room: int, rows: int, popularity: Sequence[Sequence[int]] = ()) -> float:
    """Bytes that a pass of ``rows`` tokens reads from the disk if memory has ``room`` bytes for pages of the files.

    A mapped trunk that does not fit is read whole: every pass reads it in the same order, so each page is replaced just
    before it is wanted again. ``popularity``: routes counted before, [MoE layer][expert], or nothing.
    """
    trunk = model.trunk_read_bytes if model.trunk_is_mapped and model.trunk_read_bytes > max(0, room) else 0
    if not model.slab_bytes:
        return trunk
    if model.trunk_is_mapped:
        room -= model.trunk_read_bytes
    uses = uses_per_token(model.experts, model.experts_per_token, model.moe_layers, popularity)
    missing = missing_chances(uses, max(0, room) / model.slab_bytes)
    return trunk + experts_read(uses, missing, rows) * model.slab_bytes


def seconds_from_disk(nbytes: float, disk_read: float) -> float:
    """Seconds to read ``nbytes`` into full memory from a disk that reads ``disk_read`` bytes per second."""
    return nbytes / disk_read + nbytes * MAKING_ROOM_S


def uses_per_token(
    experts: int, per_token: int, layers: int, popularity: Sequence[Sequence[int]] = ()
) -> list[list[float]]:
    """Probability that a token uses each expert, [layer][expert].

    ``popularity``: routes counted before, [layer][expert]. Layers without counts have even use.
    """
    if not experts:
        return []
    even = [min(1.0, per_token / experts)] * experts
    if not popularity:
        return [even] * layers
    found = []
    for row in popularity:
        total = sum(row) + UNSEEN_ROUTES * len(row)
        found.append([min(1.0, per_token * (count + UNSEEN_ROUTES) / total) for count in row] if sum(row) else even)
    return found


def missing_chances(uses: Sequence[Sequence[float]], slots: float) -> list[list[float]]:
    """Probability that each expert is not in memory when it is needed, if memory holds ``slots`` experts."""
    everything = sum(len(layer) for layer in uses)
    if slots >= everything:
        return [[0.0] * len(layer) for layer in uses]
    if slots <= 0:
        return [[1.0] * len(layer) for layer in uses]
    # An expert of every token is there after one, so no time is longer than the rarest expert needs.
    low, high = 0.0, 1.0
    while _held(uses, high) < slots and high < 1e18:
        high *= 2.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _held(uses, middle) < slots else (low, middle)
    return [[math.exp(-use * high) for use in layer] for layer in uses]


def _held(uses: Sequence[Sequence[float]], tokens: float) -> float:
    return sum(1.0 - math.exp(-use * tokens) for layer in uses for use in layer)


def experts_read(uses: Sequence[Sequence[float]], missing: Sequence[Sequence[float]], rows: int) -> float:
    """Expected number of experts that a pass of ``rows`` tokens reads from the disk."""
    return sum(
        chance * (1.0 - (1.0 - use) ** rows)
        for layer, absent in zip(uses, missing, strict=True)
        for use, chance in zip(layer, absent, strict=True)
    )
