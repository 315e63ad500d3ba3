"""The routed experts that one node of a ring runs by the native kernels.

A node in central mode consists of only these. In other modes its trunk uses them.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.folders.opening import open_model
from engine.models.formats.model_files import Experts, one_of_each
from engine.models.formats.number_formats import is_packed
from engine.moe.expert_parallel import RankContext
from engine.moe.held import held_by
from engine.moe.kernel_backend import KernelBackend, KernelExperts
from engine.moe.kernels.bindings import FORMATS, KernelChoice, choose
from engine.moe.kernels.layers import Gate, unsupported_reason
from engine.moe.kernels.pool import Pool, physical_cores, shared_pool
from engine.runtimes.native.shape import compute_dtype, read_gate, unsupported_shape
from engine.runtimes.node_experts import NodeExperts


def open_backend(experts: Experts, context: RankContext, gate: Gate, choice: KernelChoice, pool: Pool) -> KernelBackend:
    """The experts of ``context``, ready to run. The weights stay in the mapped files.

    Raises ModelError if the context's placement is for another model, or an expert of this node is missing.
    """
    kernels = KernelExperts(held_by(experts, context.placement, context.rank), lambda layer: gate, choice, pool)
    kernels.open()
    return KernelBackend(kernels)


def unreadable_experts(experts: Experts) -> str | None:
    """Why the kernels cannot run these experts where they lie, in a few words; None if they can."""
    if experts.dtype not in FORMATS:
        return f"the experts are stored as {experts.dtype}"
    reasons = (unsupported_reason(experts.expert(layer, number)) for layer, number in one_of_each(experts))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None:
        return None
    advice = "" if is_packed(experts.dtype) else "; those of a prepared copy can"
    return f"its experts cannot be run where they lie ({reason}{advice})"


def load_experts(folder: Path, request: Load, context: RankContext) -> NodeExperts:
    """The experts of ``context`` from the model, or a shard of it, in ``folder``.

    Raises ModelError if the kernels cannot run them, or the context's plan does not fit.
    """
    files = open_model(folder)
    experts = files.experts
    if experts is None:
        raise ModelError(f"{request.model} has no experts to share; it runs on one machine.", kind="bad-input")
    reason = unsupported_shape(files.config) or unreadable_experts(experts)
    if reason is not None:
        raise ModelError(
            f"The native runtime cannot run the experts of {request.model}: {reason}; choose the runtime torch.",
            kind="bad-input",
        )
    choice = choose(compute_dtype(files, request))
    if not choice.native:
        raise ModelError(f"The native kernels cannot be used: {choice.reason}; choose the runtime torch.")
    pool = shared_pool(physical_cores() if request.cpu_threads is None else request.cpu_threads)
    width = int(files.config["hidden_size"])
    backend = open_backend(experts, context, read_gate(files.config), choice, pool)
    description = f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}, native {choice.name}, cpu)"
    return NodeExperts(backend, width, description, experts)
