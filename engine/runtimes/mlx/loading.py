"""Loading a model on mlx: the checks, decisions and notices before and after its weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.utils import get_total_parameters
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.architectures.families import FAMILIES, stated_experts_per_token
from engine.models.architectures.quantisation import readable_quantised
from engine.models.architectures.record import MlxRecord
from engine.models.folders.checkpoint import Checkpoint
from engine.models.folders.opening import open_model, read_config
from engine.models.folders.shard_files import part_of
from engine.models.folders.sizes import weights_name
from engine.models.folders.weight_layout import in_library_layout, layout_of
from engine.models.formats.model_files import Experts
from engine.models.formats.number_formats import WIDTHS
from engine.moe.executor import LocalExecutor, RingExecutor
from engine.moe.expert_parallel import Floats, Indices, RankContext
from engine.moe.held import check_held, held_by
from engine.moe.kernels.file_guard import unchanged
from engine.moe.timing import Recorder
from engine.planning.memory import USUAL_CONTEXT, windowed_tokens
from engine.runtimes.common.loading import refuse_ring_alone
from engine.runtimes.common.node_experts import NodeExperts
from engine.runtimes.mlx import eligible, gguf_files, weights, wired
from engine.runtimes.mlx.backend import MlxBackend, slots_of
from engine.runtimes.mlx.cache import cache_makers
from engine.runtimes.mlx.configuration import complete_config, context_of, translate_config
from engine.runtimes.mlx.experts import RingPass, RoutedBlock
from engine.runtimes.mlx.families import check_settings, family_of
from engine.runtimes.mlx.model import MlxModel, memory_named
from engine.runtimes.mlx.spans import Spans
from engine.runtimes.protocol import Config, RingPlace

_DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
_ATTENTIONS = ("self_attn", "linear_attn", "conv", "norm_attn_norm", "mamba")
"""Attributes of a decoder layer that hold its attention, or what it has in its place."""


@dataclass
class LoadingPlan:
    """The plan of loading a model."""

    folder: Path
    config: Config
    """Complete, before translation."""
    family: MlxRecord
    quantised: Config | None
    device: str
    notices: list[str]
    context: RankContext | None
    """The place in a ring."""
    weights: str = ""
    """The common name of a GGUF file's mixture of formats."""

    @property
    def only_here(self) -> bool:
        """Whether no other runtime reads the weights."""
        return self.quantised is not None and not readable_quantised(self.config)


def plan_loading(folder: Path, request: Load, context: RankContext | None) -> LoadingPlan:
    """The plan of loading ``folder``, in a ring at the place ``context``. Raises ModelError if it cannot be run, or is
    too large for this Mac's GPU."""
    found = _plan(folder, request, context)
    if context is None:
        whole = eligible.weight_bytes(folder, request.dtype)
        eligible.refuse_too_large(whole, eligible.working_set_bytes(), found.only_here)
    return found


def build(plan: LoadingPlan, request: Load, progress: ProgressCallback, ring: RingPlace | None) -> MlxModel:
    """Load the model of ``plan``. Raises ModelError if it is damaged, or does not fit."""
    with memory_named():
        dtype, loaded = _read(plan, request, progress)
    model = _assemble(plan, request, loaded, dtype, ring)
    # A pass over one token compiles the kernels, proves that the model runs, and shows the size of its keys and values.
    probe = model.start()
    try:
        with model.alone():
            probe.extend([0])
    except RuntimeError as error:
        raise ModelError(f"mlx cannot run this model here ({error}): choose the torch runtime") from error
    # The rows of a ring keep everything, as they are cut back together with other runtimes' rows.
    windowed, window = probe.windowed_bytes_per_position if ring is None else (0, 0)
    model.facts = msgspec.structs.replace(
        model.facts,
        key_value_bytes_per_token=probe.bytes_per_position(),
        state_bytes=probe.state_bytes(),
        windowed_bytes_per_token=windowed,
        window=window,
    )
    if request.keep_resident:
        # The usual size of a conversation, as most Macs do not have enough memory for the whole context of a long one.
        context = min(model.facts.context_limit, request.context_limit or USUAL_CONTEXT)
        # The states of a row, those of the step begun ahead, and those of a checkpoint.
        chunk = eligible.prefill_chunk(request.prefill_chunk, eligible.architecture())
        unseen = max(0, context - windowed_tokens(window, chunk))
        kept = model.facts.key_value_bytes_per_token * context - windowed * unseen
        said = model.wire(kept + 3 * model.facts.state_bytes)
        if said:
            model.facts = msgspec.structs.replace(model.facts, notices=[*model.facts.notices, said])
    return model


