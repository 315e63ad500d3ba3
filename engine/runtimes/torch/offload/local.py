"""Experts on this machine's CPU: which implementation runs them in torch, and why."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.calibration.disk_rate import notice_beyond_memory
from engine.models.formats.model_files import Experts, first_held
from engine.models.formats.number_formats import is_packed
from engine.moe.kernels.bindings import KernelChoice, choose
from engine.moe.kernels.layers import unsupported_reason
from engine.moe.kernels.pool import physical_cores, shared_pool
from engine.moe.prefetch import ReadAhead
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local_native import TorchKernelBackend
from engine.runtimes.torch.offload.local_torch import TorchBackend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from engine.runtimes.torch.offload.torch_tensors import NAMES, stored_dtype
from engine.system.free_memory import available_bytes


def make_cpu_backend(
    experts: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    cpu_threads: int | None = None,
    trunk_bytes: int = 0,
) -> tuple[TensorBackend, tuple[str, ...]]:
    """The fastest backend that can run ``experts`` on the CPU in ``dtype``, and a line for each fallback, with why.

    ``gates[layer]`` is what :func:`engine.runtimes.torch.experts_module.gate_of` says of the layer. ``cpu_threads``
    None: one per physical core. ``trunk_bytes`` of memory are still to be taken: what the machine has left decides
    whether the experts stay in memory.
    Raises ModelError if PRIVATELLM_KERNELS asks for what this CPU does not have.
    """
    notices = []
    files = getattr(experts, "mapped_files", ())
    beyond = notice_beyond_memory("experts", experts.nbytes, files, max(0, available_bytes() - trunk_bytes))
    if beyond is not None:
        notices.append(beyond)
    read_ahead = None if beyond is None else ReadAhead(experts)
    choice = _kernels(dtype)
    reason = choice.reason if not choice.native else _unsuitable(experts, gates)
    if reason is not None:
        notices.append(f"The experts run in torch, not in the native kernels: {reason}.")
        notices += _slow_in_torch(experts, dtype)
        return TorchBackend(experts, gates, dtype, read_ahead), tuple(notices)
    pool = shared_pool(cpu_threads or physical_cores())
    activations = {layer: gate.activation for layer, gate in gates.items() if gate.activation is not None}
    return TorchKernelBackend(experts, activations, dtype, choice, pool, read_ahead), tuple(notices)


def _kernels(dtype: torch.dtype) -> KernelChoice:
    if dtype == torch.bfloat16:
        return choose("bfloat16")
    if dtype == torch.float32:
        return choose("float32")
    return KernelChoice("none", f"they compute in bfloat16 or float32, not in {NAMES[dtype]}")


def _unsuitable(experts: Experts, gates: Mapping[int, FamilyGate]) -> str | None:
    """Why the native kernels cannot run these experts, or None."""
    for layer in experts.layers:
        if gates[layer].activation is None:
            return f"they do not know the activation of layer {layer}'s experts"
        reason = next((unsupported_reason(experts.expert(layer, number)) for number in experts.held(layer)[:1]), None)
        if reason is not None:
            return f"they cannot read the weights of layer {layer}, because {reason}"
    return None


def _slow_in_torch(experts: Experts, dtype: torch.dtype) -> list[str]:
    """What makes these experts slow in torch, and what to do about it."""
    if is_packed(experts.dtype):
        return [
            f"The experts are stored as {experts.dtype} and unpacked each time they are used, which is slow on a CPU."
        ]
    lines = []
    stored = stored_dtype(experts.dtype)
    if stored != dtype:
        lines.append(
            f"The experts are stored as {NAMES[stored]} and converted to {NAMES[dtype]} each time "
            "they are used, which is slow; choose dtype auto to run them as they are."
        )
    first = first_held(experts)
    if first is not None and not experts.expert(*first).down.words.flags.c_contiguous:
        lines.append(
            "The experts are stored transposed, which is several times slower on a CPU; "
            "`privatellm models prepare` writes them the other way round."
        )
    return lines
