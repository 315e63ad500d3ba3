"""Experts on this machine's CPU, or copied to its GPU one by one: which implementation runs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.calibration.disk_rate import notice_beyond_memory
from engine.models.files import Experts, first_held
from engine.moe.kernels.bindings import KernelChoice, choose
from engine.moe.kernels.layers import why_not
from engine.moe.kernels.pool import physical_cores, shared_pool
from engine.moe.prefetch import ReadAhead
from engine.moe.timing import Recorder
from engine.runtimes.torch.offload.executor import Executor
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local_native import NativeLocalExecutor
from engine.runtimes.torch.offload.local_torch import TorchLocalExecutor
from engine.runtimes.torch.offload.torch_tensors import NAMES, stored_dtype
from engine.system.free_memory import available_bytes


class CpuExperts(Protocol):
    """Runs single routes of a layer on the CPU: its side of an executor that shares experts with other devices."""

    @property
    def description(self) -> str:
        """``local (native avx512_bf16, 2 threads)`` or ``local (torch, cpu)``."""
        ...

    def outputs(
        self, layer: int, hidden: torch.Tensor, indices: torch.Tensor, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What each route's expert makes of its token, not weighted and not added up.

        ``hidden`` [tokens, hidden] on the CPU, in the dtype computed in or float32; ``indices`` [tokens, k], int32 or
        int64 on the CPU, -1 where another device runs the route. Returns float32 [tokens * k, hidden] in the order of
        the routes, a new tensor; rows of routes with -1 are zero. A route's row does not depend on which other routes
        are in the call, as far as the implementation can promise (see its description).
        ``input_weights`` [tokens, k]: for families that scale what goes into an expert (llama4).
        """
        ...

    @property
    def counts(self) -> torch.Tensor:
        """How many routes of the last call each expert ran, int64 [experts]; overwritten by the next call."""
        ...


class LocalExecutor(Executor, CpuExperts, Protocol):
    """All experts run here."""

    @property
    def result_dtype(self) -> torch.dtype:
        """What a route's result is before it is weighted: nothing is lost if it travels in this dtype."""
        ...

    def combined(self, routed: torch.Tensor, tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
        """The sum that :meth:`run` makes of results, to the bit, before it is rounded to hidden's dtype.

        ``routed`` [tokens * k, hidden] in ``result_dtype``, in the order of the routes; ``weights`` [tokens, k] as
        :meth:`run` gets them, None where they went into the input. Returns float32 [tokens, hidden]. ``tokens`` > 0.
        """
        ...


@dataclass(frozen=True)
class Local:
    """An executor and what the person should know about the choice, one line each."""

    executor: LocalExecutor
    notices: tuple[str, ...]


def make_local_executor(
    experts: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    device: torch.device,
    recorder: Recorder,
    cpu_threads: int | None = None,
    trunk_bytes: int = 0,
) -> Local:
    """The fastest executor that can run ``experts`` in ``dtype`` on ``device``.

    ``gates[layer]`` is what :func:`engine.runtimes.torch.experts_module.gate_of` says of the layer. ``cpu_threads``
    None: one per physical core. ``trunk_bytes`` of memory are still to be taken: what the machine has left decides
    whether the experts stay in memory. The notices say which fallback was taken, and why.
    Raises ModelError if PRIVATELLM_KERNELS asks for what this CPU does not have.
    """
    if device.type != "cpu":
        return Local(TorchLocalExecutor(experts, gates, dtype, device, recorder), ())
    notices = []
    files = getattr(experts, "mapped_files", ())
    beyond = notice_beyond_memory("experts", experts.nbytes, files, max(0, available_bytes() - trunk_bytes))
    if beyond is not None:
        notices.append(beyond)
    read_ahead = None if beyond is None else ReadAhead(experts)
    choice = _kernels(dtype)
    reason = choice.reason if not choice.native else _unsuitable(experts, gates)
    if reason is None:
        pool = shared_pool(cpu_threads or physical_cores())
        activations = {layer: gate.activation for layer, gate in gates.items() if gate.activation is not None}
        executor: LocalExecutor = NativeLocalExecutor(experts, activations, choice, pool, recorder, read_ahead)
    else:
        notices.append(f"The experts run in torch, not in the native kernels: {reason}.")
        notices += _slow_in_torch(experts, dtype)
        executor = TorchLocalExecutor(experts, gates, dtype, device, recorder, read_ahead)
    return Local(executor, tuple(notices))


def make_cpu_experts(
    experts: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    recorder: Recorder,
    cpu_threads: int | None = None,
    trunk_bytes: int = 0,
) -> tuple[CpuExperts, tuple[str, ...]]:
    """The CPU's side of a hybrid executor, and its notices: the same choice as :func:`make_local_executor` makes."""
    local = make_local_executor(experts, gates, dtype, torch.device("cpu"), recorder, cpu_threads, trunk_bytes)
    return local.executor, local.notices


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
        reason = next((why_not(experts.expert(layer, number)) for number in experts.held(layer)[:1]), None)
        if reason is not None:
            return f"they cannot read the weights of layer {layer}, because {reason}"
    return None


def _slow_in_torch(experts: Experts, dtype: torch.dtype) -> list[str]:
    """What makes these experts slow in torch, and what to do about it."""
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