def load_experts(folder: Path, request: Load, progress: ProgressCallback, context: RankContext) -> WiredExperts:
    """The experts of ``context`` alone, for central mode.

    Raises ModelError if they cannot be run, are damaged, or do not fit.
    """
    plan = _plan(folder, request, context)
    with memory_named():
        _, loaded = _read(plan, request, progress, with_trunk=False)
    width = int(plan.config.get("hidden_size") or plan.config["d_model"])
    backend = _backend(plan, loaded)
    description = f"ring (node {context.rank + 1} of {context.nodes}, {context.mode}; {backend.description})"
    experts = WiredExperts(backend, width, description, loaded.experts, plan.notices)
    if request.keep_resident:
        experts.wire()
    return experts


def _plan(folder: Path, request: Load, context: RankContext | None) -> LoadingPlan:
    config = read_config(folder)
    family = family_of(config)
    if gguf_files.in_gguf(folder):
        gguf_files.refuse_unsupported(folder, context is not None)
    device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    _check_partitioning(request, device, context)
    complete = complete_config(folder, config)
    check_settings(complete, family)
    notices = []
    if request.cpu_threads is not None:
        notices.append(f"mlx chooses its own threads: the setting of {request.cpu_threads} is not used")
    return LoadingPlan(folder, complete, family, _quantisation(config), device, notices, context)


def _check_partitioning(request: Load, device: str, context: RankContext | None) -> None:
    refuse_ring_alone(request, context)
    if context is not None:
        return
    if request.partitioning == "hybrid":
        raise ModelError(
            "partitioning 'hybrid' is not for the mlx runtime, where GPU and CPU share one memory: choose auto",
            kind="bad-input",
        )
    if request.partitioning == "cpu" and device == "gpu":
        raise ModelError(
            "the mlx runtime runs on this Mac's GPU: for the CPU alone choose the torch runtime", kind="bad-input"
        )


def _quantisation(config: Config) -> Config | None:
    """The quantisation of a checkpoint that mlx-lm reads. Raises ModelError for one that was never tested."""
    problem = eligible.unsupported_quantisation(config)
    if problem is not None:
        raise ModelError(f"{problem}: choose the bfloat16 checkpoint or one quantised by mlx-lm")
    found = eligible.quantisation_of(config)
    return None if found is None else dict(found)


def _read(
    plan: LoadingPlan, request: Load, progress: ProgressCallback, with_trunk: bool = True
) -> tuple[str, weights.Assembled]:
    """The weights, and their type in words."""
    translated = translate_config(plan.config)
    entries = weights.entries_for_library(plan.folder)
    if plan.quantised is None and not in_library_layout(entries):
        files = open_model(plan.folder, progress)
        held: Experts | None = files.experts
        if held is not None and plan.context is not None:
            held = held_by(held, plan.context.placement, plan.context.rank)
        if files.is_gguf:
            return _read_gguf(plan, request, progress, files)
        stored = files.experts.dtype if files.experts else next(tensor.dtype for _, tensor in files.trunk())
        wanted = _wanted_dtype(plan, request, stored)
        size = (files.trunk_bytes if with_trunk else 0) + (held.nbytes if held else 0)
        _check_fits(int(size * _growth(stored, wanted)), plan)
        with unchanged(files.mapped_files):
            loaded = weights.from_files(files, held, translated, plan.family, wanted, progress, with_trunk)
        return _name(stored, wanted), loaded
    stored = next((entry.dtype for name, entry in entries.items() if name.endswith("norm.weight")), "F32")
    if plan.context is None:
        here, size = None, sum(entry.nbytes for entry in entries.values())
    else:
        here, size = _held_in_library(plan.folder, plan.context)
    if plan.quantised is not None:
        wanted = _DTYPES.get(request.dtype)
        growth, words = 1.0, f"{plan.quantised.get('bits', 4)}-bit, "
    else:
        wanted = _wanted_dtype(plan, request, stored)
        growth, words = _growth(stored, wanted), ""
    _check_fits(int(size * growth), plan)
    loaded = weights.from_library(plan.folder, translated, plan.family, wanted, progress, here, with_trunk)
    return words + _name(stored, wanted), loaded


def _read_gguf(
    plan: LoadingPlan, request: Load, progress: ProgressCallback, files: Checkpoint
) -> tuple[str, weights.Assembled]:
    """The weights of a GGUF file, and their type in words."""
    stored = gguf_files.dtype_of(files, request.dtype)
    # On a CPU, mlx multiplies by gathered matrices in float32 only.
    wanted = mx.float32 if plan.device == "cpu" else {**_DTYPES, "float16": mx.float16}[stored]
    dtype = _name("", wanted)
    if dtype != stored:
        plan.notices.append(f"dtype {stored} is not used: mlx on a CPU computes in float32")
    needed = gguf_files.laid_out_in_mlx(files, wanted.size)
    _check_fits(needed.nbytes, plan)
    if needed.is_packed:
        plan.notices.append(needed.notice(dtype))
    translated = translate_config(plan.config)
    with unchanged(files.mapped_files):
        loaded = weights.from_files(files, files.experts, translated, plan.family, wanted, progress)
    plan.weights = weights_name(files)
    return (f"{plan.weights}, {dtype}" if needed.is_packed else dtype), loaded


