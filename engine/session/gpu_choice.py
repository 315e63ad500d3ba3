"""The decision whether a model goes onto the GPU if nobody chose, from the times of GPU and CPU, measured now if
needed.

The torch runtime shares experts with a GPU. Without a GPU the native runtime is faster than torch, so this is decided
before the runtime is chosen.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from engine import runtimes
from engine.calibration.calibration_file import calibration_key, load_calibration, save_calibration, shape_of
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.runtimes import choosing
from engine.system.machine import Gpu, gpu

BUDGET_S = 4.0
"""Seconds for measuring. ``bench experts`` takes longer and is more accurate."""


def settle_gpu(
    request: Load, folder: Path, loaded: ModelFacts | None, progress: ProgressCallback
) -> tuple[Load, list[str]]:
    """``request``, for the CPU if the model in ``folder`` is better off there, and lines about that for the person.

    ``loaded`` is the model that is loaded now, whose memory would be freed. Raises ModelError as opening the model
    does, Cancelled.
    """
    chosen = request.partitioning != "auto" or request.gpu_expert_bytes is not None
    if chosen or request.runtime not in ("auto", "torch") or choosing.on_apple_silicon() or not runtimes.gpu_present():
        return request, []
    graphics = gpu()
    if graphics is None:  # one that the driver's program does not list: the torch runtime asks torch
        return request, []
    from engine.session.plan_model import plan_here

    usable, lines = _measured_once(request, folder, graphics, progress)
    on_cpu = msgspec.structs.replace(request, partitioning="cpu")
    if not usable:
        return on_cpu, lines
    found = plan_here(request, folder, loaded, [])
    if found.plan.on_gpu:
        return request, lines
    return on_cpu, [*lines, f"Everything runs on the CPU: {found.plan.choices[0].reason}."]


def _measured_once(request: Load, folder: Path, graphics: Gpu, progress: ProgressCallback) -> tuple[bool, list[str]]:
    """Measure the experts of the model in ``folder`` on GPU and CPU and keep the figures, if there are none yet.

    Returns whether the GPU can be used, and lines for the person.
    """
    from engine.runtimes.model_headers import read_headers

    headers = read_headers(folder, request)
    if headers.shape is None:
        return True, []
    key = calibration_key(headers.sizes.dtype, request.cpu_threads, graphics.name)
    kept = load_calibration(headers.shape, key)
    # Figures from before operations were timed are of other kernels.
    if kept is not None and kept.gpu_operation_s > 0:
        return True, []
    return _measured(request, folder, headers.sizes.dtype, headers.sizes.experts_per_token, graphics, progress)


def _measured(
    request: Load, folder: Path, dtype: str, experts_per_token: int, graphics: Gpu, progress: ProgressCallback
) -> tuple[bool, list[str]]:
    from engine.calibration.expert_cost import calibration_of, measure
    from engine.calibration.memory_rate import StreamingRead
    from engine.models.folders.opening import open_model
    from engine.moe.kernels.file_guard import unchanged
    from engine.moe.kernels.pool import threads_of
    from engine.runtimes.torch.offload import cuda_device
    from engine.runtimes.torch.offload.devices import DeviceError, DeviceLost
    from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, open_gpu_side

    files = open_model(folder, progress)
    experts = files.experts
    if experts is None or files.repacks:  # what is not repacked yet is zeros, which are read faster
        return True, []
    with unchanged(files.mapped_files):
        try:
            device = cuda_device.find_gpu()
            if device is None:
                reason = cuda_device.unusable_reason()
                return False, [f"torch cannot use {graphics.name} ({reason}), so everything runs on the CPU."]
            side, lines = open_gpu_side(device, experts, dtype, experts_per_token, progress)
            try:
                cpu = LocalCpuSide(experts, dtype, experts_per_token, request.cpu_threads)
                memory = StreamingRead(threads_of(request))
                figures = measure(cpu, side, memory.rate, time.perf_counter, progress, BUDGET_S)
            finally:
                with contextlib.suppress(DeviceError):
                    side.close()
        except DeviceLost as error:
            return False, [
                f"{graphics.name} stopped working while it was measured ({error}), so everything runs on the CPU; "
                "start privatellm again to give it another try."
            ]
        except DeviceError as error:
            return True, [f"{graphics.name} could not be measured ({error}): whether it is worth its use is a guess."]
    for name in {graphics.name, side.name}:  # torch and the driver may call it differently
        key = calibration_key(dtype, request.cpu_threads, name)
        try:
            save_calibration(calibration_of(figures, key, shape_of(experts)))
        except (OSError, ValueError) as error:
            lines = [*lines, f"What {name} and the CPU take for an expert cannot be kept: {error}."]
    return True, lines
