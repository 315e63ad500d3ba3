"""Whether a model goes onto the GPU where nobody chose: what GPU and CPU would take, measured now if it never was.

The torch runtime shares experts with a GPU; without one the native runtime is faster than torch. So this is decided
before the runtime is chosen.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from engine import runtimes
from engine.calibration.calibration_file import calibration_key, load_calibration, save_calibration, shape_of
from engine.ipc.messages import Load, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.runtimes import choosing
from engine.system.machine import gpu

BUDGET_S = 4.0
"""Seconds for measuring; ``bench experts`` takes longer and is more accurate."""


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
    from engine.session.plan_model import plan_here

    lines = measure_once(request, folder, progress)
    found = plan_here(request, folder, loaded, [])
    if found.plan.on_gpu:
        return request, lines
    why = found.plan.choices[0].reason
    return msgspec.structs.replace(request, partitioning="cpu"), [*lines, f"Everything runs on the CPU: {why}."]


def measure_once(request: Load, folder: Path, progress: ProgressCallback) -> list[str]:
    """Measure the experts of the model in ``folder`` on GPU and CPU and keep the figures, unless there are some, or
    nothing to measure. A line for each thing that the person should know.

    Raises ModelError as opening the model does, Cancelled.
    """
    from engine.runtimes.model_headers import read_headers

    graphics = gpu()
    headers = read_headers(folder, request)
    if graphics is None or headers.shape is None:
        return []
    key = calibration_key(headers.sizes.dtype, request.cpu_threads, graphics.name)
    if load_calibration(headers.shape, key) is not None:
        return []
    return _measured(request, folder, headers.sizes.dtype, headers.sizes.experts_per_token, progress)


def _measured(request: Load, folder: Path, dtype: str, experts_per_token: int, progress: ProgressCallback) -> list[str]:
    from engine.calibration.expert_cost import calibration_of, measure
    from engine.calibration.memory_rate import StreamingRead
    from engine.models.opening import open_model
    from engine.moe.kernels.cpu_threads import threads_of
    from engine.moe.kernels.file_guard import unchanged
    from engine.runtimes.torch.offload.measuring_sides import LocalCpuSide, gpu_side

    files = open_model(folder, progress)
    experts = files.experts
    if experts is None:
        return []
    with unchanged(files.mapped_files):
        gpu, lines = gpu_side(experts, dtype, experts_per_token, progress)
        if gpu is None:
            return lines
        try:
            cpu = LocalCpuSide(experts, dtype, experts_per_token, request.cpu_threads)
            memory = StreamingRead(threads_of(request))
            figures = measure(cpu, gpu, memory.rate, time.perf_counter, progress, BUDGET_S)
        finally:
            gpu.close()
    key = calibration_key(dtype, request.cpu_threads, gpu.name)
    try:
        save_calibration(calibration_of(figures, key, shape_of(experts)))
    except (OSError, ValueError) as error:
        return [*lines, f"What {gpu.name} and the CPU take for an expert cannot be kept: {error}."]
    return lines