def _held_in_library(folder: Path, context: RankContext) -> tuple[dict[int, tuple[int, ...]], int]:
    """The experts of ``context`` by layer, of a folder in mlx-lm's layout, and the bytes of its trunk and of those.

    Raises ModelError if the ring's plan is not for this model, or some of them are not here.
    """
    layout = layout_of(folder)
    placement = context.placement
    part = part_of(folder)
    held = check_held(placement, context.rank, layout.layers, layout.count, part.held if part is not None else None)
    return held, layout.trunk_bytes + sum(map(len, held.values())) * layout.expert_bytes


def _wanted_dtype(plan: LoadingPlan, request: Load, stored: str) -> Any:
    """The type to convert weights of the type ``stored`` to, None to keep it."""
    if plan.device != "cpu":
        return _DTYPES.get(request.dtype)
    # On a CPU, mlx multiplies by gathered matrices in float32 only.
    if request.dtype == "bfloat16":
        plan.notices.append("dtype bfloat16 is not used: mlx on a CPU computes in float32")
    elif request.dtype == "auto" and stored != "F32":
        plan.notices.append(f"weights converted from {_name(stored)} to float32: mlx on a CPU computes in float32")
    return None if stored == "F32" else mx.float32


def _assemble(
    plan: LoadingPlan, request: Load, loaded: weights.Assembled, dtype: str, place: RingPlace | None
) -> MlxModel:
    moe = FAMILIES[plan.config["model_type"]].moe
    spans = Spans(Recorder(len(loaded.layers), loaded.moe_layers, loaded.count))
    spans.recorder.sampled = plan.device == "gpu"
    context = context_of(plan.config, plan.family)
    makers = cache_makers(loaded.model, context.window)
    rotary = correct_rotary(loaded.layers, plan.config.get("rope_parameters") or {})
    executor = _executor(plan, loaded, spans, place)
    description = executor.executor.description if isinstance(executor, RingPass) else executor.description
    trunk = _bytes(loaded.model)
    parameters = _parameters(loaded.model) + sum(map(_parameters, loaded.experts.values()))
    if moe is not None:
        for index in loaded.moe_layers:
            block = loaded.layers[index][plan.family.block]
            loaded.layers[index][plan.family.block] = RoutedBlock(
                block, index, loaded.count, moe, plan.family, executor, spans
            )
    notices = [*plan.notices, *(each for each in (context.notice, rotary) if each)]
    facts = ModelFacts(
        name=plan.folder.name,
        family=plan.config["model_type"],
        runtime="mlx",
        executor=description if loaded.moe_layers else "none (dense)",
        device=plan.device,
        dtype=dtype,
        layers=len(loaded.layers),
        experts=loaded.count,
        experts_per_token=(stated_experts_per_token(plan.config) or 0) if loaded.moe_layers else 0,
        moe_layers=list(loaded.moe_layers),
        vocabulary=int(plan.config["vocab_size"]),
        hidden=int(plan.config.get("hidden_size") or plan.config["d_model"]),
        context_limit=min(context.limit, request.context_limit or context.limit),
        trunk_bytes=trunk,
        expert_bytes=sum(map(_bytes, loaded.experts.values())),
        key_value_bytes_per_token=0,
        parameters=int(parameters),
        weights=plan.weights or _weights_name(plan.quantised, dtype),
        notices=notices,
    )
    attentions = [next(name for name in _ATTENTIONS if name in layer) for layer in loaded.layers]
    ring = executor if isinstance(executor, RingPass) else None
    logits = place is None or place.logits
    return MlxModel(loaded.model, plan.family.backbone, attentions, makers, spans, facts, ring, loaded.experts, logits)


def _weights_name(quantised: dict[str, Any] | None, dtype: str) -> str:
    """The common name of the weights' number format; empty if it is not known."""
    if quantised is None:
        return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(dtype, "")
    mode = str(quantised.get("mode", "affine"))
    return mode.upper() if mode.startswith("mxfp") else f"{quantised.get('bits', 4)}-bit"


def _executor(
    plan: LoadingPlan, loaded: weights.Assembled, spans: Spans, place: RingPlace | None
) -> LocalExecutor[Any] | RingPass:
    backend = _backend(plan, loaded)
    if place is None:
        return LocalExecutor(backend, spans.recorder)
    layers = place.context.placement.layers
    executor = RingExecutor(backend, place.exchange, place.context, layers, loaded.count, spans.recorder)
    return RingPass(executor, backend)


