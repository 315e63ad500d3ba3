"""Loading a model with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from engine.errors import ModelError
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of, weights_name
from engine.models.formats.model_files import Experts, ModelFiles, whole_weights, width_of
from engine.moe.executor import Executor, LocalExecutor, RingExecutor
from engine.moe.expert_parallel import RankContext
from engine.moe.held import held_by, held_in
from engine.moe.kernels.file_guard import unchanged
from engine.moe.kernels.pool import threads_of
from engine.moe.timing import Recorder
from engine.runtimes.common.loading import Runtime, files_with_experts, refuse_no_threads, refuse_ring_alone
from engine.runtimes.common.node_experts import NodeExperts
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.experts_module import ExpertsPlace, experts_per_token, find_experts, replace_experts
from engine.runtimes.torch.gpu_memory_plan import (
    GpuFinder,
    Room,
    SharedRoom,
    closed_on_failure,
    find_room,
    make_hybrid,
    open_cache,
)
from engine.runtimes.torch.indexed_attention import attend_to_all_while_few
from engine.runtimes.torch.limits import gates_of, limit_networks
from engine.runtimes.torch.loading import build_skeleton, fill_trunk, read_config
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload.cuda_device import find_gpu
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from engine.runtimes.torch.offload.torch_tensors import NAMES, computed_dtype
from engine.runtimes.torch.packed_modules import numbers_kept_packed
from engine.runtimes.torch.trunk_modules import (
    attend_to_latents,
    expect_split_latents,
    expect_three_convolutions,
    expect_two_projections,
    fuse_norms,
    join_convolutions,
)
from engine.runtimes.torch.unrecorded import UNRECORDED, check, is_unrecorded, load_whole, state_bytes


@dataclass(frozen=True)
class Skeleton:
    """A model as transformers builds it, without memory for its tensors, and the files that fill it."""

    files: ModelFiles
    config: Any
    dtype: torch.dtype
    module: Any
    places: list[ExpertsPlace]

    @classmethod
    def of(cls, files: ModelFiles, request: Load) -> Skeleton:
        """Raises ModelError if transformers cannot build the model, or it cannot be computed with its dtype."""
        config = read_config(files.folder, files.config)
        dtype = pick_dtype(files, request)
        module = build_skeleton(config, dtype)
        return cls(files, config, dtype, module, [] if is_unrecorded(files.config) else find_experts(module))

    def recorder(self, experts: int) -> Recorder:
        """A recorder of the layers, which have ``experts`` routed experts each."""
        return Recorder(self.config.num_hidden_layers, [place.layer for place in self.places], experts)


class TorchRuntime(Runtime):
    """Runs models by transformers; their routed experts stay in the mapped files.

    ``find_gpu`` finds the device that shares the experts. In a ring the trunk is on the CPU; a GPU shares this node's
    experts with it.
    """

    name = "torch"

    def __init__(self, find_gpu: GpuFinder = find_gpu) -> None:
        self._find_gpu = find_gpu

    def _checked(
        self, folder: Path, request: Load, progress: ProgressCallback, ring: RingPlace | None
    ) -> Callable[[], TorchModel]:
        refuse_no_threads(request)
        if request.cpu_threads is not None or ring is not None:
            # In a ring as many as the other nodes were told: the order in which torch adds up depends on it.
            torch.set_num_threads(request.cpu_threads or threads_of(request))
        files = open_model(folder, progress)
        skeleton = Skeleton.of(files, request)
        check_layers(skeleton.places, files.experts)
        if is_unrecorded(files.config):
            progress("trying a small model of the family", 0, 0, "")
            check(skeleton.config, partial(small_model, skeleton, request))
        refuse_ring_alone(request, None if ring is None else ring.context)
        return partial(self._build, skeleton, request, progress, ring)

    def _build(
        self, skeleton: Skeleton, request: Load, progress: ProgressCallback, ring: RingPlace | None
    ) -> TorchModel:
        files, module, dtype = skeleton.files, skeleton.module, skeleton.dtype
        with unchanged(files.mapped_files):
            room, lines = find_room(self._find_gpu, files, dtype, request, in_ring=ring is not None)
            lines += files.repack(progress, held_in(files.experts, None if ring is None else ring.context))
            device = room.device.torch_device if room is not None and ring is None else torch.device("cpu")
            recorder = skeleton.recorder(0 if files.experts is None else files.experts.count)
            recorder.sampled = device.type == "cuda"
            executor: Executor[torch.Tensor] | None = None
            backend: TensorBackend | None = None
            held = files.experts
            if held is not None:
                if ring is not None:
                    held = held_by(held, ring.context.placement, ring.context.rank)
                trunk_bytes = sizes_of(files, NAMES[dtype]).for_runtime("torch").trunk_bytes
                backend, said = make_backend(held, skeleton, recorder, request, room, trunk_bytes)
                lines += said
                executor = make_executor(backend, held, recorder, ring)
                replace_experts(module, skeleton.places, executor)
            top_k = experts_per_token(skeleton.places)
            shared: SharedRoom | None = None
            with closed_on_failure(backend):
                if is_unrecorded(files.config):
                    module = load_whole(files, skeleton.config, dtype, device, progress)
                    facts = describe(replace(skeleton, module=module), request, device, lines=[*lines, UNRECORDED])
                    model = TorchModel(module, skeleton.config, facts, recorder, device, files, None)
                    model.facts = msgspec.structs.replace(facts, state_bytes=state_bytes(model))
                    return model
                names = [name for name, _ in files.trunk()]
                expect_split_latents(module, names)
                expect_two_projections(module, names)
                expect_three_convolutions(module, names)
                fill_trunk(module, files, dtype, device, progress)
                limit_networks(module, files.config)
                attend_to_latents(module)
                join_convolutions(module)
                attend_to_all_while_few(module)
                if device.type == "cuda":
                    fuse_norms(module)
                if isinstance(backend, HybridBackend) and room is not None:
                    shared = SharedRoom(backend, room, request)
                    lines += open_cache(backend, room, files, request, top_k, progress)
            facts = describe(skeleton, request, device, executor, shared, held, top_k, lines)
            logits = ring is None or ring.logits
            return TorchModel(module, skeleton.config, facts, recorder, device, files, executor, shared, logits)

    def load_experts(
        self, folder: Path, request: Load, context: RankContext, progress: ProgressCallback
    ) -> NodeExperts:
        files, experts = files_with_experts(folder, request, progress)
        skeleton = Skeleton.of(files, request)
        held = held_by(experts, context.placement, context.rank)
        room, lines = find_room(self._find_gpu, files, skeleton.dtype, request, in_ring=True)
        with unchanged(files.mapped_files):
            lines += files.repack(progress, held_in(experts, context), trunk=False)
        backend, said = make_backend(held, skeleton, skeleton.recorder(held.count), request, room)
        lines += said
        if isinstance(backend, HybridBackend) and room is not None:
            with closed_on_failure(backend):
                lines += open_cache(backend, room, files, request, experts_per_token(skeleton.places), progress)
        return NodeExperts(backend, width_of(experts), backend.description, held, lines)


def small_model(skeleton: Skeleton, request: Load, module: nn.Module) -> TorchModel:
    """``module``, a small model in float32 like ``skeleton``, as a model of this runtime."""
    small = replace(skeleton, module=module, config=module.config, dtype=torch.float32)
    device = torch.device("cpu")
    facts = describe(small, request, device)
    return TorchModel(module, small.config, facts, small.recorder(0), device, small.files, None)


def pick_dtype(files: ModelFiles, request: Load) -> torch.dtype:
    """The dtype to compute in: as requested, or that of most stored weights; bfloat16 if they are packed."""
    if request.dtype != "auto":
        return {name: dtype for dtype, name in NAMES.items()}[request.dtype]
    if files.experts is not None:
        dtype = computed_dtype(files.experts.dtype)
    else:
        sizes: dict[torch.dtype, int] = {}
        for _, tensor in files.trunk():
            stored = computed_dtype(tensor.dtype)
            sizes[stored] = sizes.get(stored, 0) + tensor.nbytes
        dtype = max(sizes, key=lambda stored: sizes[stored])
    if dtype not in NAMES:
        raise ModelError(f"The model's weights are stored as {dtype}, which cannot be computed with; choose a dtype.")
    return dtype


def check_layers(places: list[ExpertsPlace], experts: Experts | None) -> None:
    """Raises ModelError if the files hold experts for other layers than the model's."""
    wanted = sorted(place.layer for place in places)
    found = [] if experts is None else list(experts.layers)
    if wanted != found:
        raise ModelError(
            f"config.json says that layers {wanted} have routed experts, but the files hold them for layers {found}; "
            "the files do not belong together: fetch or prepare the model again."
        )


