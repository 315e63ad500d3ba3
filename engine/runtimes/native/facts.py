"""The facts of a loaded native model."""

from __future__ import annotations

import math

from engine.ipc.messages import Load, ModelFacts
from engine.models.folders.sizes import native_copies
from engine.models.folders.weights_name import weights_name
from engine.models.formats.model_files import Experts, ModelFiles, whole_weights
from engine.moe.held import held_by
from engine.moe.kernels.bindings import KernelChoice
from engine.moe.rank_context import RankContext
from engine.runtimes.native.shape import Shape


def describe(
    shape: Shape,
    files: ModelFiles,
    request: Load,
    dtype: str,
    choice: KernelChoice,
    threads: int,
    cache_format: str,
    load_s: float,
    context: RankContext | None = None,
) -> ModelFacts:
    """The facts of the model in ``files``, which computes in ``dtype`` with the kernels ``choice`` and stores keys and
    values in ``cache_format``; ``context`` is its
    place in a ring. Bytes are those of its shard there, parameters those of the whole model."""
    experts = files.experts
    numbers = sum(math.prod(tensor.shape) for _, tensor in files.trunk())
    if experts is not None:
        numbers += whole_weights(experts)
    limit = shape.context if request.context_limit is None else min(shape.context, request.context_limit)
    return ModelFacts(
        name=request.model,
        family=shape.family,
        runtime="native",
        executor=_executor(files, choice, context),
        device="cpu",
        dtype=dtype,
        layers=shape.layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=shape.top_k,
        moe_layers=list(shape.moe_layers),
        vocabulary=shape.vocabulary,
        hidden=shape.hidden,
        context_limit=limit,
        trunk_bytes=files.trunk_bytes + native_copies(files.trunk()),
        expert_bytes=_expert_bytes(experts, context),
        key_value_bytes_per_token=shape.key_value_bytes(cache_format),
        state_bytes=4 * shape.state_numbers,
        parameters=numbers,
        load_s=load_s,
        weights=weights_name(files),
        trunk=f"native ({choice.name}, {threads} {'thread' if threads == 1 else 'threads'})",
        notices=["No GPU was found, so everything runs on the CPU."] if request.partitioning == "hybrid" else [],
    )


def _expert_bytes(experts: Experts | None, context: RankContext | None) -> int:
    if experts is None:
        return 0
    if context is None:
        return experts.nbytes
    return held_by(experts, context.placement, context.rank).nbytes


def _executor(files: ModelFiles, choice: KernelChoice, context: RankContext | None) -> str:
    if files.experts is None:
        return "none (dense)"
    if context is None:
        return f"native ({choice.name}, cpu)"
    return f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}, native {choice.name}, cpu)"
