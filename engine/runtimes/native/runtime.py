"""Loading a model with the native trunk, and the reasons why it cannot load one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine import runtimes
from engine.calibration.reading_rates import notice_beyond_memory
from engine.errors import ModelError
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import native_copies, weights_name
from engine.models.formats.model_files import Experts, ModelFiles, StoredTensor, whole_weights
from engine.models.formats.number_formats import BLOCKS, is_grouped
from engine.moe.executor import RingExecutor
from engine.moe.expert_parallel import RankContext
from engine.moe.held import held_by
from engine.moe.kernels.bindings import FORMATS, KernelChoice, choose
from engine.moe.kernels.file_guard import unchanged
from engine.moe.kernels.layers import unreadable
from engine.moe.kernels.pool import physical_cores, shared_pool
from engine.moe.popularity import Popularity
from engine.moe.timing import Recorder
from engine.runtimes.native import rotary
from engine.runtimes.native.experts_only import open_backend, unreadable_experts
from engine.runtimes.native.model import NativeModel
from engine.runtimes.native.ring import RingTrunk
from engine.runtimes.native.shape import Shape, bulk_dtype, compute_dtype, read_shape, unsupported_shape
from engine.runtimes.native.weights import TrunkWeights, heads_of
from engine.runtimes.protocol import RingPlace
from engine.system.free_memory import available_bytes

_STORED: Mapping[str, Literal["BF16", "F32"]] = {"bfloat16": "BF16", "float32": "F32"}


class NativeRuntime:
    """See :class:`engine.runtimes.protocol.Runtime`."""

    @property
    def name(self) -> str:
        return "native"

    def load(
        self,
        folder: Path,
        request: Load,
        progress: ProgressCallback,
        ring: RingPlace | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> NativeModel:
        """Load the model in ``folder``; all its weights stay in the mapped files.

        With ``ring`` only the experts of its rank context are used, and its exchange gets the model's recorder.
        Raises ModelError if the native trunk cannot run it, saying why, or the files are damaged
        or change meanwhile.
        """
        started = time.perf_counter()
        files = open_model(folder, progress)
        threads = physical_cores() if request.cpu_threads is None else request.cpu_threads
        if threads < 1:
            raise ModelError(f"{threads} CPU threads cannot run a model; choose 1 or more.", kind="bad-input")
        experts = files.experts
        popularity = None if experts is None else Popularity(experts.layers, experts.count)
        with unchanged(files.mapped_files):
            opened = open_native(files, request, popularity, in_ring=ring is not None)
        shape, dtype, choice = opened.shape, opened.dtype, opened.choice
        release()
        recorder = Recorder(shape.layers, shape.moe_layers, 0 if experts is None else experts.count)
        progress("reading the trunk", files.trunk_bytes, files.trunk_bytes, "bytes")
        load_s = time.perf_counter() - started
        context = None if ring is None else ring.context
        facts = describe(shape, files, request, dtype, choice, threads, opened.cache_format, load_s, context)
        if request.key_values == "q8_0" and opened.cache_format != "Q8_0":
            widths = " and ".join(str(kind.width) for kind in shape.kinds)
            said = f"Keys and values are kept in {dtype}: heads of {widths} numbers do not fit the 8-bit format."
            facts = msgspec.structs.replace(facts, notices=[*facts.notices, said])
        if ring is None:
            nbytes = files.trunk_bytes + (0 if experts is None else experts.nbytes)
            beyond = notice_beyond_memory("weights", nbytes, files.mapped_files, available_bytes())
            if beyond is not None:
                facts = msgspec.structs.replace(facts, notices=[*facts.notices, beyond])
                if experts is not None:
                    opened.weights.read_ahead(experts)
        pool = shared_pool(threads)
        trunk = None
        if ring is not None and experts is not None:
            backend = open_backend(experts, ring.context, shape.gate, choice, pool)
            layers = tuple(experts.layers)
            executor = RingExecutor(backend, ring.exchange, ring.context, layers, experts.count, recorder)
            trunk = RingTrunk(executor, backend, layers, shape.top_k, shape.hidden, ring.logits)
            popularity = executor.popularity
        weights, angles = opened.weights, opened.angles
        cache = opened.cache_format
        return NativeModel(shape, weights, angles, facts, recorder, files, pool, popularity, cache, trunk)


@dataclass(frozen=True)
class Opened:
    """A checked model, ready for the native trunk. Of its weights only norms and what must be copied have been read."""

    shape: Shape
    dtype: str
    choice: KernelChoice
    cache_format: str
    """Storage format of keys and values: ``BF16``, ``F32`` or ``Q8_0``."""
    weights: TrunkWeights
    angles: tuple[rotary.Rotary, ...]
    """Rotary frequencies of each kind of heads."""


def open_native(files: ModelFiles, request: Load, popularity: Popularity | None, in_ring: bool) -> Opened:
    """``files`` for the native trunk. ``in_ring``: the routed experts are run elsewhere.

    Raises ModelError if it cannot run them as ``request`` asks, saying why, or they are damaged.
    """
    refuse_not_native(files, request, in_ring)
    dtype = compute_dtype(files, request)
    choice, exact = choose(dtype), choose("float32")
    shape = read_shape(files.config, () if files.experts is None else files.experts.layers)
    packs = request.key_values == "q8_0" and all(kind.width % BLOCKS["Q8_0"][0] == 0 for kind in shape.kinds)
    cache = "Q8_0" if packs else _STORED[dtype]
    weights = TrunkWeights(files, shape, choice, exact, cache, popularity, in_ring)
    return Opened(shape, dtype, choice, cache, weights, _angles(shape))


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


# --- facts of a loaded model -----------------------------------------------------------------------------------------


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