# --- facts of a loaded model -----------------------------------------------------------------------------------------


def describe(
    skeleton: Skeleton,
    request: Load,
    device: torch.device,
    executor: Executor[torch.Tensor] | None = None,
    shared: SharedRoom | None = None,
    held: Experts | None = None,
    top_k: int = 0,
    lines: Sequence[str] = (),
) -> ModelFacts:
    """The facts of ``skeleton``, which has been filled.

    ``top_k``: experts per token. ``held``: the experts that run here. ``shared``: the GPU that shares them.
    """
    files, config, module, dtype = skeleton.files, skeleton.config, skeleton.module, skeleton.dtype
    experts = files.experts
    stored = {tensor.data_ptr(): tensor for tensor in module.state_dict().values()}.values()
    expert_parameters = 0 if experts is None else whole_weights(experts)
    sizes = sizes_of(files, NAMES[dtype])
    limit = int(getattr(config, "max_position_embeddings", sizes.context_limit))
    return ModelFacts(
        name=request.model,
        family=str(files.config["model_type"]),
        runtime="torch",
        executor="none (dense)" if executor is None else executor.description,
        device=device.type,
        dtype=NAMES[dtype],
        layers=config.num_hidden_layers,
        experts=0 if experts is None else experts.count,
        experts_per_token=top_k,
        moe_layers=[] if experts is None else list(experts.layers),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        context_limit=min(limit, request.context_limit or limit),
        trunk_bytes=sum(tensor.nbytes for tensor in stored),
        expert_bytes=0 if held is None else held.nbytes,
        key_value_bytes_per_token=sizes.key_value_bytes_per_token,
        state_bytes=sizes.state_bytes,
        parameters=sum(p.numel() for p in module.parameters()) + numbers_kept_packed(module) + expert_parameters,
        load_s=0.0,
        weights=weights_name(files),
        trunk=f"transformers (torch, {device.type})",
        policy=request.policy if shared is not None else None,
        gpu_expert_bytes=shared.backend.gpu_expert_bytes if shared is not None else 0,
        notices=list(lines),
    )


# --- whose experts are run, and by what ------------------------------------------------------------------------------


def make_backend(
    held: Experts, skeleton: Skeleton, recorder: Recorder, request: Load, room: Room | None, trunk_bytes: int = 0
) -> tuple[TensorBackend, list[str]]:
    """The backend for the experts ``held``, and a line for each fallback.

    ``room``: a GPU that shares them with the CPU. ``trunk_bytes``: memory still to be taken.
    """
    gates = gates_of(skeleton.places, skeleton.files.config)
    if room is not None:
        return make_hybrid(room, held, gates, skeleton.dtype, recorder, request)
    backend, lines = make_cpu_backend(held, gates, skeleton.dtype, request.cpu_threads, trunk_bytes)
    return backend, list(lines)


def make_executor(
    backend: TensorBackend, held: Experts, recorder: Recorder, ring: RingPlace | None
) -> Executor[torch.Tensor]:
    """The executor of this machine alone, or of the node at ``ring``."""
    if ring is None:
        return LocalExecutor(backend, recorder)
    return RingExecutor(backend, ring.exchange, ring.context, held.layers, held.count, recorder)
