"""What a loaded native model tells about itself."""

from __future__ import annotations

import math

from engine.experts.kernels.bindings import KernelChoice
from engine.messages import Load, ModelFacts
from engine.models.files import ModelFiles
from engine.runtimes.native.shape import Shape


def describe(
    shape: Shape, files: ModelFiles, request: Load, dtype: str, choice: KernelChoice, threads: int, load_s: float
) -> ModelFacts:
    """The facts of the model in ``files``, which computes in ``dtype`` with the kernels ``choice``."""
    experts = files.experts
    numbers = sum(math.prod(tensor.shape) for _, tensor in files.trunk())
    if experts is not None:
        numbers += experts.nbytes // (2 if experts.dtype == "BF16" else 4)
    limit = shape.context if request.context_limit is None else min(shape.context, request.context_limit)
    return ModelFacts(
        name=request.model,
        family=shape.family,
        runtime="native",
        executor="none (dense)" if experts is None else f"native ({choice.name}, cpu)",
        device="cpu",
        dtype=dtype,
        layers=shape.layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=shape.top_k,
        moe_layers=list(shape.moe_layers),
        vocabulary=shape.vocabulary,
        hidden=shape.hidden,
        context_limit=limit,
        trunk_bytes=files.trunk_bytes,
        expert_bytes=0 if experts is None else experts.nbytes,
        key_value_bytes_per_token=shape.key_value_numbers * (2 if dtype == "bfloat16" else 4),
        parameters=numbers,
        load_s=load_s,
        trunk=f"native ({choice.name}, {threads} {'thread' if threads == 1 else 'threads'})",
        notices=["No GPU was found, so everything runs on the CPU."] if request.partitioning == "hybrid" else [],
    )
