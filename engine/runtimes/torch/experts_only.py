"""A node's experts without a trunk, for central mode: on torch or the native kernels, and on a GPU if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.moe.expert_parallel import RankContext
from engine.moe.held import held_by
from engine.moe.timing import Recorder
from engine.runtimes.node_experts import NodeExperts
from engine.runtimes.torch.experts_module import experts_per_token, find_experts, gate_of
from engine.runtimes.torch.gpu_memory_plan import GpuFinder, closed_on_failure, find_room, open_cache
from engine.runtimes.torch.loading import build_skeleton, read_config
from engine.runtimes.torch.offload.cuda_device import find_gpu
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.ring import make_backend
from engine.runtimes.torch.runtime import pick_dtype


def load_experts(
    folder: Path, request: Load, context: RankContext, progress: ProgressCallback, gpu: GpuFinder = find_gpu
) -> NodeExperts:
    """The experts of ``context`` from the model, or a shard of it, in ``folder``.

    ``gpu`` finds the device that shares them with the CPU.

    Raises ModelError if the family is not supported, or they are not here.
    """
    files = open_model(folder)
    if files.experts is None:
        raise ModelError(f"{request.model} has no experts to share; it runs on one machine.", kind="bad-input")
    config: Any = read_config(folder, files.config)
    dtype = pick_dtype(files, request)
    places = find_experts(build_skeleton(config, dtype))
    held = held_by(files.experts, context.placement, context.rank)
    recorder = Recorder(config.num_hidden_layers, held.layers, held.count)
    gates = {place.layer: gate_of(place.experts) for place in places}
    room, lines = find_room(gpu, files, dtype, request, in_ring=True)
    backend, said = make_backend(held, gates, dtype, recorder, request, room)
    lines += said
    if isinstance(backend, HybridBackend) and room is not None:
        with closed_on_failure(backend):
            lines += open_cache(backend, room, files, request, experts_per_token(places), progress)
    return NodeExperts(backend, int(config.hidden_size), backend.description, held, lines)
