"""Loading a model with the native trunk, and the reasons why it cannot load one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine import runtimes
from engine.calibration.reading_rates import notice_beyond_memory
from engine.errors import ModelError
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import native_copies, weights_name
from engine.models.formats.model_files import Experts, ModelFiles, StoredTensor, one_of_each, whole_weights, width_of
from engine.models.formats.number_formats import BLOCKS, is_grouped, is_packed
from engine.moe.executor import RingExecutor
from engine.moe.expert_parallel import RankContext
from engine.moe.held import held_by, held_in
from engine.moe.kernel_backend import KernelBackend, KernelExperts
from engine.moe.kernels.bindings import FORMATS, KernelChoice, choose
from engine.moe.kernels.file_guard import unchanged
from engine.moe.kernels.layers import Gate, unreadable
from engine.moe.kernels.layers import unsupported_reason as unsupported_expert
from engine.moe.kernels.pool import Pool, physical_cores, shared_pool
from engine.moe.popularity import Popularity, model_of
from engine.moe.timing import Recorder
from engine.runtimes.common.loading import Runtime, files_with_experts, refuse_no_threads
from engine.runtimes.common.node_experts import NodeExperts
from engine.runtimes.native import rotary
from engine.runtimes.native.activations import expert_gates
from engine.runtimes.native.model import NativeModel, OpenedModel
from engine.runtimes.native.ring import RingTrunk
from engine.runtimes.native.shape import (
    Shape,
    bulk_dtype,
    compute_dtype,
    read_shape,
    unsupported_shape,
)
from engine.runtimes.native.weights import TrunkWeights, heads_of
from engine.runtimes.protocol import RingPlace
from engine.system.free_memory import available_bytes

_STORED: Mapping[str, Literal["BF16", "F32"]] = {"bfloat16": "BF16", "float32": "F32"}


class NativeRuntime(Runtime):
    """Runs models by our own kernels; all weights stay in the mapped files."""

    name = "native"

    def _checked(
        self, folder: Path, request: Load, progress: ProgressCallback, ring: RingPlace | None
    ) -> Callable[[], NativeModel]:
        files = open_model(folder, progress)
        refuse_no_threads(request)
        experts = files.experts
        popularity = None if experts is None else Popularity(experts.layers, experts.count, model_of(experts))
        in_ring = ring is not None
        with unchanged(files.mapped_files):
            if files.repacks:
                check_native(files, request, in_ring)
                return partial(self._build, partial(open_native, files, request, popularity, in_ring), files, request,
                               progress, ring)  # fmt: skip
            opened = open_native(files, request, popularity, in_ring)
        return partial(self._build, lambda: opened, files, request, progress, ring)

    def _build(
        self,
        opens: Callable[[], OpenedModel],
        files: ModelFiles,
        request: Load,
        progress: ProgressCallback,
        ring: RingPlace | None,
    ) -> NativeModel:
        context = None if ring is None else ring.context
        with unchanged(files.mapped_files):
            repacked = files.repack(progress, held_in(files.experts, context))
            opened = opens()
        shape, choice = opened.shape, opened.choice
        experts, threads = files.experts, _threads(request)
        progress("reading the trunk", files.trunk_bytes, files.trunk_bytes, "bytes")
        notices = repacked + _notices(opened, request)
        if ring is None:
            nbytes = files.trunk_bytes + (0 if experts is None else experts.nbytes) - files.repacked.computed
            beyond = notice_beyond_memory("weights", nbytes, files.mapped_files, available_bytes())
            if beyond is not None:
                notices.append(beyond)
                if experts is not None:
                    opened.weights.read_ahead(experts)
        facts = describe(opened, request, threads, context, notices)
        recorder = Recorder(shape.layers, shape.moe_layers, 0 if experts is None else experts.count)
        pool = shared_pool(threads)
        trunk = None
        if ring is not None and experts is not None:
            backend = open_backend(experts, ring.context, shape.expert_gates, choice, pool)
            layers = tuple(experts.layers)
            executor = RingExecutor(backend, ring.exchange, ring.context, layers, experts.count, recorder)
            trunk = RingTrunk(executor, backend, layers, shape, ring.logits)
            opened = replace(opened, popularity=executor.popularity)
        return NativeModel(opened, facts, recorder, pool, trunk)

    def load_experts(
        self, folder: Path, request: Load, context: RankContext, progress: ProgressCallback
    ) -> NodeExperts:
        files, experts = files_with_experts(folder, request, progress)
        reason = unsupported_shape(files.config) or unreadable_experts(experts)
        if reason is not None:
            raise ModelError(
                f"The native runtime cannot run the experts of {request.model}: {reason}; choose the runtime torch.",
                kind="bad-input",
            )
        choice = choose(compute_dtype(files, request))
        if not choice.native:
            raise ModelError(f"The native kernels cannot be used: {choice.reason}; choose the runtime torch.")
        gates, pool = expert_gates(files.config), shared_pool(_threads(request))
        with unchanged(files.mapped_files):
            repacked = files.repack(progress, held_in(experts, context), trunk=False)
        backend = open_backend(experts, context, gates, choice, pool)
        return NodeExperts(backend, width_of(experts), _in_ring(choice, context), experts, repacked)


def _threads(request: Load) -> int:
    return physical_cores() if request.cpu_threads is None else request.cpu_threads


def open_native(files: ModelFiles, request: Load, popularity: Popularity | None, in_ring: bool) -> OpenedModel:
    """``files`` for the native trunk. ``in_ring``: the routed experts are run elsewhere.

    Raises ModelError if it cannot run them as ``request`` asks, saying why, or they are damaged.
    """
    refuse_not_native(files, request, in_ring)
    dtype = compute_dtype(files, request)
    choice, exact = choose(dtype), choose("float32")
    shape = read_shape(files.config, () if files.experts is None else files.experts.layers)
    packed = request.key_values.upper()
    fits = packed in BLOCKS and all(width % BLOCKS[packed][0] == 0 for kind in shape.kinds for width in kind.widths)
    cache = packed if fits else _STORED[dtype]
    weights = TrunkWeights(files, shape, choice, exact, cache, popularity, in_ring)
    return OpenedModel(files, shape, dtype, choice, cache, weights, _angles(shape), popularity)


def check_native(files: ModelFiles, request: Load, in_ring: bool) -> None:
    """Raises ModelError as :func:`open_native` does.

    The matrices of routed experts are not checked again, which happened when the files were opened.
    """
    refuse_not_native(files, request, in_ring)
    shape = read_shape(files.config, () if files.experts is None else files.experts.layers)
    exact = choose("float32")
    TrunkWeights(files, shape, exact, exact, "F32", None, in_ring=True, checking=True)
    _angles(shape)


def _angles(shape: Shape) -> tuple[rotary.Rotary, ...]:
    """Rotary frequencies of each kind of heads. Raises ModelError if its settings give none."""
    return tuple(rotary.rotary(kind.rope, kind.rotated, shape.context) for kind in shape.kinds)


def refuse_not_native(files: ModelFiles, request: Load, in_ring: bool) -> None:
    """Raises ModelError (bad-input) if the native trunk does not run the model, saying why."""
    reason = unsupported_reason(files.config, files, request, in_ring=in_ring)
    if reason is not None:
        raise ModelError(
            f"The native runtime cannot run {request.model}: {reason}; choose the runtime auto or torch.",
            kind="bad-input",
        )


def unsupported_reason(
    config: Mapping[str, Any], files: ModelFiles, request: Load, in_ring: bool = False
) -> str | None:
    """Why the native trunk does not run this model as requested, in a few words; None if it does.

    ``in_ring``: the model is for a ring's node.
    """
    if in_ring and files.experts is None:
        return "it has no experts that machines could share"
    if request.partitioning == "ring" and not in_ring:
        return "it runs on one machine, and the partitioning is ring"
    if request.partitioning == "hybrid" and runtimes.gpu_present():
        return "it runs on the CPU alone, and the partitioning is hybrid"
    kernels = choose("bfloat16")
    if not kernels.native:
        return f"its kernels cannot be used: {kernels.reason}"
    return unsupported_shape(config) or _unsupported_storage(files, request)


def _unsupported_storage(files: ModelFiles, request: Load) -> str | None:
    for name, tensor in files.trunk():
        if tensor.dtype == "I64":
            continue  # whole numbers, which are compared and not computed with
        if tensor.dtype not in FORMATS:
            return f"the tensor {name} is stored as {tensor.dtype}"
        reason = _unreadable(tensor)
        if reason is not None:
            return f"the tensor {name} cannot be used where it lies ({reason})"
    found = None if files.experts is None else unreadable_experts(files.experts)
    if found is not None:
        return found
    if request.dtype == "bfloat16" and bulk_dtype(files) == "F32":
        return "the weights are stored as float32 and would have to be converted to bfloat16"
    return None


def _unreadable(tensor: StoredTensor) -> str | None:
    """Why the kernels cannot read a tensor of the trunk where it lies, or None. Tensors that are not matrices are
    copied."""
    if tensor.words.ndim == 1:
        return None
    return unreadable(heads_of(tensor)[0] if is_grouped(tensor.dtype) and tensor.words.ndim == 3 else tensor)


def unreadable_experts(experts: Experts) -> str | None:
    """Why the kernels cannot run these experts where they lie, in a few words; None if they can."""
    if experts.dtype not in FORMATS:
        return f"the experts are stored as {experts.dtype}"
    reasons = (unsupported_expert(experts.expert(layer, number)) for layer, number in one_of_each(experts))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None:
        return None
    advice = "" if is_packed(experts.dtype) else "; those of a prepared copy can"
    return f"its experts cannot be run where they lie ({reason}{advice})"


def open_backend(
    experts: Experts, context: RankContext, gates: Sequence[Gate], choice: KernelChoice, pool: Pool
) -> KernelBackend:
    """The experts of ``context``, ready to run, with the function of each layer. The weights stay in the mapped files.

    Raises ModelError if the context's placement is for another model, or an expert of this node is missing.
    """
    kernels = KernelExperts(held_by(experts, context.placement, context.rank), gates.__getitem__, choice, pool)
    kernels.open()
    return KernelBackend(kernels)


# --- facts of a loaded model -----------------------------------------------------------------------------------------


def describe(
    opened: OpenedModel, request: Load, threads: int, context: RankContext | None, notices: list[str]
) -> ModelFacts:
    """The facts of ``opened``, which computes with ``threads``; ``context`` is its place in a ring.

    Bytes are those of its shard there, parameters those of the whole model.
    """
    files, shape, choice = opened.files, opened.shape, opened.choice
    experts = files.experts
    numbers = sum(math.prod(tensor.shape) for _, tensor in files.trunk())
    executor, held_bytes = "none (dense)", 0
    if experts is not None:
        numbers += whole_weights(experts)
        executor, held_bytes = f"native ({choice.name}, cpu)", experts.nbytes
        if context is not None:
            executor, held_bytes = _in_ring(choice, context), held_by(experts, context.placement, context.rank).nbytes
    forgets = context is None and not shape.state_numbers
    return ModelFacts(
        name=request.model,
        family=shape.family,
        runtime="native",
        executor=executor,
        device="cpu",
        dtype=opened.dtype,
        layers=shape.layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=shape.top_k,
        moe_layers=list(shape.moe_layers),
        vocabulary=shape.vocabulary,
        hidden=shape.hidden,
        context_limit=min(shape.context, request.context_limit or shape.context),
        trunk_bytes=files.trunk_bytes + native_copies(files.trunk()),
        expert_bytes=held_bytes,
        key_value_bytes_per_token=shape.key_value_bytes(opened.cache_format),
        state_bytes=4 * shape.state_numbers,
        windowed_bytes_per_token=shape.key_value_bytes(opened.cache_format, windowed=True) if forgets else 0,
        window=max(map(shape.window_of, range(len(shape.kinds)))) if forgets else 0,
        parameters=numbers,
        load_s=0.0,
        weights=weights_name(files),
        trunk=f"native ({choice.name}, {threads} {'thread' if threads == 1 else 'threads'})",
        notices=notices,
    )


def _notices(opened: OpenedModel, request: Load) -> list[str]:
    notices = ["No GPU was found, so everything runs on the CPU."] if request.partitioning == "hybrid" else []
    if request.key_values not in ("auto", opened.cache_format.lower()):
        widths = " and ".join(dict.fromkeys(str(width) for kind in opened.shape.kinds for width in kind.widths))
        notices.append(
            f"Keys and values are kept in {opened.dtype}: heads of {widths} numbers do not fit {request.key_values}."
        )
    return notices


def _in_ring(choice: KernelChoice, context: RankContext) -> str:
    return f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}, native {choice.name}, cpu)"
