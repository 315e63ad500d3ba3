"""Whose experts a loaded model runs, by what: this machine alone or as a node of a ring, with or without a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.ipc.messages import Load
from engine.models.formats.model_files import Experts
from engine.moe.executor import Executor, LocalExecutor, RingExecutor
from engine.moe.held import held_by
from engine.moe.timing import Recorder
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.gpu_memory_plan import Room, make_hybrid
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend


def make_backend(
    held: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    recorder: Recorder,
    request: Load,
    room: Room | None,
    trunk_bytes: int = 0,
) -> tuple[TensorBackend, list[str]]:
    """What runs the experts ``held``, and a line for each fallback. ``room``: on a GPU, which they share with the CPU.

    ``trunk_bytes`` of memory are still to be taken.
    """
    if room is not None:
        return make_hybrid(room, held, gates, dtype, recorder, request)
    backend, lines = make_cpu_backend(held, gates, dtype, request.cpu_threads, trunk_bytes)
    return backend, list(lines)


def make_executor(
    backend: TensorBackend, held: Experts, recorder: Recorder, ring: RingPlace | None
) -> Executor[torch.Tensor]:
    """The executor of this machine alone, or of the node at ``ring``."""
    if ring is None:
        return LocalExecutor(backend, recorder)
    return RingExecutor(backend, ring.exchange, ring.context, held.layers, held.count, recorder)


def experts_here(experts: Experts | None, ring: RingPlace | None) -> Experts | None:
    """The experts that this node runs. Raises ModelError if it lacks one."""
    if experts is None or ring is None:
        return experts
    return held_by(experts, ring.context.placement, ring.context.rank)
