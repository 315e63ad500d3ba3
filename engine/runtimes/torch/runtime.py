"""Loading a model with torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.formats.model_files import Experts, ModelFiles
from engine.moe.executor import Executor
from engine.moe.kernels.cpu_threads import threads_of
from engine.moe.kernels.file_guard import unchanged
from engine.moe.timing import Recorder
from engine.runtimes.protocol import RingPlace
from engine.runtimes.torch.experts_module import ExpertsPlace, experts_per_token, find_experts, gate_of, replace_experts
from engine.runtimes.torch.facts import describe
from engine.runtimes.torch.fused_norms import fuse_norms
from engine.runtimes.torch.gpu_memory_plan import (
    GpuFinder,
    SharedRoom,
    closed_on_failure,
    find_room,
    open_cache,
    refuse_partitioning,
)
from engine.runtimes.torch.joined_projection import expect_two_projections
from engine.runtimes.torch.latent_attention import attend_to_latents, expect_split_latents
from engine.runtimes.torch.loading import build_skeleton, fill_trunk, read_config
from engine.runtimes.torch.model import TorchModel
from engine.runtimes.torch.offload.cuda_device import find_gpu
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.tensor_backend import TensorBackend
from engine.runtimes.torch.offload.torch_tensors import NAMES, computed_dtype
from engine.runtimes.torch.ring import experts_here, make_backend, make_executor


class TorchRuntime:
    """See :class:`engine.runtimes.protocol.Runtime`. ``find_gpu`` finds the device that shares the experts."""

    def __init__(self, find_gpu: GpuFinder = find_gpu) -> None:
        self._find_gpu = find_gpu

    @property
    def name(self) -> str:
        return "torch"

    def load(
        self,
        folder: Path,
        request: Load,
        progress: ProgressCallback,
        ring: RingPlace | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> TorchModel:
        """Load the model in ``folder``; its routed experts stay in the mapped files.

        In a ring the trunk is on the CPU; a GPU shares this node's experts with it.

        Raises ModelError if the family is not supported, the files are damaged or change meanwhile, or the request
        cannot be met here.
        """
        started = time.perf_counter()
        if request.cpu_threads is not None:
            set_threads(request.cpu_threads)
        elif ring is not None:
            # As many as the other nodes were told: the order in which torch adds up depends on it.
            set_threads(threads_of(request))
        files = open_model(folder, progress)
        with unchanged(files.mapped_files):
            return self._read(files, request, progress, ring, release, started)

    def _read(
        self,
        files: ModelFiles,
        request: Load,
        progress: ProgressCallback,
        ring: RingPlace | None,
        release: Callable[[], None],
        started: float,
    ) -> TorchModel:
        config = read_config(files.folder, files.config)
        dtype = pick_dtype(files, request)
        module: Any = build_skeleton(config, dtype)
        places = find_experts(module)
        check_layers(places, files.experts)
        refuse_partitioning(request, in_ring=ring is not None)
        # The memory that a GPU has for this model is counted after the one before has left it.
        release()
        room, lines = find_room(self._find_gpu, files, dtype, request, in_ring=ring is not None)
        device = room.device.torch_device if room is not None and ring is None else torch.device("cpu")
        recorder = Recorder(config.num_hidden_layers, [place.layer for place in places], count_of(files.experts))
        recorder.sampled = device.type == "cuda"
        executor: Executor[torch.Tensor] | None = None
        backend: TensorBackend | None = None
        held = experts_here(files.experts, ring)
        if held is not None:
            gates = {place.layer: gate_of(place.experts) for place in places}
            trunk_bytes = sizes_of(files, NAMES[dtype]).for_runtime("torch").trunk_bytes
            backend, said = make_backend(held, gates, dtype, recorder, request, room, trunk_bytes)
            lines += said
            executor = make_executor(backend, held, recorder, ring)
            replace_experts(module, places, executor)
        top_k = experts_per_token(places)
        shared: SharedRoom | None = None
        with closed_on_failure(backend):
            names = [name for name, _ in files.trunk()]
            expect_split_latents(module, names)
            expect_two_projections(module, names)
            fill_trunk(module, files, dtype, device, progress)
            attend_to_latents(module)
            if device.type == "cuda":
                fuse_norms(module)
            if isinstance(backend, HybridBackend) and room is not None:
                shared = SharedRoom(backend, room, request)
                lines += open_cache(backend, room, files, request, top_k, progress)
        load_s = time.perf_counter() - started
        facts = describe(module, config, files, request, device, dtype, executor, shared, held, top_k, load_s, lines)
        logits = ring is None or ring.logits
        return TorchModel(module, config, facts, recorder, device, files, executor, shared, logits)


def set_threads(threads: int) -> None:
    """Let torch use ``threads`` CPU threads."""
    if threads < 1:
        raise ModelError(f"{threads} CPU threads cannot run a model; choose 1 or more.", kind="bad-input")
    torch.set_num_threads(threads)


def pick_dtype(files: ModelFiles, request: Load) -> torch.dtype:
    """What is computed in: as the request says, or as the bulk of the checkpoint is stored; bfloat16 if that is
    packed."""
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
    """Raises ModelError if the files hold experts for other layers than the model has them in."""
    wanted = sorted(place.layer for place in places)
    found = [] if experts is None else list(experts.layers)
    if wanted != found:
        raise ModelError(
            f"config.json says that layers {wanted} have routed experts, but the files hold them for layers {found}; "
            "the files do not belong together: fetch or prepare the model again."
        )


def count_of(experts: Experts | None) -> int:
    return 0 if experts is None else experts.count