def _backend(plan: LoadingPlan, loaded: weights.Assembled) -> MlxBackend:
    if plan.context is None:
        return MlxBackend(loaded.experts, plan.device)
    placement, rank = plan.context.placement, plan.context.rank
    slots = {layer: slots_of(placement, rank, layer) for layer in placement.layers}
    return MlxBackend(loaded.experts, plan.device, slots)


def _check_fits(needed: int, plan: LoadingPlan) -> None:
    """Raises ModelError if ``needed`` bytes of weights do not fit in the free memory."""
    limit = eligible.working_set_bytes()
    if limit is not None:
        eligible.refuse_too_large(needed, limit - mx.get_active_memory(), plan.only_here)
        return
    free = int(psutil.virtual_memory().available)
    if needed > free:
        raise ModelError(
            f"the weights need {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free, "
            f"{(needed - free) / 1e9:.1f} GB too little: choose a smaller or a 4-bit model",
            kind="memory",
        )


def _parameters(module: Any) -> int:
    """Number of weights; mlx-lm counts those of modules without modules in them."""
    whole = [each for _, each in module.named_modules() if each.children()]
    beside = sum(int(array.size) for each in whole for array in each.values() if isinstance(array, mx.array))
    return int(get_total_parameters(module)) + beside


def _bytes(module: Any) -> int:
    return sum(int(array.nbytes) for _, array in tree_flatten(module.parameters()))


def _growth(stored: str, wanted: Any) -> float:
    """The factor by which weights grow in the conversion from ``stored`` to ``wanted``."""
    return wanted.size / WIDTHS[stored] if wanted else 1.0


def _name(stored: str, wanted: Any = None) -> str:
    if wanted is not None:
        return str(wanted).rsplit(".", 1)[-1]
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(stored, stored)


# --- the rotary setting that mlx-lm drops ----------------------------------------------------------------------------


def correct_rotary(layers: list[Any], rope: Config) -> str | None:
    """Gives the attention of ``layers`` the frequencies that ``rope`` (``rope_parameters``) asks for.

    Returns a notice if it had to change what mlx-lm computed.
    """
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return None
    for layer in layers:
        module = layer.self_attn.rope if "self_attn" in layer else None
        if isinstance(module, YarnRoPE):
            module._freqs = mx.array(yarn_wavelengths(module.dims, rope))
    return "rotary frequencies as the model defines them (yarn without truncation), where mlx-lm rounds"


def yarn_wavelengths(dims: int, rope: Config) -> NDArray[np.float32]:
    """The inverse frequencies [dims / 2] of yarn without rounding, as ``mx.fast.rope`` takes them."""
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    original = float(rope["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(dimension_of(float(rope.get("beta_fast") or 32.0)), 0.0)
    high = min(dimension_of(float(rope.get("beta_slow") or 1.0)), dims - 1.0)
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(dims // 2) - low) / width, 0.0, 1.0)
    wavelengths = base ** (np.arange(0, dims, 2) / dims)
    frequencies = (1.0 - interpolated) / wavelengths + interpolated / (factor * wavelengths)
    return np.asarray(1.0 / frequencies, dtype=np.float32)


# --- experts without a trunk -----------------------------------------------------------------------------------------


class WiredExperts(NodeExperts):
    """Node experts that the system may be asked to keep in the GPU's memory: ``weights`` are their modules by layer."""

    def __init__(
        self,
        backend: MlxBackend,
        width: int,
        description: str,
        weights: Mapping[int, Any],
        notices: Sequence[str] = (),
    ) -> None:
        super().__init__(backend, width, description, notices=notices)
        self._weights = dict(weights)
        self._wired = False

    def wire(self) -> None:
        """Have the system keep the weights in the GPU's memory until they are closed. A line is added to the notices
        if it will not keep all of them."""
        self._wired = True
        nbytes = sum(int(array.nbytes) for array in wired.arrays_of(None, self._weights))
        self.weights_are_wired, said = wired.wire(nbytes, 0)
        self.notices += [said] if said else []

    def hold_weights(self, wanted: bool) -> None:
        if self._wired:
            wired.LIMIT.hold(wanted)

    def kept_weights(self) -> wired.MlxWeights:
        return wired.MlxWeights(wired.arrays_of(None, self._weights))

    def run_experts(
        self,
        layer: int,
        hidden: Floats,
        indices: Indices,
        weights: Floats,
        extra: Sequence[int] = (),
        scale: bool = False,
        reads: bool = False,
    ) -> Floats:
        """See :class:`engine.runtimes.common.node_experts.NodeExperts`. Raises ModelError if memory runs out."""
        with memory_named():
            return super().run_experts(layer, hidden, indices, weights, extra, scale, reads)

    def close(self) -> None:
        """Free the memory."""
        super().close()
        self._weights = {}
        if self._wired:
            wired.LIMIT.restore()
            self._wired = False
        mx.clear_cache()
