"""Loading a model whose experts a GPU and the CPU share: whether it fits, how much of it, by which calibration.

In a ring the GPU's memory is for experts alone: the trunk is on the CPU, where its bits are those of other machines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from engine.calibration.calibration_file import calibration_key, load_calibration, shape_of
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.ipc.progress import ProgressCallback
from engine.models.folders.sizes import sizes_of
from engine.models.formats.model_files import Experts, ModelFiles
from engine.moe.popularity import seed_order
from engine.moe.timing import Recorder
from engine.planning.calibration import Calibration, guessed, with_trunk_on_host
from engine.planning.hybrid import GPU_RUNTIME_BYTES, Device, gpu_room, slabs_kept
from engine.planning.memory import ModelSizes
from engine.planning.policy import Policy, policy_named
from engine.planning.units import byte_size
from engine.runtimes import gpu_present
from engine.runtimes.torch.offload.cuda_device import unusable_reason
from engine.runtimes.torch.offload.devices import DeviceLost, ExpertDevice
from engine.runtimes.torch.offload.gates import FamilyGate
from engine.runtimes.torch.offload.host_memory import HostExperts
from engine.runtimes.torch.offload.hybrid import HybridBackend
from engine.runtimes.torch.offload.local import make_cpu_backend
from engine.runtimes.torch.offload.torch_tensors import NAMES

GpuFinder = Callable[[], ExpertDevice | None]


@dataclass(frozen=True)
class Room:
    """A GPU with room for the trunk, keys and values, and workspace. ``expert_bytes`` are left for experts.

    In a ring the trunk is elsewhere.
    """

    device: ExpertDevice
    sizes: ModelSizes
    expert_bytes: int
    in_ring: bool = False


def find_room(
    find_gpu: GpuFinder, files: ModelFiles, dtype: torch.dtype, request: Load, in_ring: bool = False
) -> tuple[Room | None, list[str]]:
    """The GPU on which ``request`` puts the trunk, if any, and lines for the person about that choice.

    Raises ModelError (memory), naming the shortfall, if the GPU or memory on it was asked for and there is too little.
    """
    if request.partitioning == "cpu":
        return None, []
    try:
        device = find_gpu()
        free_now, total = device.memory() if device is not None else (0, 0)
    except DeviceLost as error:
        return None, [
            f"The GPU cannot be used ({error}), so everything runs on the CPU; leave privatellm and start it again to "
            "give the GPU another try."
        ]
    if device is None:
        if request.partitioning == "hybrid":
            return None, ["No GPU that torch can use was found, so everything runs on the CPU."]
        if gpu_present():
            return None, [
                f"This machine has a GPU, but torch cannot use it ({unusable_reason()}), so everything runs on the CPU"
                "; partitioning cpu says that this is wanted."
            ]
        return None, []
    free = _may_take(request, free_now, total)
    sizes = sizes_of(files, NAMES[dtype]).as_loaded(request, "torch", on_gpu=not in_ring)
    needed = sizes.experts_only() if in_ring else sizes
    room = gpu_room(needed, Device(device.name, total, free))
    wanted = request.gpu_expert_bytes
    if room >= (wanted or 0):
        return Room(device, needed, room if wanted is None else wanted, in_ring), []
    if free < free_now:
        return None, [
            f"{byte_size(free)} of {device.name} are lent, {byte_size(-room)} less than it takes to run experts there, "
            "so everything runs on the CPU; `privatellm join --gpu-memory` lends more."
        ]
    if request.partitioning == "auto" and wanted is None:
        return None, [
            f"{device.name} lacks {byte_size(-room)} of memory for the trunk, keys and values, and workspace, so "
            "everything runs on the CPU; a smaller context limit needs less."
        ]
    what = "for the trunk, keys and values, and workspace" if room < 0 else f"for {byte_size(wanted or 0)} of experts"
    raise ModelError(
        f"{device.name} has {byte_size(free)} free and lacks {byte_size((wanted or 0) - room)} {what}; choose less "
        "GPU memory for experts, a smaller context limit, or partitioning cpu.",
        kind="memory",
    )


def _may_take(request: Load, free: int, total: int) -> int:
    """Bytes of a GPU's ``free`` memory that ``request`` may take."""
    lent = request.most_gpu_memory
    return min(free, round(request.most_gpu_share * total), free if lent is None else lent)


