"""Loading a model into a place of a ring."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.ipc.messages import Load
from engine.models.files import Experts
from engine.moe.expert_parallel import Recorded
from engine.moe.held import held_by
from engine.moe.timing import Recorder
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.local import LocalExecutor, make_local_executor
from engine.runtimes.torch.ring_executor import RingExecutor


def make_on_cpu(
    held: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    recorder: Recorder,
    request: Load,
    ring: RingPlace | None,
    trunk_bytes: int,
) -> tuple[RingExecutor | LocalExecutor, list[str]]:
    """The executor of this machine alone, or of the node at ``ring``, and a line for each fallback.

    ``held`` are the experts to be run here, ``trunk_bytes`` are still to be loaded.
    """
    local = make_local_executor(held, gates, dtype, torch.device("cpu"), recorder, request.cpu_threads, trunk_bytes)
    lines = list(local.notices)
    if ring is None:
        return local.executor, lines
    if isinstance(ring.exchange, Recorded):
        ring.exchange.recorder = recorder
    return RingExecutor(local.executor, ring, held.layers, held.count, recorder), lines


def experts_here(experts: Experts | None, ring: RingPlace | None) -> Experts | None:
    """The experts that this node runs. Raises ModelError if it lacks one."""
    if experts is None or ring is None:
        return experts
    return held_by(experts, ring.context.placement, ring.context.rank)