def make_hybrid(
    room: Room,
    experts: Experts,
    gates: Mapping[int, FamilyGate],
    dtype: torch.dtype,
    recorder: Recorder,
    request: Load,
) -> tuple[HybridBackend, list[str]]:
    """The backend, with nothing on the GPU yet, and a line for each fallback."""
    notices: list[str] = []
    cpu, said = make_cpu_backend(experts, gates, dtype, request.cpu_threads)
    notices += said
    policy = policy_named(request.policy, experts.count)
    calibration = find_calibration(experts, dtype, request, room.device.name, notices)
    if room.in_ring:
        calibration = with_trunk_on_host(calibration)
    per_token, on_device = room.sizes.experts_per_token, not room.in_ring
    backend = HybridBackend(
        HostExperts(experts), room.device, cpu, gates, policy, calibration, dtype, recorder, per_token, on_device
    )
    return backend, notices


def find_calibration(experts: Experts, dtype: torch.dtype, request: Load, gpu: str, notices: list[str]) -> Calibration:
    """The calibration measured for these experts on this machine. Without one, an estimate and a line in
    ``notices``."""
    shape = shape_of(experts)
    found = load_calibration(shape, calibration_key(NAMES[dtype], request.cpu_threads, gpu), notices.append)
    if found is not None and found.gpu is not None:
        return found
    notices.append(
        f"What runs where rests on a guess, because {gpu} and this CPU were not measured with these experts; "
        "`privatellm bench experts` does it in a minute."
    )
    return guessed(shape, dtype.itemsize)


@contextlib.contextmanager
def closed_on_failure(backend: object) -> Iterator[None]:
    """Closes ``backend`` if loading fails or is cancelled, so that no locked pages and no GPU memory remain."""
    try:
        yield
    except BaseException:
        if isinstance(backend, HybridBackend):
            backend.close()
        raise


def open_cache(
    backend: HybridBackend, room: Room, files: ModelFiles, request: Load, top_k: int, progress: ProgressCallback
) -> list[str]:
    """Fill the GPU's memory beside the trunk with experts. Returns a line for each fallback."""
    notices = backend.prepare_device()
    policy: Policy = policy_named(request.policy)
    free, total = room.device.memory()
    filled = replace(room.sizes, trunk_bytes=0)
    left = gpu_room(filled, Device(room.device.name, total, free))
    # The trunk took what it took: what was planned is the most, what is left decides.
    slabs = slabs_kept(
        room.sizes, policy, min(room.expert_bytes, left) if request.gpu_expert_bytes is None else room.expert_bytes
    )
    if slabs < room.sizes.slabs:  # Experts that are all on the GPU are copied once, and need no other memory after it.
        notices += backend.lock_pages(progress, request.most_memory)
    order = seed_order(files, top_k, notices.append)
    notices += backend.open_cache(slabs * backend.slot_bytes, order, GPU_RUNTIME_BYTES // 2, progress)
    return notices + backend.check_results(progress)


@dataclass(frozen=True)
class SharedRoom:
    """The facts about how ``request`` was met that resizing needs."""

    backend: HybridBackend
    room: Room
    request: Load

    def resize(self, nbytes: int | None) -> int:
        """Give experts ``nbytes`` of the GPU's memory (None: all that is free). Returns their actual bytes.

        Raises ModelError (memory), naming the shortfall, if there is too little or the GPU is lost.
        """
        backend, room = self.backend, self.room
        has = backend.gpu_expert_bytes
        try:
            free, total = room.device.memory()
            # Slots on their way are taken already, and so is the trunk; of keys and values nobody knows how many.
            there = Device(room.device.name, total, free + has + backend.staging_bytes)
            most = max(has, gpu_room(replace(room.sizes, trunk_bytes=0), there))
            if nbytes is not None and nbytes > most:
                raise ModelError(
                    f"{room.device.name} lacks {byte_size(nbytes - most)} for {byte_size(nbytes)} of experts beside "
                    f"the trunk, keys and values, and workspace; choose {byte_size(most)} or less.",
                    kind="memory",
                )
            policy: Policy = policy_named(self.request.policy)
            slabs = slabs_kept(room.sizes, policy, most if nbytes is None else nbytes)
            return backend.resize(slabs * backend.slot_bytes)
        except DeviceLost as error:
            raise ModelError(f"{room.device.name} stopped working ({error}); load the model again.") from error
